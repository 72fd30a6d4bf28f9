"""Gauss-Newton matrix and Hessian against plain autodiff of the module itself."""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import prod

import pytest
import torch
import torch.nn.functional as F
from curvaturecases import close, made, truth
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

import posterity as po
from posterity.curvature import Diagonal, Full, GaussNewton, Hessian, Structure
from posterity.curvature.curvature import Rows
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood, Poisson, StudentT
from posterity.model import Batch
from posterity.numerics import Key

FLOAT64 = torch.float64
ROWS = 7


class Tied(nn.Module):
    """One layer used twice, and an output layer that shares the embedding's weight."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(outputs, 3)
        self.twice = nn.Linear(3, 3)
        self.head = nn.Linear(3, outputs)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens % self.embedding.num_embeddings).mean(1)
        return self.head(self.twice(self.twice(hidden).tanh()).tanh())


class Words(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh().sum(1))


class Recurrent(nn.Module):
    """vmap refuses it, so that rows go one after the other."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(2, 2, batch_first=True)
        self.head = nn.Linear(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def convolutional(outputs: int) -> nn.Module:
    layers = (nn.Conv2d(1, 2, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8, outputs))


def normal_inputs(*shape: int) -> Tensor:
    return Key(1).normal((ROWS, *shape), FLOAT64)


def tokens() -> Tensor:
    return torch.randint(5, (ROWS, 4), generator=Key(2).generator())


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], Tensor]] = {
    "mlp": (mlp, normal_inputs(3)),
    "convolutional": (convolutional, normal_inputs(1, 6, 6)),
    "tied": (Tied, tokens()),
    "embedding": (Words, tokens()),
    "recurrent": (Recurrent, normal_inputs(4, 2)),
}


@dataclass(frozen=True)
class Loss:
    """A likelihood and its negative log density, written with torch alone, up to a constant.

    `fisher` gives the Fisher information of one row where it is not the Hessian whatever the target.
    """

    likelihood: Likelihood
    event: tuple[int, ...]
    targets: Tensor
    rows: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (n,)
    fisher: Callable[[Tensor], Tensor] | None = None


def real(*event: int) -> Tensor:
    return Key(3).normal((ROWS, *event), FLOAT64)


def two_scales(f: Tensor, y: Tensor) -> Tensor:
    return ((f - y) / torch.tensor([0.5, 1.5], dtype=FLOAT64)).square().sum(-1) / 2


def student(f: Tensor, y: Tensor) -> Tensor:
    return 2.5 * torch.log1p(((f - y) / 0.7).square() / 4).sum(-1)


def varying(f: Tensor, y: Tensor) -> Tensor:
    return ((f[:, :1] - y).square() * torch.exp(-2 * f[:, 1:]) / 2 + f[:, 1:]).sum(-1)


LOSSES = {
    "gaussian": Loss(Gaussian(0.7), (1,), real(1), lambda f, y: (f - y).square().sum(-1) / (2 * 0.7**2)),
    "gaussian of two": Loss(Gaussian((0.5, 1.5)), (2,), real(2), two_scales),
    "gaussian on a grid": Loss(Gaussian(0.7), (2, 2), real(2, 2), lambda f, y: (f - y).square().sum((1, 2)) / 0.98),
    "categorical": Loss(
        Categorical(), (3,), torch.arange(ROWS) % 3, lambda f, y: F.cross_entropy(f, y, reduction="none")
    ),
    "categorical at positions": Loss(
        Categorical(positions=1),
        (3, 2),
        torch.arange(2 * ROWS).reshape(ROWS, 2) % 3,
        lambda f, y: F.cross_entropy(f, y, reduction="none").sum(-1),
    ),
    "bernoulli": Loss(
        Bernoulli(),
        (1,),
        (torch.arange(ROWS) % 2).to(FLOAT64).unsqueeze(-1),
        lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="none").squeeze(-1),
    ),
    "poisson": Loss(
        Poisson(),
        (2,),
        (torch.arange(2 * ROWS).reshape(ROWS, 2) % 4).to(FLOAT64),
        lambda f, y: F.poisson_nll_loss(f, y, reduction="none").sum(-1),
    ),
    "student": Loss(
        StudentT(4.0, 0.7), (1,), 3 * real(1), student, lambda f: torch.tensor([[5 / (7 * 0.7**2)]], dtype=FLOAT64)
    ),
    "heteroscedastic": Loss(
        Heteroscedastic(),
        (2,),
        real(1),
        varying,
        lambda f: torch.diag(torch.stack([torch.exp(-2 * f[1]), torch.tensor(2.0, dtype=FLOAT64)])),
    ),
}


@dataclass(frozen=True)
class Problem:
    joint: po.Joint
    theta: Tensor
    batch: Batch
    matrix: dict[str, Tensor]


def problem(network: str, loss: str, weighted: bool = False) -> Problem:
    make, x = NETWORKS[network]
    case = LOSSES[loss]
    module = nn.Sequential(make(prod(case.event)), nn.Unflatten(1, case.event)).double()
    joint = po.Joint(module, case.likelihood, po.priors.Normal(), num_data=50)
    names = [name for name, _ in module.named_parameters()]  # a shared weight once, in module order
    shapes = [parameter.shape for parameter in module.parameters()]
    theta = 0.7 * Key(4).normal((sum(shape.numel() for shape in shapes),), FLOAT64)
    weights = torch.linspace(0.2, 2.0, ROWS, dtype=FLOAT64) if weighted else None
    each = torch.ones(ROWS, dtype=FLOAT64) if weights is None else weights

    def outputs(flat: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in shapes])
        parameters = {name: p.view(shape) for name, p, shape in zip(names, pieces, shapes, strict=True)}
        if network == "tied":
            parameters["0.head.weight"] = parameters["0.embedding.weight"]
        return functional_call(module, parameters, (x,))

    with torch.backends.cudnn.flags(enabled=False):  # its recurrent layers have no second derivatives
        exact = hessian(lambda flat: (each * case.rows(outputs(flat), case.targets)).sum(), theta)
        slopes, values = jacobian(outputs, theta).flatten(1, -2), outputs(theta).flatten(1)  # (n, D, P), (n, D)
    gauss_newton = torch.zeros_like(exact)
    for row in range(ROWS):
        one = case.targets[row : row + 1]
        if case.fisher is None:
            at = hessian(lambda f, one=one: case.rows(f.reshape(1, *case.event), one).sum(), values[row])
        else:
            at = case.fisher(values[row])
        gauss_newton += each[row] * slopes[row].T @ at @ slopes[row]
    return Problem(joint, theta, Batch(x, case.targets, weights), {"hessian": exact, "gauss-newton": gauss_newton})


CURVATURES = {"gauss-newton": GaussNewton(), "hessian": Hessian()}
both = pytest.mark.parametrize("name", CURVATURES)
STRUCTURES: list[Structure] = [Full(), Diagonal()]


@both
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_equals_plain_autodiff(network: str, loss: str, name: str) -> None:
    p = problem(network, loss)
    curvature = CURVATURES[name]
    matrix = curvature.matrix(p.joint, p.theta, p.batch, None)
    assert matrix.dtype == FLOAT64
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix, p.matrix[name], rtol=1e-10, atol=1e-10)
    diagonal = curvature.diagonal(p.joint, p.theta, p.batch, None)
    torch.testing.assert_close(diagonal, p.matrix[name].diagonal(), rtol=1e-10, atol=1e-10)


def test_the_two_differ_where_the_network_bends() -> None:
    p = problem("mlp", "gaussian")
    assert not torch.allclose(p.matrix["hessian"], p.matrix["gauss-newton"], rtol=1e-2)
    assert torch.linalg.eigvalsh(p.matrix["gauss-newton"]).min() > -1e-10


@both
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_are_weighted(loss: str, name: str) -> None:
    p = problem("mlp", loss, weighted=True)
    curvature = CURVATURES[name]
    torch.testing.assert_close(
        curvature.matrix(p.joint, p.theta, p.batch, None), p.matrix[name], rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(
        curvature.diagonal(p.joint, p.theta, p.batch, None), p.matrix[name].diagonal(), rtol=1e-10, atol=1e-10
    )


@both
def test_part_of_the_weights_is_a_block(name: str) -> None:
    p = problem("mlp", "categorical")
    curvature = CURVATURES[name]
    for joint, theta, block in (
        (p.joint.with_weights(random="0.2.*"), p.theta, slice(16, None)),
        (p.joint.with_weights(random="0.0.bias"), p.theta, slice(12, 16)),
    ):
        torch.testing.assert_close(
            curvature.matrix(joint, theta, p.batch, None), p.matrix[name][block, block], rtol=1e-10, atol=1e-10
        )


@both
def test_learnt_noise_is_taken_from_theta(name: str) -> None:
    p = problem("mlp", "gaussian")
    learnt = po.Joint(p.joint.network, Gaussian(5.0, learn=True), po.priors.Normal(), num_data=50)
    theta = torch.cat([p.theta, torch.tensor([0.7], dtype=FLOAT64).log()])
    torch.testing.assert_close(
        CURVATURES[name].matrix(learnt, theta, p.batch, None), p.matrix[name], rtol=1e-10, atol=1e-10
    )


def members_of(p: Problem) -> Tensor:
    return p.theta + 0.3 * Key(5).normal((4, p.theta.shape[0]), FLOAT64)


def laplace(name: str, structure: Structure = STRUCTURES[0]) -> po.methods.Laplace:
    return po.methods.Laplace(tuning=None, curvature=CURVATURES[name], structure=structure, batch_size=3)


def covariances(p: Problem, name: str, structure: Structure, theta: Tensor, prior: float = 0.05) -> Tensor:
    """Of a posterior so narrow that the Hessian, too, is positive definite."""
    joint = dataclasses.replace(p.joint, prior=po.priors.Normal(prior), num_data=ROWS)
    data = (p.batch.inputs, p.batch.targets) if p.batch.weights is None else tuple(p.batch[:3])
    q, _ = po.infer(laplace(name, structure), joint, data, start=theta)
    return q.gaussian.precision.covariance()


@both
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("network", NETWORKS)
def test_members_equal_a_loop_over_them(network: str, structure: Structure, name: str) -> None:
    p = problem(network, "categorical", weighted=True)
    theta = members_of(p)
    together = covariances(p, name, structure, theta)
    looped = torch.stack([covariances(p, name, structure, one) for one in theta])
    torch.testing.assert_close(together, looped, rtol=1e-10, atol=1e-12)
    wanted = p.matrix[name] + 400 * torch.eye(len(p.theta))
    if isinstance(structure, Diagonal):
        wanted = torch.diag(wanted.diagonal())
    torch.testing.assert_close(covariances(p, name, structure, p.theta), wanted.inverse(), rtol=1e-9, atol=1e-12)


@both
@pytest.mark.parametrize("weighted", [True, False])
def test_members_with_rows_of_their_own_equal_a_loop(weighted: bool, name: str) -> None:
    p = problem("mlp", "gaussian of two", weighted)
    theta = members_of(p)
    joint = dataclasses.replace(p.joint, prior=po.priors.Normal(0.05), num_data=ROWS)
    batches = [p.batch.map(lambda t, shift=shift: t.roll(shift, 0)) for shift in range(4)]
    batches = [batch._replace(targets=batch.targets.roll(1, 0)) for batch in batches]
    parts = [list(field) for field in zip(*(batch[:3] for batch in batches), strict=True)]
    stacked = tuple(torch.stack(field) for field in parts[: 3 if weighted else 2])
    together, _ = po.infer(laplace(name), joint, po.as_data(stacked, per_member=True), start=theta)
    for index, batch in enumerate(batches):
        alone, _ = po.infer(laplace(name), joint, tuple(batch[: 3 if weighted else 2]), start=theta[index])
        torch.testing.assert_close(
            together.member(index).gaussian.precision.covariance(),
            alone.gaussian.precision.covariance(),
            rtol=1e-10,
            atol=1e-12,
        )


@both
def test_members_with_a_likelihood_of_their_own_equal_a_loop(name: str) -> None:
    p = problem("mlp", "gaussian")
    theta = members_of(p)
    scales = torch.linspace(0.5, 2.0, 4, dtype=FLOAT64)
    data = (p.batch.inputs, p.batch.targets)
    joint = po.Joint(p.joint.network, Gaussian(scales[:, None, None]), po.priors.Normal(0.05), num_data=ROWS)
    together, _ = po.infer(laplace(name), joint, data, start=theta)
    for index, scale in enumerate(scales.tolist()):
        one = po.Joint(p.joint.network, Gaussian(scale), po.priors.Normal(0.05), num_data=ROWS)
        alone, _ = po.infer(laplace(name), one, data, start=theta[index])
        torch.testing.assert_close(
            together.member(index).gaussian.precision.covariance(),
            alone.gaussian.precision.covariance(),
            rtol=1e-10,
            atol=1e-12,
        )


@both
@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_of_any_size_add_up(loss: str, name: str) -> None:
    p = problem("mlp", loss, weighted=True)
    big = p.batch.map(lambda t: t.repeat(5, *[1] * (t.dim() - 1)))  # 35 rows, in chunks of 16 at least
    for budget in (1, 10_000, None):
        rows = Rows(CURVATURES[name], p.joint, p.theta, big, None, Key(0), budget)
        torch.testing.assert_close(rows.matrix(), 5 * p.matrix[name], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(rows.diagonal(), 5 * p.matrix[name].diagonal(), rtol=1e-10, atol=1e-10)


@both
@pytest.mark.parametrize("network", NETWORKS)
def test_products_and_slopes(network: str, name: str) -> None:
    p = problem(network, "categorical", weighted=True)
    rows = Rows(CURVATURES[name], p.joint, p.theta, p.batch, None, Key(0))
    vectors = Key(6).normal((3, len(p.theta)), FLOAT64)
    torch.testing.assert_close(rows.products(vectors), vectors @ p.matrix[name], rtol=1e-10, atol=1e-10)
    leaf = p.theta.clone().requires_grad_()
    each = p.joint.likelihood.log_prob(p.joint.outputs(leaf, p.batch.inputs), p.batch.targets)
    total = (each * p.batch.weights).sum()
    (slope,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(rows.log_likelihood(), total.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows.slope(), slope, rtol=1e-10, atol=1e-10)


def test_float32_is_summed_in_float64() -> None:
    p = problem("mlp", "categorical")
    single = po.Joint(nn.Sequential(mlp(3)), Categorical(), po.priors.Normal(), num_data=50)
    batch = p.batch._replace(inputs=p.batch.inputs.float())
    for name, curvature in CURVATURES.items():
        matrix = curvature.matrix(single, p.theta.float(), batch, None)
        assert matrix.dtype == FLOAT64
        torch.testing.assert_close(matrix, p.matrix[name], rtol=1e-4, atol=1e-4)


@pytest.mark.cpu  # which kernels refuse differs by device
def test_a_fallback_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 1, dtype=FLOAT64))

        def forward(self, x: Tensor) -> Tensor:
            sign = 1.0 if bool(x.isfinite().all()) else -1.0  # vmap cannot decide it
            return sign * x @ self.weight.exp()

    import_module("posterity.curvature.explicit")._log_once.cache_clear()
    joint = po.Joint(Looking(), Gaussian(), po.priors.Normal(), num_data=ROWS)
    batch = Batch(torch.ones(ROWS, 3, dtype=FLOAT64), torch.zeros(ROWS, 1, dtype=FLOAT64))
    with caplog.at_level(logging.WARNING, logger="posterity"):
        for _ in range(3):
            GaussNewton().matrix(joint, joint.initial(), batch, None)
    (record,) = caplog.records
    assert "rows go one after the other" in record.getMessage()
    assert "vmap refused" in record.getMessage()


def test_hooks_that_ask_for_gradients_do_no_harm() -> None:
    """Models of transformers and peft have such hooks where they were trained with activation checkpointing."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places, self.head = nn.Embedding(5, 3), nn.Embedding(4, 3), nn.Linear(3, 2)
            self.tokens.register_forward_hook(lambda module, args, output: output.requires_grad_(True))

        def forward(self, tokens: Tensor) -> Tensor:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            return self.head((self.tokens(tokens) + self.places(places).square()).tanh().sum(1))

    tokens = (5 * Key(0).uniform((ROWS, 4))).long().to(torch.get_default_device())
    case = truth(made(Positions), tokens)
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_operations_without_second_derivatives_are_said() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(5, 3, mode="mean"), nn.Linear(3, 2)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.words(words))

    words = (5 * Key(0).uniform((ROWS, 4))).long().to(torch.get_default_device())
    case = truth(made(Bag), words)
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
    rows = Rows(GaussNewton(), case.joint, case.theta, case.batch, None, Key(0))
    with pytest.raises(ValueError, match=r"Use the structure Full\(\), Kronecker\(\) or Diagonal\(\)"):
        rows.products(torch.ones(1, rows.size, dtype=FLOAT64))
    with pytest.raises(ValueError, match=r"Use the curvature GaussNewton\(\)"):
        Hessian().matrix(case.joint, case.theta, case.batch, None)


def test_a_module_at_fault_is_not_taken_for_a_refusal() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                raise RuntimeError("one row is not enough")
            return x @ self.layer.weight.exp().T  # no rule, so rows go one by one

    joint = po.Joint(Broken().double(), Gaussian(), po.priors.Normal(), num_data=ROWS)
    batch = Batch(normal_inputs(3), torch.zeros(ROWS, 1, dtype=FLOAT64))
    with pytest.raises(RuntimeError, match="one row is not enough"):
        GaussNewton().matrix(joint, joint.initial(), batch, None)


def test_densities_have_a_hessian_alone() -> None:
    density = po.Density(lambda u: -(u**4).sum(), {"u": (2,)}, dtype=FLOAT64)
    theta = torch.tensor([1.0, 2.0], dtype=FLOAT64)
    torch.testing.assert_close(Hessian().matrix(density, theta, None, None), torch.diag(12 * theta.square()))
    torch.testing.assert_close(Hessian().diagonal(density, theta, None, None), 12 * theta.square())
    members, _ = po.infer(po.methods.Laplace(curvature=Hessian()), density, None, start=torch.stack([theta, 2 * theta]))
    torch.testing.assert_close(members.precision.diagonal(), torch.stack([12 * theta.square(), 48 * theta.square()]))
    for ask in (GaussNewton().matrix, GaussNewton().diagonal):
        with pytest.raises(TypeError, match=r"no GaussNewton matrix\. Use the curvature Hessian\(\)"):
            ask(density, theta, None, None)


@both
def test_curvatures_are_values(name: str) -> None:
    curvature = CURVATURES[name]
    assert type(curvature)() == curvature
    assert eval(repr(curvature), vars(po.curvature)) == curvature
    assert hash(type(curvature)()) == hash(curvature)
