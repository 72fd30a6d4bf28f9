"""Laplace on what it cannot or should not do: one line that says what was wanted, what came, and what to do."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import posterity as po
from posterity.curvature import (
    BlockDiagonal,
    CorrectedKronecker,
    Diagonal,
    EmpiricalFisher,
    Full,
    GaussNewton,
    Hessian,
    Hutchinson,
    Kronecker,
    LowRank,
    MonteCarloFisher,
)
from posterity.curvature.survey import _refuse_mixing, survey
from posterity.errors import BadData
from posterity.methods import MAP, Laplace, LargestVariance, LastLayer, Matching
from posterity.numerics import Key

FLOAT64 = torch.float64
ROWS = 12
X = Key(0).normal((ROWS, 3), FLOAT64)
Y = X.sum(-1, keepdim=True).sin()


class After(nn.Module):
    """A linear layer, and a function of its outputs and inputs."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def joint(module=None, likelihood=None, prior=None, **options) -> po.Joint:
    module = (nn.Linear(3, 1) if module is None else module).double()
    likelihood, prior = likelihood or po.likelihoods.Gaussian(0.3), prior or po.priors.Normal(1.0)
    return po.Joint(module, likelihood, prior, ROWS, **options)


def laplace(problem=None, data=(X, Y), start=None, **options):
    return po.infer(Laplace(tuning=None, **options), problem or joint(), data, start=start, progress=False)[0]


CURVATURES = [GaussNewton(), Hessian()]
every_curvature = pytest.mark.parametrize("curvature", CURVATURES, ids=str)


@every_curvature
@pytest.mark.parametrize(
    "function",
    [
        lambda h: F.dropout(h, 0.5, training=True),
        lambda h: F.dropout(h, 0.001, training=True),  # two rows are rarely touched
        lambda h: h + torch.rand_like(h),
        lambda h: h * (1 + 1e-9 * torch.randn(1, dtype=h.dtype)),
        lambda h: h * torch.empty_like(h).bernoulli_(0.999),
    ],
    ids=["dropout", "rare dropout", "uniform noise", "tiny noise", "in place"],
)
def test_randomness_in_evaluation_mode_is_refused(function, curvature) -> None:
    with pytest.raises(ValueError, match=r"draws random numbers even in evaluation mode.*torch\.nn\.Dropout"):
        laplace(joint(After(function)), curvature=curvature)


@pytest.mark.cpu  # the generator is
def test_randomness_of_another_generator_is_refused() -> None:
    own = torch.Generator().manual_seed(0)
    module = After(lambda h: h + torch.randn(h.shape, generator=own, dtype=h.dtype))
    module.__class__ = type("Own", (After,), {"__deepcopy__": lambda self, memo: self})  # generators do not copy
    with pytest.raises(ValueError, match="draws random numbers even in evaluation mode"):
        laplace(joint(module))


def test_tracked_dropout_is_off() -> None:
    module = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)).train()
    plain = laplace(joint(nn.Sequential(nn.Linear(3, 1))), start=torch.zeros(4, dtype=FLOAT64))
    dropped = laplace(joint(module), start=torch.zeros(4, dtype=FLOAT64))
    assert torch.equal(plain.gaussian.precision.covariance(), dropped.gaussian.precision.covariance())


@every_curvature
@pytest.mark.parametrize(
    "function",
    [
        lambda h: h - h.mean(0),
        lambda h: h.softmax(0),
        lambda h: h.cumsum(0),
        lambda h: h.flip(0).cumsum(0).flip(0),
        lambda h: h.flip(0),
        lambda h: h.roll(1, 0),
        lambda h: F.batch_norm(h, None, None, training=True),
    ],
    ids=["mean", "softmax", "before", "after", "flip", "roll", "batch norm by hand"],
)
def test_modules_that_mix_rows_are_refused(function, curvature) -> None:
    with pytest.raises(ValueError, match=r"mixes the rows of a batch.*track_running_stats=True"):
        laplace(joint(After(function)), curvature=curvature)


def test_batch_norm_of_batch_statistics_is_refused() -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with pytest.raises(ValueError, match=r"factorises over rows.*Make it with track_running_stats=True"):
        laplace(joint(nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 1))))


class Routed(nn.Module):
    """Rows below zero in the first column go past the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        through = x[:, :1] >= 0
        return torch.zeros_like(x[:, :1]).masked_scatter(through, self.layer(x[through[:, 0]]))


class Repeated(nn.Module):
    """A layer that runs again where a batch has a row below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        again = bool((x[:, 0] < 0).any())
        hidden = self.layer(x).tanh()
        return (self.layer(hidden) if again else hidden)[:, :1]


@pytest.mark.parametrize("structure", [Full(), Kronecker()], ids=str)
def test_layers_that_run_otherwise_than_on_the_first_rows_are_refused(structure) -> None:
    x = X.clone()
    x[:, 0] = x[:, 0].abs()
    x[7, 0] = -1.0
    with pytest.raises(ValueError, match=r"'layer\.weight' must run on all rows of a batch\. It ran on 11 of 12"):
        laplace(joint(Routed()), (x, Y), structure=structure)
    with pytest.raises(ValueError, match=r"'layer\.weight' must be used equally often .* used it 2 times"):
        laplace(joint(Repeated()), (x, Y), structure=structure)


@pytest.mark.parametrize("structure", [Kronecker(), CorrectedKronecker()], ids=str)
def test_a_hessian_has_no_columns(structure) -> None:
    with pytest.raises(ValueError, match=r"Hessian\(\) has none\. Use GaussNewton\(\)"):
        Laplace(structure=structure, curvature=Hessian())
    with pytest.raises(TypeError, match=r"no columns.*Use GaussNewton\(\) .* Full\(\), BlockDiagonal\(\)"):
        Hessian().columns(po.likelihoods.Gaussian(), X, X, Key(0))


def test_low_rank_of_a_matrix_that_changes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LowRank.*same matrix in every pass.*draws another.*Use GaussNewton\(\)"):
        Laplace(structure=LowRank(3), curvature=MonteCarloFisher())


def density() -> po.Density:
    return po.Density(lambda u, v: -(u**2).sum() - 2 * (v**2).sum(), {"u": (2,), "v": (2,)}, dtype=FLOAT64)


@pytest.mark.parametrize(
    "options",
    [{"structure": s} for s in (BlockDiagonal(), LowRank(2))]
    + [{"subset": s} for s in (LastLayer(), Matching("u"), LargestVariance(2))],
    ids=str,
)
def test_a_density_has_no_layers(options) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=rf"takes structure Full\(\), .* Got {name} {type(value).__name__}\("):
        po.infer(Laplace(curvature=Hessian(), **options), density(), None, progress=False)


@pytest.mark.parametrize("structure", [None, Full(), Kronecker(), CorrectedKronecker(), BlockDiagonal()], ids=str)
def test_a_density_has_no_columns(structure) -> None:
    with pytest.raises(TypeError, match=r"no network outputs, so no GaussNewton matrix\. Use the curvature Hessian"):
        po.infer(Laplace(structure=structure), density(), None, progress=False)


@pytest.mark.parametrize("structure", [None, Full(), Diagonal(), Hutchinson(3)], ids=str)
@pytest.mark.parametrize("start", [torch.zeros(4, dtype=FLOAT64), torch.zeros(2, 4, dtype=FLOAT64)], ids=["one", "two"])
def test_a_density_in_the_structures_that_it_has(structure, start) -> None:
    q, _ = po.infer(Laplace(curvature=Hessian(), structure=structure), density(), None, start=start, progress=False)
    wanted = torch.tensor([2.0, 2.0, 4.0, 4.0], dtype=FLOAT64).expand(*start.shape)
    torch.testing.assert_close(q.precision.diagonal(), wanted, rtol=1e-12, atol=0.0)


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(outputs - targets).square().sum(-1)


def test_a_likelihood_without_a_sampler_has_a_hessian_and_an_empirical_fisher() -> None:
    problem = joint(likelihood=po.likelihoods.Custom(square))
    for curvature in (GaussNewton(), MonteCarloFisher()):
        with pytest.raises(TypeError, match=r"needs sampler\. Got none\. .* Hessian\(\) and EmpiricalFisher\(\) need"):
            laplace(problem, curvature=curvature)
    design = torch.cat([X, torch.ones(ROWS, 1, dtype=FLOAT64)], -1)
    exact = laplace(problem, curvature=Hessian()).gaussian.precision.covariance()
    torch.testing.assert_close(exact.inverse(), 2 * design.T @ design + torch.eye(4, dtype=FLOAT64))
    laplace(problem, curvature=EmpiricalFisher())


def test_an_indefinite_hessian_is_no_silent_answer() -> None:
    bent = po.likelihoods.Custom(lambda f, y: 5 * (f - y).square().sum(-1))
    for structure in (Full(), Diagonal(), BlockDiagonal(), Hutchinson(64)):
        with pytest.raises(po.errors.NotPositiveDefinite, match=r"not at a mode|Gauss-Newton|train longer"):
            laplace(joint(likelihood=bent), curvature=Hessian(), structure=structure)


@pytest.mark.parametrize("structure", [Kronecker(), CorrectedKronecker(), BlockDiagonal()], ids=str)
def test_structures_of_tensors_take_no_single_weights(structure) -> None:
    with pytest.raises(ValueError, match=r"chooses single weights\. Use the structure Full\(\) or Diagonal\(\)"):
        laplace(structure=structure, subset=LargestVariance(2))


class _Swapping(nn.Module):
    """Two layers of one shape whose order follows from the length of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.first, self.second) if x.shape[1] < 4 else (self.second, self.first)
        return layers[1](torch.tanh(layers[0](x))).mean(1)


@pytest.mark.parametrize("structure", [Kronecker(), CorrectedKronecker(), BlockDiagonal()], ids=str)
def test_layers_that_change_with_the_shape_of_the_inputs(structure) -> None:
    rows = [(torch.ones(3 + 2 * (i // 4), 2), torch.zeros(2)) for i in range(8)]
    problem = po.Joint(_Swapping(), po.likelihoods.Gaussian(scale=1.0), po.priors.Normal(), num_data=8)
    with pytest.raises(ValueError, match=r"change with the shape of the inputs\. Pad"):
        po.infer(Laplace(structure=structure), problem, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    po.infer(Laplace(structure=Diagonal()), problem, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", [Kronecker(), CorrectedKronecker()], ids=str)
def test_kronecker_needs_a_prior_that_is_an_outer_product(structure) -> None:
    scale = torch.arange(1.0, 9.0, dtype=FLOAT64).view(1, 8)
    problem = joint(nn.Linear(3, 2), prior=po.priors.Normal(scale))
    with pytest.raises(ValueError, match=r"outer product.*"):
        laplace(problem, (X, Y.expand(ROWS, 2)), structure=structure)
    assert laplace(problem, (X, Y.expand(ROWS, 2)), structure=BlockDiagonal()).gaussian.precision.size == 8


@pytest.mark.parametrize("value", [-1.0, torch.nan, torch.inf])
def test_weights_of_rows_must_be_finite_and_not_negative(value) -> None:
    weights = torch.ones(ROWS, dtype=FLOAT64)
    weights[3] = value
    with pytest.raises(BadData, match="weights must be one finite number >= 0 for each row"):
        laplace(data=(X, Y, weights))


def test_a_loader_of_unknown_length_must_give_the_rows_of_the_joint() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(X[1:], Y[1:], strict=True)

    with pytest.raises(BadData, match=rf"must give num_data = {ROWS} rows\. Got {ROWS - 1}"):
        laplace(data=DataLoader(Stream(), batch_size=4))


def test_subsets_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"must be at most the number of weights, 4\. Got 20\. Use AllWeights\(\)"):
        laplace(subset=LargestVariance(20))
    with pytest.raises(ValueError, match=r"No last layer was found.*subset=Matching\('head\.\*'\)"):
        laplace(joint(nn.PReLU(3)), (X, X), subset=LastLayer())
    two = joint(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), random="0.*")
    with pytest.raises(ValueError, match=r"last layer \(1\.weight, 1\.bias\) is not among the random weights"):
        laplace(two, subset=LastLayer())
    with pytest.raises(ValueError, match=r"Unknown parameter 'tail\.\*'\. Known: bias, weight"):
        laplace(subset=Matching("tail.*"))
    with pytest.raises(ValueError, match=r"LargestVariance\(number=2\) chooses weights for one theta at a time"):
        laplace(subset=LargestVariance(2), start=torch.zeros(2, 4, dtype=FLOAT64))


def wide() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 1)).double()


ALL = [Full(), Diagonal(), BlockDiagonal(), Kronecker(), CorrectedKronecker(), LowRank(4), Hutchinson(2)]


@pytest.mark.parametrize("structure", ALL, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_weights_far_from_a_mode_are_told_with_distance_and_gradient(structure, large, caplog) -> None:
    module = wide() if large else nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    problem = joint(module)
    assert not large or problem.num_weights > 20_000
    if isinstance(structure, BlockDiagonal) and large:
        structure = Kronecker(factored_damping=True)  # blocks of 20,000 weights take 13 GB
    with caplog.at_level(logging.WARNING, logger="posterity"):
        laplace(problem, (X, Y + 100), structure=structure)
    (record,) = caplog.records
    message = record.getMessage()
    assert "not at a mode" in message
    assert "standard deviations from it (gradient norm" in message
    assert "Train longer, or start from the posterior of MAP" in message


def test_the_gradient_norm_is_that_of_the_log_posterior(caplog) -> None:
    problem = joint(wide())
    theta = problem.initial()
    _, grad, _ = problem.value_and_grad(theta, po.model.Batch(X, Y + 100))
    for structure, size in ((LowRank(4), problem.num_weights), (Kronecker(), 201)):
        caplog.clear()
        laplace(problem, (X, Y + 100), structure=structure, batch_size=5)
        assert f"gradient norm {float(grad[-size:].norm()):.3g}" in caplog.text  # of the output layer alone, or of all


@pytest.mark.parametrize("structure", ALL, ids=lambda s: type(s).__name__)
def test_at_a_mode_nothing_is_said(structure, caplog) -> None:
    problem = joint(nn.Sequential(nn.Linear(3, 1)))
    optimizer = po.optim.SGD(0.02, momentum=0.8)
    start, _ = po.infer(MAP(steps=300, batch_size=None, optimizer=optimizer), problem, (X, Y), progress=False)
    caplog.clear()
    laplace(problem, structure=structure, start=start)
    assert not caplog.records


def test_a_large_network_at_a_mode_of_its_output_layer_is_not_warned_of(caplog) -> None:
    """The output layer solved exactly, the rest as it is: that is all that is looked at."""
    problem = joint(wide())
    theta = problem.initial()
    features = problem.network._module[:4](X).detach()
    design = torch.cat([features, torch.ones(ROWS, 1, dtype=FLOAT64)], -1) / 0.3
    precision = design.T @ design + torch.eye(201, dtype=FLOAT64)
    theta[-201:] = torch.linalg.solve(precision, design.T @ (Y / 0.3)).squeeze(-1)
    caplog.clear()
    laplace(problem, start=theta)
    assert not caplog.records


def test_half_precision_is_refused() -> None:
    net = torch.nn.Linear(2, 1).to(torch.bfloat16)
    joint = po.Joint(net, po.likelihoods.Gaussian(), po.priors.Normal(), 4)
    rows = torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4, 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32 or float64.*module\.float\(\)"):
        po.infer(po.methods.Laplace(), joint, rows)


def test_corrected_factors_cannot_be_tuned_by_tensor() -> None:
    with pytest.raises(ValueError, match=r"PerLayer\(\)"):
        po.methods.Laplace(
            structure=po.curvature.CorrectedKronecker(), tuning=po.evidence.Evidence(groups=po.evidence.PerTensor())
        )


def test_a_prior_without_factors_is_refused_before_the_first_row_is_added(monkeypatch) -> None:
    joint = po.Joint(torch.nn.Linear(2, 3), po.likelihoods.Gaussian(), po.priors.StudentT(4.0), 5)
    monkeypatch.setattr("posterity.curvature.kronecker.add_factors", lambda *_: pytest.fail("rows were added"))
    with pytest.raises(ValueError, match="outer product"):
        po.infer(po.methods.Laplace(structure=po.curvature.Kronecker()), joint, (torch.randn(5, 2), torch.randn(5, 3)))


def test_the_last_layer_is_one_that_reaches_the_outputs() -> None:
    class WithAside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.aside = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs = self.head(x)
            self.aside(x)
            return outputs

    joint = po.Joint(WithAside(), po.likelihoods.Gaussian(), po.priors.Normal(), 5)
    q, _ = po.infer(
        po.methods.Laplace(subset=po.methods.LastLayer(), tuning=None), joint, (torch.randn(5, 2), torch.randn(5, 1))
    )
    assert [part.name for part in q.joint.random_slices] == ["head.weight", "head.bias"]


def test_a_large_network_without_a_linear_end_is_looked_at_whole(caplog) -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv1d(1, 4200, 3), torch.nn.Tanh(), torch.nn.Conv1d(4200, 1, 3), torch.nn.Flatten()
    )
    joint = po.Joint(net, po.likelihoods.Gaussian(0.1), po.priors.Normal(), 6)
    assert joint.num_weights > 20_000
    method = po.methods.Laplace(structure=po.curvature.Diagonal(), tuning=None)
    po.infer(method, joint, (torch.randn(6, 1, 6), torch.full((6, 2), 100.0)))
    assert "not at a mode" in caplog.text


def test_rows_that_are_mixed_are_seen_though_the_first_are_equal() -> None:
    class Centred(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 1)
            torch.nn.init.ones_(self.head.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x - x.mean(0))

    x = torch.arange(24.0).view(12, 2)
    x[:4] = x[0]
    joint = po.Joint(Centred(), po.likelihoods.Gaussian(), po.priors.Normal(), 12)
    with pytest.raises(ValueError, match="mixes the rows"):
        po.infer(po.methods.Laplace(), joint, (x, torch.randn(12, 1)))


@pytest.mark.parametrize("chosen", ["for all devices", "for CUDA alone"])
def test_rows_are_told_apart_without_tf32_which_a_user_has_turned_on(chosen) -> None:
    """TF32 rounds the rows of another batch otherwise, by more than the rows of a module that mixes them differ."""
    seen = []

    class Looking(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return super().forward(x)

    problem = po.Joint(Looking(2, 1), po.likelihoods.Gaussian(1.0), po.priors.Normal(1.0), 12)
    try:
        if chosen == "for all devices":
            torch.set_float32_matmul_precision("high")
        else:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        survey(problem, torch.randn(12, 2))
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
    assert seen[-2:] == ["ieee", "ieee"]


def test_rounding_in_half_precision_is_not_taken_for_mixing_rows() -> None:
    outputs = torch.linspace(-1.0, 1.0, 40).view(2, 20)
    with torch.no_grad():
        _refuse_mixing(outputs.bfloat16(), (outputs * (1.0 + 2.0**-7)).bfloat16())
        with pytest.raises(ValueError, match="mixes the rows"):
            _refuse_mixing(outputs.bfloat16(), (outputs * 1.2).bfloat16())
        with pytest.raises(ValueError, match="mixes the rows"):
            _refuse_mixing(outputs, outputs * (1.0 + 2.0**-7))
