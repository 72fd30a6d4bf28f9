"""What every likelihood must do; a new likelihood is one row of CASES and its refusals rows of REFUSALS."""

import copy
import itertools
import pickle
from dataclasses import dataclass

import pytest
import torch
from hyperbolic import hyperbolic, log_density
from torch import Tensor

from posterity.errors import BadData
from posterity.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    Poisson,
    Probit,
    StudentT,
)
from posterity.numerics.random import Key


def real_line(dims: int, reach: float = 12.0) -> tuple[Tensor, Tensor]:
    """Points (K, dims) and the volume of one cell: the trapezoid rule on a box that holds the noise."""
    axis = torch.linspace(-reach, reach, 241 if reach < 13.0 else 401, dtype=torch.float64)
    return torch.cartesian_prod(*[axis] * dims).reshape(-1, dims), (axis[1] - axis[0]) ** dims


def long_line(dims: int, nodes: int, reach: float = 12.0) -> tuple[Tensor, Tensor]:
    """Points (K, dims) and the volume of each, (K,): the trapezoid rule in asinh(y), for noise with long tails."""
    axis = torch.linspace(-reach, reach, nodes, dtype=torch.float64)
    volume = axis.cosh() * (axis[1] - axis[0])
    points = torch.cartesian_prod(*[axis.sinh()] * dims).reshape(-1, dims)
    return points, torch.cartesian_prod(*[volume] * dims).reshape(-1, dims).prod(-1)


def labels(*values: object) -> tuple[Tensor, Tensor]:
    return torch.tensor(values), torch.tensor(1.0, dtype=torch.float64)


def every(values: int, *event: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """All targets of an event whose entries are 0 .. values - 1."""
    size = torch.Size(event).numel()
    points = torch.tensor(list(itertools.product(range(values), repeat=size)), dtype=dtype)
    return points.reshape(-1, *event), torch.tensor(1.0, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A likelihood, the event shape of its outputs, and all targets of one row with the volume of each.

    `fisher_draws` is the number of draws its Fisher information averages over, where it is an average.
    """

    name: str
    likelihood: Likelihood
    event: tuple[int, ...]
    support: tuple[Tensor, Tensor]
    fisher_draws: int | None = None

    def fisher(self, outputs: Tensor) -> Tensor:
        return self.likelihood.output_fisher(outputs, len(self.event))

    def fisher_error(self, products: Tensor) -> Tensor | float:
        """Standard error of the Fisher information, from products of scores (n, D, D)."""
        return 0.0 if self.fisher_draws is None else products.std(0) / self.fisher_draws**0.5


CASES = [
    Case("gaussian", Gaussian(0.7), (1,), real_line(1)),
    Case("gaussian without event axis", Gaussian(0.7), (), (real_line(1)[0][:, 0], real_line(1)[1])),
    Case("gaussian per output", Gaussian((0.5, 1.3)), (2,), real_line(2)),
    Case("gaussian tensor scale", Gaussian(torch.tensor([0.5, 1.25])), (2,), real_line(2)),
    Case("gaussian learnt", Gaussian(0.8, learn=True, log_scale_prior=(-1.0, 0.5)), (2,), real_line(2)),
    Case("gaussian learnt per output", Gaussian((0.5, 1.3), learn=True), (2,), real_line(2)),
    Case("categorical", Categorical(), (4,), labels(0, 1, 2, 3)),
    Case("bernoulli", Bernoulli(), (1,), labels([0.0], [1.0])),
    Case("bernoulli without event axis", Bernoulli(), (), labels(0.0, 1.0)),
    Case("probit", Probit(), (1,), labels([0.0], [1.0])),
    Case("probit without event axis", Probit(), (), labels(0.0, 1.0)),
    Case("probit of many labels", Probit(), (3,), every(2, 3)),
    Case("gaussian of an image", Gaussian(0.7), (2, 1), (real_line(2)[0].unsqueeze(-1), real_line(2)[1])),
    Case("categorical of tokens", Categorical(positions=1), (3, 2), every(3, 2, dtype=torch.int64)),
    Case("categorical of pixels", Categorical(positions=2), (2, 2, 3), every(2, 2, 3, dtype=torch.int64)),
    Case("bernoulli of many labels", Bernoulli(), (3,), every(2, 3)),
    Case("bernoulli of a mask", Bernoulli(), (2, 2), every(2, 2, 2)),
    Case("student t", StudentT(10.0, 0.7), (1,), long_line(1, 2001)),
    Case("student t without event axis", StudentT(9.0, 0.7), (), (long_line(1, 2001)[0][:, 0], long_line(1, 2001)[1])),
    Case("student t per output", StudentT(12.0, (0.5, 1.3)), (2,), long_line(2, 401, 8.0)),
    Case("student t learnt", StudentT(10.0, 0.8, learn=True, log_scale_prior=(-1.0, 0.5)), (1,), long_line(1, 2001)),
    Case("student t learnt per output", StudentT(10.0, (0.5, 1.3), learn=True), (2,), long_line(2, 401, 8.0)),
    Case("heteroscedastic", Heteroscedastic(), (2,), long_line(1, 4001)),
    Case("heteroscedastic of two", Heteroscedastic(), (4,), long_line(2, 801, 6.0)),
    Case("poisson", Poisson(), (1,), every(200, 1)),
    Case("poisson without event axis", Poisson(), (), every(200)),
    Case("poisson of two", Poisson(), (2,), every(120, 2)),
    Case("custom", hyperbolic(100), (1,), real_line(1, 60.0), 100),
    Case("custom of two", hyperbolic(100), (2,), real_line(2, 60.0), 100),
]

FLOAT64 = torch.float64
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def outputs_of(case: Case, rows: int = 5, lead: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Tensor:
    return (
        Key(3).fold(case.name).normal((*lead, rows, *case.event), torch.float64, torch.get_default_device()).to(dtype)
    )


def targets_of(case: Case, outputs: Tensor) -> Tensor:
    return case.likelihood.check(outputs, case.likelihood.sample(outputs, Key(4)))


def many_rows(case: Case, count: int = 20_000) -> Tensor:
    """One random row of outputs, repeated."""
    return outputs_of(case, rows=1).expand(count, *case.event)


def autodiff_hessian(case: Case, outputs: Tensor, targets: Tensor) -> Tensor:
    def negative(flat: Tensor, row: int) -> Tensor:
        return -case.likelihood.log_prob(flat.reshape(1, *case.event), targets[row : row + 1])[0]

    return torch.stack(
        [
            torch.autograd.functional.hessian(lambda flat, row=row: negative(flat, row), outputs[row].reshape(-1))
            for row in range(len(outputs))
        ]
    )


def score_products(case: Case, outputs: Tensor, targets: Tensor) -> Tensor:
    """Products (n, D, D) of the entries of the gradient of each row's log density."""
    leaf = outputs.clone().requires_grad_()
    (score,) = torch.autograd.grad(case.likelihood.log_prob(leaf, targets).sum(), leaf)
    score = score.reshape(len(score), -1)
    return score.unsqueeze(-1) * score.unsqueeze(-2)


@every_case
def test_output_hessian_equals_autodiff(case: Case) -> None:
    outputs = outputs_of(case)
    targets = targets_of(case, outputs)
    hessian = case.likelihood.output_hessian(outputs, targets)
    torch.testing.assert_close(hessian, autodiff_hessian(case, outputs, targets), rtol=1e-10, atol=1e-10)


@every_case
def test_output_fisher_is_the_expected_hessian(case: Case) -> None:
    outputs = many_rows(case)
    targets = case.likelihood.sample(outputs, Key(5))
    hessians = case.likelihood.output_hessian(outputs, targets)
    error = torch.hypot(
        hessians.std(0) / len(outputs) ** 0.5,
        torch.as_tensor(case.fisher_error(score_products(case, outputs, targets))),
    )
    fisher = case.fisher(outputs[:1])[0]
    assert ((hessians.mean(0) - fisher).abs() <= 5.0 * error + 1e-12).all()


@every_case
def test_output_fisher_is_the_covariance_of_the_score(case: Case) -> None:
    outputs = many_rows(case)
    products = score_products(case, outputs, case.likelihood.sample(outputs, Key(6)))
    error = torch.hypot(products.std(0) / len(products) ** 0.5, torch.as_tensor(case.fisher_error(products)))
    fisher = case.fisher(outputs[:1])[0]
    assert ((products.mean(0) - fisher).abs() <= 5.0 * error + 1e-12).all()
    assert torch.linalg.eigvalsh(fisher).min() >= -1e-12


@every_case
@pytest.mark.parametrize("lead", [(), (3, 2)], ids=["rows", "leading axes"])
def test_output_root_is_a_root_of_the_fisher_information(case: Case, lead: tuple[int, ...]) -> None:
    outputs = outputs_of(case, lead=lead)
    root = case.likelihood.output_root(outputs, len(case.event))
    assert root.shape[1:] == outputs.shape
    size = torch.Size(case.event).numel()
    assert len(root) <= size
    flat = root.reshape(len(root), *lead, 5, size)
    torch.testing.assert_close(
        torch.einsum("k...d,k...e->...de", flat, flat), case.fisher(outputs), rtol=1e-10, atol=1e-12
    )
    single = outputs.float()
    assert case.likelihood.output_root(single, len(case.event)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "logits",
    [
        [0.0, -200.0, -200.0, -200.0],
        [-200.0, -200.0, -200.0, 0.0],
        [0.0, 0.0, -90.0, -90.0],
        [-80.0, -85.0, -90.0, 0.0],
        [0.0, -85.0, -95.0, -103.0],
        [1e4, -1e4, 0.0, 1e4],
        [0.0, -5.0, -10.0, -15.0],
        [88.0, 87.0, -88.0, 3.0],
    ],
    ids=str,
)
def test_the_root_of_classes_at_extreme_logits(logits: list[float], dtype: torch.dtype) -> None:
    outputs = torch.tensor([logits], dtype=dtype)
    root = Categorical().output_root(outputs)[:, 0]  # (3, 4)
    assert root.shape == (3, 4)
    assert bool(torch.isfinite(root).all())
    found = (root.T.double() @ root.double()).to(FLOAT64)
    p = outputs.double().softmax(-1)[0]
    wanted = torch.diag(p) - torch.outer(p, p)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=4 * torch.finfo(dtype).eps)
    spread = (p * (1 - p)).sqrt()  # also in units of each class: correlations are right where probabilities are tiny
    seen = spread > 1e-15
    scale = torch.outer(spread, spread)[seen][:, seen]
    if dtype == FLOAT64:
        torch.testing.assert_close(found[seen][:, seen] / scale, wanted[seen][:, seen] / scale, rtol=0.0, atol=1e-6)


@every_case
def test_leading_axes_equal_a_loop(case: Case) -> None:
    outputs = outputs_of(case, lead=(3, 2))
    targets = targets_of(case, outputs[0, 0])
    likelihood = case.likelihood
    for function in (
        lambda f: likelihood.log_prob(f, targets),
        lambda f: likelihood.output_hessian(f, targets),
        likelihood.mean,
        likelihood.variance,
    ):
        looped = torch.stack([torch.stack([function(f) for f in block]) for block in outputs])
        torch.testing.assert_close(function(outputs), looped, rtol=1e-12, atol=1e-12)
    assert likelihood.log_prob(outputs, targets).shape == (3, 2, 5)
    assert likelihood.sample(outputs, Key(0)).shape == (3, 2, *targets.shape)
    if case.fisher_draws is None:  # drawn targets are others in a loop
        looped = torch.stack([torch.stack([case.fisher(f) for f in block]) for block in outputs])
        torch.testing.assert_close(case.fisher(outputs), looped, rtol=1e-12, atol=1e-12)
    assert case.fisher(outputs).shape == likelihood.output_hessian(outputs, targets).shape


@every_case
@every_dtype
def test_dtype_is_kept(case: Case, dtype: torch.dtype) -> None:
    outputs = outputs_of(case, dtype=dtype)
    targets = targets_of(case, outputs)
    likelihood = case.likelihood
    exact = likelihood.log_prob(outputs.double(), targets.double() if targets.is_floating_point() else targets)
    value = likelihood.log_prob(outputs, targets)
    assert value.dtype == dtype
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    for other in (
        likelihood.mean(outputs),
        likelihood.variance(outputs),
        likelihood.output_hessian(outputs, targets),
        case.fisher(outputs),
        likelihood.free(outputs),
    ):
        assert other.dtype == dtype
    assert targets.dtype in (dtype, torch.int64)


@every_case
def test_samples_have_the_mean_and_variance(case: Case) -> None:
    outputs = many_rows(case)
    draws = case.likelihood.sample(outputs, Key(8))
    mean, variance = case.likelihood.mean(outputs[:1])[0], case.likelihood.variance(outputs[:1])[0]
    if not draws.is_floating_point():
        draws = torch.nn.functional.one_hot(draws, mean.shape[0]).double().movedim(-1, 1)  # classes come first
    assert ((draws.mean(0) - mean).abs() <= 5.0 * (variance / len(draws)).sqrt()).all()
    squares = (draws - mean).square()
    assert ((squares.mean(0) - variance).abs() <= 5.0 * squares.std(0) / len(draws) ** 0.5 + 1e-12).all()


@every_case
def test_sampling_depends_on_the_key_alone(case: Case) -> None:
    outputs = outputs_of(case, rows=50)
    first = case.likelihood.sample(outputs, Key(1))
    assert torch.equal(first, case.likelihood.sample(outputs, Key(1)))
    assert not torch.equal(first, case.likelihood.sample(outputs, Key(2)))


@every_case
def test_density_sums_to_one(case: Case) -> None:
    points, volume = case.support
    outputs = outputs_of(case, rows=1).expand(len(points), *case.event)
    total = (case.likelihood.log_prob(outputs, points).exp() * volume).sum()
    assert float(total) == pytest.approx(1.0, abs=1e-10)


@every_case
def test_free_parameters_round_trip(case: Case) -> None:
    likelihood, outputs = case.likelihood, outputs_of(case)
    targets = targets_of(case, outputs)
    raw = likelihood.free(outputs)
    assert raw.shape == (likelihood.num_free,)
    assert sum(torch.Size(shape).numel() for shape in likelihood.free_names().values()) == likelihood.num_free
    expected = likelihood.log_prob(outputs, targets)
    torch.testing.assert_close(likelihood.with_free(raw).log_prob(outputs, targets), expected)
    held = likelihood.fixed(raw)
    torch.testing.assert_close(held.log_prob(outputs, targets), expected)
    assert held.num_free == 0
    assert held.free(outputs).shape == (0,)
    assert held.free_names() == {}
    assert likelihood.free_log_prior(raw.expand(3, -1)).shape == (3,)


@every_case
def test_members_with_their_own_parameters_equal_a_loop(case: Case) -> None:
    likelihood, outputs = case.likelihood, outputs_of(case, lead=(3,))
    targets = targets_of(case, outputs[0])
    raw = likelihood.free(outputs) + torch.tensor([[-0.5], [0.0], [0.4]], dtype=outputs.dtype)  # (M, H)
    for held in (likelihood.with_free(raw), likelihood.fixed(raw)):
        for function in ("log_prob", "output_hessian"):
            looped = [getattr(likelihood.with_free(r), function)(f, targets) for r, f in zip(raw, outputs, strict=True)]
            torch.testing.assert_close(getattr(held, function)(outputs, targets), torch.stack(looped))
        looped = [likelihood.with_free(r).variance(f) for r, f in zip(raw, outputs, strict=True)]
        torch.testing.assert_close(held.variance(outputs), torch.stack(looped))
        assert held.sample(outputs, Key(0)).shape == (3, *targets.shape)


@every_case
def test_works_under_torch_func(case: Case) -> None:
    likelihood, outputs = copy.deepcopy(case.likelihood), outputs_of(case, lead=(3,))
    targets = targets_of(case, outputs[0])
    raw = likelihood.free(outputs).expand(3, -1)

    def loss(f: Tensor, r: Tensor) -> Tensor:
        return likelihood.with_free(r).log_prob(f, targets).sum() + likelihood.log_prob(f, targets).sum()

    batched = torch.func.vmap(torch.func.grad(loss))(outputs, raw)
    leaf = outputs.clone().requires_grad_()  # also after the transform, so nothing of it may be left behind
    (grad,) = torch.autograd.grad(torch.stack([loss(f, r) for f, r in zip(leaf, raw, strict=True)]).sum(), leaf)
    torch.testing.assert_close(batched, grad)


@every_case
def test_is_usable_in_training_after_inference_mode(case: Case) -> None:
    likelihood, outputs = copy.deepcopy(case.likelihood), outputs_of(case)
    targets = targets_of(case, outputs)
    with torch.inference_mode():
        value = likelihood.log_prob(outputs, targets)
    leaf = outputs.clone().requires_grad_()
    again = likelihood.log_prob(leaf, targets)
    again.sum().backward()
    torch.testing.assert_close(again.detach(), value.clone())
    assert leaf.grad is not None


@every_case
def test_is_a_value(case: Case) -> None:
    likelihood, outputs = case.likelihood, outputs_of(case)
    likelihood.mean(outputs), likelihood.variance(outputs)
    twin = pickle.loads(pickle.dumps(likelihood))
    assert twin == likelihood
    assert hash(twin) == hash(likelihood)
    assert likelihood != object()
    assert type(likelihood).__name__ in repr(likelihood)
    assert torch.equal(twin.variance(outputs), likelihood.variance(outputs))


@every_case
def test_inputs_are_left_alone(case: Case) -> None:
    outputs = outputs_of(case)
    targets = targets_of(case, outputs)
    before = outputs.clone(), targets.clone()
    case.likelihood.log_prob(outputs, targets)
    case.likelihood.output_hessian(outputs, targets)
    case.likelihood.sample(outputs, Key(0))
    assert torch.equal(outputs, before[0])
    assert torch.equal(targets, before[1])


REFUSALS = [
    ("gaussian integer", Gaussian(), torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), r"y\.to\(torch\.float32\)"),
    ("gaussian dtype", Gaussian(), torch.zeros(3, 1), torch.zeros(3).double(), r"Got torch\.float64\. Convert with"),
    ("gaussian wide", Gaussian(), torch.zeros(3, 2), torch.zeros(3), r"outputs, \(3, 2\)\. Got \(3,\)\."),
    ("gaussian square", Gaussian(), torch.zeros(3, 3), torch.zeros(3), r"outputs, \(3, 3\)\. Got \(3,\)\."),
    ("gaussian rows", Gaussian(), torch.zeros(3, 1), torch.zeros(4), r"outputs, \(3, 1\)\. Got \(4,\)\."),
    ("gaussian column", Gaussian(), torch.zeros(3), torch.zeros(3, 1), r"outputs, \(3,\)\. Got \(3, 1\)\. Reshape"),
    ("gaussian number", Gaussian(), torch.zeros(()), torch.zeros(()), r"outputs, \(\)\. Got \(\)\."),
    ("gaussian inf", Gaussian(), torch.zeros(1, 1), torch.tensor([-torch.inf]), r"finite\. Got .*-inf.* in row 0"),
    ("categorical float", Categorical(), torch.zeros(2, 3), torch.zeros(2), r"Got torch\.float32\..*y\.long\(\)"),
    ("categorical bool", Categorical(), torch.zeros(1, 2), torch.tensor([True]), r"Got torch\.bool\..*y\.long\(\)"),
    ("categorical large", Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), r"0\.\.2 for 3.*Got 3 in row 1"),
    ("categorical near -100", Categorical(), torch.zeros(2, 3), torch.tensor([0, -99]), r"Got -99 in row 1"),
    ("categorical byte", Categorical(), torch.zeros(1, 3), torch.tensor([156], dtype=torch.uint8), r"Got 156 in row 0"),
    ("bernoulli byte", Bernoulli(), torch.zeros(1), torch.tensor([156], dtype=torch.uint8), r"Got 156 in row 0"),
    ("categorical negative", Categorical(), torch.zeros(2, 3), torch.tensor([-1, 0]), r"Got -1 in row 0"),
    ("categorical one", Categorical(), torch.zeros(2, 1), torch.tensor([0, 0]), r"Got 1\..*Bernoulli"),
    ("categorical one-hot", Categorical(), torch.zeros(2, 3), torch.eye(2, 3).long(), r"\(2, 3\)\. .*y\.argmax\(-1\)"),
    (
        "categorical column",
        Categorical(),
        torch.zeros(2, 3),
        torch.zeros(2, 1).long(),
        r"\(2, 1\)\. .*y\.squeeze\(-1\)",
    ),
    ("categorical rows", Categorical(), torch.zeros(2, 3), torch.tensor([0]), r"outputs \(2, 3\) and targets \(1,\)"),
    ("categorical flat", Categorical(), torch.zeros(2), torch.tensor([0, 1]), r"outputs \(2,\) and targets \(2,\)"),
    ("probit signs", Probit(), torch.zeros(2), torch.tensor([1, -1]), r"Probit: .*Got -1 in row 1\..*recoded"),
    ("bernoulli signs", Bernoulli(), torch.zeros(2), torch.tensor([1, -1]), r"Got -1 in row 1\..*recoded"),
    ("bernoulli between", Bernoulli(), torch.zeros(2, 1), torch.tensor([0.0, 0.5]), r"Got 0\.5 in row 1"),
    ("bernoulli wide", Bernoulli(), torch.zeros(2, 2), torch.tensor([0, 1]), r"1 column\. Got 2\..*Categorical"),
    ("bernoulli rows", Bernoulli(), torch.zeros(2, 1), torch.tensor([0]), r"outputs \(2, 1\) and targets \(1,\)"),
    ("bernoulli deep", Bernoulli(), torch.zeros(2, 1, 1), torch.tensor([0, 1]), r"outputs \(2, 1, 1\)"),
    ("bernoulli number", Bernoulli(), torch.zeros(()), torch.zeros(()), r"outputs \(\) and targets \(\)"),
    ("bernoulli events", Bernoulli(), torch.zeros(2, 3), torch.zeros(2, 2), r"outputs \(2, 3\) and targets \(2, 2\)"),
    ("bernoulli mask", Bernoulli(), torch.zeros(2, 3), torch.tensor([[0, 1, 1], [0, 2, 1]]), r"Got 2 in row 1"),
    (
        "categorical undeclared positions",
        Categorical(),
        torch.zeros(2, 3, 4, 4),
        torch.zeros(2, 4, 4).long(),
        r"\(N, C\) and targets \(N,\)\. Got .* use Categorical\(positions=2\)",
    ),
    (
        "categorical classes last",
        Categorical(positions=1),
        torch.zeros(2, 4, 3),
        torch.zeros(2, 4).long(),
        r"\(N, C, P1\) and targets \(N, P1\)\. Got .*\.movedim\(-1, 1\)",
    ),
    (
        "categorical one-hot positions",
        Categorical(positions=1),
        torch.zeros(2, 3, 4),
        torch.zeros(2, 3, 4).long(),
        r"y\.argmax\(1\)",
    ),
    (
        "categorical position",
        Categorical(positions=1),
        torch.zeros(2, 3, 2),
        torch.tensor([[0, 1], [2, 7]]),
        r"0\.\.2 for 3 classes\. Got 7 in row 1",
    ),
    (
        "categorical no positions",
        Categorical(positions=1),
        torch.zeros(2, 3),
        torch.tensor([0, 1]),
        r"outputs \(2, 3\) and targets \(2,\).*positions=0",
    ),
    ("student t dtype", StudentT(), torch.zeros(3, 1), torch.zeros(3).double(), r"StudentT: .* Got torch\.float64"),
    ("student t wide", StudentT(), torch.zeros(3, 2), torch.zeros(3), r"StudentT: .* \(3, 2\)\. Got \(3,\)"),
    ("student t inf", StudentT(), torch.zeros(2, 1), torch.tensor([0.0, torch.inf]), r"Got .*inf.* in row 1"),
    ("heteroscedastic odd", Heteroscedastic(), torch.zeros(3, 3), torch.zeros(3), r"\(N, 2 D\).* Got \(3, 3\)\. Give"),
    ("heteroscedastic deep", Heteroscedastic(), torch.zeros(3, 2, 2), torch.zeros(3), r"Got \(3, 2, 2\)"),
    ("heteroscedastic wide", Heteroscedastic(), torch.zeros(3, 2), torch.zeros(3, 2), r"\(3, 1\)\. Got \(3, 2\)\. The"),
    (
        "heteroscedastic integer",
        Heteroscedastic(),
        torch.zeros(3, 2),
        torch.zeros(3).long(),
        r"y\.to\(torch\.float32\)",
    ),
    ("heteroscedastic inf", Heteroscedastic(), torch.zeros(1, 2), torch.tensor([torch.inf]), r"Got .*inf.* in row 0"),
    ("poisson negative", Poisson(), torch.zeros(2, 1), torch.tensor([1, -2]), r"counts .* Got -2 in row 1"),
    ("poisson fraction", Poisson(), torch.zeros(2), torch.tensor([1.0, 2.5]), r"Got 2\.5 in row 1\. For real numbers"),
    ("poisson inf", Poisson(), torch.zeros(1), torch.tensor([torch.inf]), r"Got inf in row 0"),
    ("poisson complex", Poisson(), torch.zeros(1), torch.tensor([1j]), r"Got torch\.complex64"),
    ("poisson wide", Poisson(), torch.zeros(3, 2), torch.tensor([1, 2, 3]), r"outputs, \(3, 2\)\. Got \(3,\)"),
    ("custom rows", Custom(log_density), torch.zeros(3, 1), torch.zeros(2, 1), r"each of the 3 rows.* Got \(2, 1\)"),
    ("custom number", Custom(log_density), torch.zeros(3, 1), torch.zeros(()), r"Got \(\)"),
    ("custom event", Custom(log_density), torch.zeros(3), torch.zeros(3), r"1 axes .* Got \(3,\)\. .*event_dims=0"),
]


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "message"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_check_refuses(likelihood: Likelihood, outputs: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(BadData, match=message):
        likelihood.check(outputs, targets)


def test_every_likelihood_has_refusals() -> None:
    assert {type(case.likelihood) for case in CASES} == {type(row[1]) for row in REFUSALS}
