"""Every structure against the dense matrix that it keeps part of."""

import pytest
import torch
from curvaturecases import FLOAT64, Truth, close, made, truth
from matrixcases import as_matrix
from torch import Tensor, nn

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
    Structure,
)
from posterity.curvature.curvature import Rows
from posterity.curvature.structure import Sums
from posterity.curvature.survey import survey
from posterity.likelihoods import Categorical, Gaussian
from posterity.model import Batch
from posterity.numerics import Key
from posterity.precisions import Precision

ROWS = 6


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 2, 2, padding=1, stride=2),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


class Positions(nn.Module):
    """A layer at positions, a tied one, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh().sum(1)
        return self.scale * self.head(self.twice(self.twice(hidden).tanh()))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def inputs(name: str, rows: int = ROWS) -> Tensor:
    if name == "words":
        return (Key(2).uniform((rows, 4)) * 5).long()
    return Key(1).normal((rows, *{"mlp": (3,), "images": (2, 4, 4), "positions": (5, 3)}[name]), FLOAT64)


NETWORKS = {"mlp": mlp, "images": images, "positions": Positions, "words": words}


def problem(name: str, rows: int = ROWS, weights: Tensor | None = None) -> Truth:
    return truth(made(NETWORKS[name]), inputs(name, rows), Categorical(), weights=weights)


def summed(case: Truth, structure: Structure, curvature, prior: Tensor, batches: int, seed: int, budget) -> Sums:
    """The sums after all passes, over batches of a few rows."""
    sums: Sums = {}
    parts = torch.arange(case.batch.size).chunk(batches)
    for number in range(structure.passes):
        for index, part in enumerate(parts):
            batch = case.batch.map(lambda tensor, part=part: tensor[part])
            key = Key(seed).fold(number).fold(index)
            rows = Rows(curvature or GaussNewton(), case.joint, case.theta, batch, None, key, budget)
            sums = structure.add(sums, rows, number)
        sums = structure.end(sums, rows, number, prior)
    return sums


def kept(
    case: Truth, structure: Structure, curvature=None, prior=None, scale=1.0, batches=2, seed=0, budget=None
) -> Precision:
    """The precision after all passes."""
    prior = torch.full((case.slopes.shape[-1],), 0.5, dtype=FLOAT64) if prior is None else prior
    sums = summed(case, structure, curvature, prior, batches, seed, budget)
    return structure.precision(sums, survey(case.joint, case.batch.inputs).places, scale, prior)


def block_of(case: Truth, name: str) -> Tensor:
    """Where the weights of a layer lie, a bias after each row of its weight."""
    (place,) = [p for p in survey(case.joint, case.batch.inputs).places if p.block.names[0] == name]
    return place.block.index


every_network = pytest.mark.parametrize("name", NETWORKS)
STRUCTURES = [Full(), Diagonal(), BlockDiagonal(), Kronecker(), CorrectedKronecker(), LowRank(4, 8), Hutchinson(3)]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: type(s).__name__)


@every_network
def test_full_is_the_matrix_as_rows_or_as_a_square(name: str) -> None:
    for rows, form in ((ROWS, "LowRank"), (90, "Dense")):
        case = problem(name, rows)
        found = kept(case, Full(), scale=1.7)
        assert type(found).__name__ == form
        wanted = 1.7 * case.matrix + 0.5 * torch.eye(len(case.matrix), dtype=FLOAT64)
        close(as_matrix(found), wanted)
        close(found.logdet.view(1), wanted.logdet().view(1))
        close(found.covariance(), wanted.inverse())


@pytest.mark.parametrize("rows", [17, 33])
def test_full_keeps_all_rows_whatever_fits_at_once(rows: int) -> None:
    """One column at a time in the first chunk of rows, all three in the last: still one form of the sums."""
    case = problem("mlp", rows)  # 31 weights, fewer than columns, more than 17 rows
    for budget in (1, 3000, 10_000, None):
        found = kept(case, Full(), budget=budget, batches=1)
        close(as_matrix(found) - 0.5 * torch.eye(31, dtype=FLOAT64), case.matrix)


@every_network
def test_diagonal_and_blocks_are_parts_of_the_matrix(name: str) -> None:
    case = problem(name)
    close(as_matrix(kept(case, Diagonal())), torch.diag(case.matrix.diagonal() + 0.5))
    wanted = torch.zeros_like(case.matrix)
    names = set()
    for place in survey(case.joint, case.batch.inputs).places:
        index = place.block.index
        wanted[index[:, None], index] = case.matrix[index[:, None], index]
        names |= set(place.block.names)
    assert names == set(case.joint.network.layout.names)
    found = kept(case, BlockDiagonal())
    close(as_matrix(found), wanted + 0.5 * torch.eye(len(wanted), dtype=FLOAT64))


def test_a_bias_is_in_the_block_of_its_weight() -> None:
    places = {p.block.names: p.kind for p in survey(problem("positions").joint, inputs("positions")).places}
    assert places == {
        ("first.weight", "first.bias"): "matrix",
        ("head.weight", "head.bias"): "matrix",
        ("twice.weight", "twice.bias"): "matrix",
        ("scale",): "plain",
    }
    found = survey(problem("images").joint, inputs("images")).places
    assert {p.block.names[0]: (p.kind, p.groups, p.positions) for p in found if p.kind == "matrix"} == {
        "0.weight": ("matrix", 2, 9),
        "3.weight": ("matrix", 1, 4),
        "5.weight": ("matrix", 1, 1),
    }
    assert [p.block.names for p in found if p.kind == "plain"] == [("1.weight", "1.bias")]
    assert [p.block.names[0] for p in found if p.head] == ["5.weight"]


@pytest.mark.parametrize("name", ["mlp", "images", "positions", "words"])
def test_blocks_of_the_hessian(name: str) -> None:
    case = problem(name)
    whole = Hessian().matrix(case.joint, case.theta, case.batch, None)
    found = kept(case, BlockDiagonal(), Hessian(), prior=torch.full((len(whole),), 50.0, dtype=FLOAT64))
    for place in survey(case.joint, case.batch.inputs).places:
        index = place.block.index
        close(as_matrix(found)[index[:, None], index] - 50 * torch.eye(len(index)), whole[index[:, None], index])


def spied(case: Truth, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Inputs (n, ...) of a layer and gradients (K, n, ...) in its outputs of the columns of the Gauss-Newton matrix."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
        seen.extend((arguments[0].detach(), output))
        return output

    module = case.joint.network._module
    handle = layer.register_forward_hook(hook)
    outputs = module(case.batch.inputs)
    handle.remove()
    columns = case.joint.likelihood.output_root(outputs.detach())
    grads = [torch.autograd.grad(outputs, seen[1], column, retain_graph=True)[0] for column in columns]
    return seen[0], torch.stack(grads)


def with_one(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones_like(features[..., :1])], -1)


def test_factors_are_means_over_rows_and_positions() -> None:
    """A over rows and positions, G summed over positions, as the docstring says; from hooks, row by row."""
    case = problem("positions")
    layer = case.joint.network._module.first
    a, g = spied(case, layer)  # (n, T, 3), (K, n, T, 4)
    rows, positions = a.shape[:2]
    inner = torch.zeros(4, 4, dtype=FLOAT64)
    outer = torch.zeros(4, 4, dtype=FLOAT64)
    for n in range(rows):
        for t in range(positions):
            one = with_one(a[n, t])
            inner += torch.outer(one, one) / (rows * positions)
            for k in range(len(g)):
                outer += torch.outer(g[k, n, t], g[k, n, t]) / rows
    index = block_of(case, "first.weight")
    block = as_matrix(kept(case, Kronecker()))[index[:, None], index]
    close(block, rows * torch.kron(outer, inner) + 0.5 * torch.eye(16, dtype=FLOAT64))


def test_factors_of_a_convolution_in_groups() -> None:
    case = problem("images")
    layer = case.joint.network._module[0]
    images_, g = spied(case, layer)  # (n, 2, 4, 4), (K, n, 4, 3, 3)
    patches = nn.functional.unfold(images_, 2).unflatten(1, (2, 4))  # (n, G, 4, T)
    index = block_of(case, "0.weight")
    block = as_matrix(kept(case, Kronecker()))[index[:, None], index] - 0.5 * torch.eye(20, dtype=FLOAT64)
    wanted = torch.zeros(20, 20, dtype=FLOAT64)
    for group in range(2):
        features = with_one(patches[:, group].mT.flatten(0, 1))
        grads = g[:, :, 2 * group : 2 * group + 2].flatten(3).movedim(2, -1).flatten(0, -2)
        part = ROWS * torch.kron(grads.T @ grads / ROWS, features.T @ features / len(features))
        wanted[10 * group : 10 * group + 10, 10 * group : 10 * group + 10] = part
    close(block, wanted)


def test_factors_of_a_table() -> None:
    """Diagonal over the entries, by how often each was looked up; the mean over the four positions of a row."""
    case = problem("words")
    tokens, g = spied(case, case.joint.network._module[0])  # (n, 4), (K, n, 4, 3)
    counts = torch.bincount(tokens.flatten(), minlength=5).to(FLOAT64) / (4 * ROWS)
    flat = g.flatten(0, 2)
    index = block_of(case, "0.weight")
    block = as_matrix(kept(case, Kronecker()))[index[:, None], index] - 0.5 * torch.eye(15, dtype=FLOAT64)
    close(block, ROWS * torch.kron(torch.diag(counts), flat.T @ flat / ROWS))


def test_kronecker_is_exact_for_one_row_and_for_linear_networks() -> None:
    one = problem("mlp", 1)
    close(as_matrix(kept(one, Kronecker(), batches=1)), as_matrix(kept(one, BlockDiagonal(), batches=1)))
    module = made(lambda: nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)))
    linear = truth(module, inputs("mlp"), Gaussian(0.7))
    close(as_matrix(kept(linear, Kronecker())), as_matrix(kept(linear, BlockDiagonal())))


def test_factored_damping_is_that_of_ritter() -> None:
    case = problem("mlp")
    index = block_of(case, "0.weight")
    plain = as_matrix(kept(case, Kronecker(), prior=torch.full((31,), 1e-9, dtype=FLOAT64)))[index[:, None], index]
    a, g = spied(case, case.joint.network._module[0])
    inner = with_one(a).T @ with_one(a) / ROWS
    outer = torch.einsum("kno,knp->op", g, g) / ROWS
    close(plain, ROWS * torch.kron(outer, inner), 1e-7)
    damped = as_matrix(kept(case, Kronecker(factored_damping=True)))[index[:, None], index]
    eye = torch.eye(4, dtype=FLOAT64)
    close(damped, torch.kron(ROWS**0.5 * outer + 0.5**0.5 * eye, ROWS**0.5 * inner + 0.5**0.5 * eye))


def priors(case: Truth) -> Tensor:
    """Other precisions of weights and biases."""
    layout = case.joint.network.layout
    return torch.cat([torch.full((p.size,), 0.3 if p.name.endswith("weight") else 2.0, dtype=FLOAT64) for p in layout])


@every_network
@pytest.mark.parametrize("unequal", [False, True], ids=["one prior", "two priors"])
def test_corrected_kronecker_has_the_exact_values_in_its_basis_and_is_nearer(name: str, unequal: bool) -> None:
    case = problem(name)
    prior = priors(case) if unequal else torch.full((len(case.matrix),), 0.5, dtype=FLOAT64)
    corrected, plain = kept(case, CorrectedKronecker(), prior=prior), kept(case, Kronecker(), prior=prior)
    for place, part, other in zip(
        survey(case.joint, case.batch.inputs).places, corrected.parts, plain.parts, strict=True
    ):
        index = place.block.index
        exact, own = case.matrix[index[:, None], index], torch.diag(prior[index])
        if place.kind == "plain":
            close(as_matrix(part) - own, exact)
            continue
        # Whitened by the prior both have the eigenvectors of the factors: values there are those of the exact block.
        white = torch.diag(prior[index].rsqrt())
        values, basis = torch.linalg.eigh(white @ (as_matrix(other) - own) @ white)
        target, got = white @ exact @ white, white @ (as_matrix(part) - own) @ white
        if values.diff().min() > 1e-9 and place.kind == "matrix" and place.groups == 1:
            close(got, basis @ torch.diag((basis.T @ target @ basis).diagonal()) @ basis.T, 1e-8)
        assert (got - target).norm() <= (white @ (as_matrix(other) - own) @ white - target).norm() + 1e-12
        close(got.trace().view(1), target.trace().view(1))  # any basis keeps the trace


@every_network
@every_structure
def test_weights_of_rows_are_repeated_rows(name: str, structure: Structure) -> None:
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0, 0.0, 2.0], dtype=FLOAT64)
    repeated = torch.tensor([0, 1, 1, 3, 5, 5])
    case = problem(name, weights=weights)
    batch = Batch(case.batch.inputs[repeated], case.batch.targets[repeated])
    other = case._replace(batch=batch)
    close(as_matrix(kept(case, structure, batches=1)), as_matrix(kept(other, structure, batches=1)), 1e-8)


@every_network
@every_structure
def test_batches_and_budgets_do_not_matter(name: str, structure: Structure) -> None:
    case = problem(name, 19)
    whole = as_matrix(kept(case, structure, batches=1))
    for batches, budget in ((1, 1), (1, 40_000), (4, None), (19, None), (3, 1)):
        close(as_matrix(kept(case, structure, batches=batches, budget=budget)), whole, 1e-8)


@pytest.mark.parametrize("name", ["mlp", "words"])
def test_low_rank_is_exact_from_the_rank_of_the_matrix_on(name: str) -> None:
    case = problem(name, 4)
    rank = int(torch.linalg.matrix_rank(case.matrix))
    assert rank < len(case.matrix)
    wanted = case.matrix + 0.5 * torch.eye(len(case.matrix), dtype=FLOAT64)
    close(as_matrix(kept(case, LowRank(rank, 2 * rank))), wanted, 1e-8)
    close(as_matrix(kept(case, LowRank(rank + 5))), wanted, 1e-8)


def test_low_rank_keeps_the_largest_eigenvalues() -> None:
    case = problem("mlp", 19)
    wanted, vectors = torch.linalg.eigh(case.matrix)
    found = as_matrix(kept(case, LowRank(3, 31))) - 0.5 * torch.eye(31, dtype=FLOAT64)
    close(torch.linalg.eigvalsh(found)[-3:], wanted[-3:])
    close(found, vectors[:, -3:] @ torch.diag(wanted[-3:]) @ vectors[:, -3:].T, 1e-8)


def test_low_rank_finds_every_copy_of_an_eigenvalue() -> None:
    """Two outputs of a linear model have one matrix each, the same: a Krylov basis from one vector sees it once."""
    case = truth(made(nn.Linear, 3, 4), inputs("mlp"), Gaussian(0.7))
    assert torch.linalg.matrix_rank(case.matrix) == 16
    wanted = case.matrix + 0.5 * torch.eye(16, dtype=FLOAT64)
    close(as_matrix(kept(case, LowRank(16))), wanted, 1e-8)


def test_hutchinson_is_unbiased_and_exact_for_a_diagonal() -> None:
    case = problem("mlp", 19)
    for curvature in (GaussNewton(), Hessian()):
        exact = curvature.matrix(case.joint, case.theta, case.batch, None)
        runs = [summed(case, Hutchinson(8), curvature, torch.ones(31), 2, seed, None)["diagonal"] for seed in range(60)]
        error = ((exact.square().sum(0) - exact.diagonal().square()) / (8 * 60)).sqrt()
        assert ((torch.stack(runs).mean(0) - exact.diagonal()).abs() <= 5 * error + 1e-9).all()
    assert bool((torch.stack(runs) < 0).any())
    assert bool((kept(case, Hutchinson(1)).curvature >= 0).all())  # of sums of squares, what is below zero is zero
    eye = truth(made(lambda: nn.Linear(1, 3, bias=False)), torch.ones(4, 1, dtype=FLOAT64), Gaussian(0.5))
    close(kept(eye, Hutchinson(1)).curvature, torch.full((3,), 16.0, dtype=FLOAT64))


@pytest.mark.parametrize("structure", [Full(), Kronecker(), Diagonal()], ids=lambda s: type(s).__name__)
def test_drawn_fisher_is_unbiased(structure: Structure) -> None:
    case = problem("mlp", 12)
    wanted = as_matrix(kept(case, structure))
    runs = torch.stack([as_matrix(kept(case, structure, MonteCarloFisher(2), seed=seed)) for seed in range(100)])
    error = runs.std(0) / 100**0.5
    assert ((runs.mean(0) - wanted).abs() <= 5 * error + 1e-9).all()
    assert torch.equal(runs[7], as_matrix(kept(case, structure, MonteCarloFisher(2), seed=7)))
    assert not torch.equal(runs[7], runs[8])


def test_more_draws_of_the_fisher_are_nearer() -> None:
    case = problem("mlp", 12)
    few, many = (
        torch.stack([MonteCarloFisher(k).matrix(case.joint, case.theta, case.batch, None, s) for s in range(30)])
        for k in (1, 16)
    )
    errors = [(runs - case.matrix).square().mean() for runs in (few, many)]
    assert 6 < errors[0] / errors[1] < 40  # 16 in the mean


def test_empirical_fisher_is_that_of_the_gradients_of_the_rows() -> None:
    for name in NETWORKS:
        weights = torch.linspace(0.1, 1.5, ROWS, dtype=FLOAT64)
        case = problem(name, weights=weights)
        leaf = case.theta.clone().requires_grad_()
        rows = case.joint.likelihood.log_prob(case.joint.outputs(leaf, case.batch.inputs), case.batch.targets)
        grads = torch.stack([torch.autograd.grad(row, leaf, retain_graph=True)[0] for row in rows])
        matrix = EmpiricalFisher().matrix(case.joint, case.theta, case.batch, None)
        close(matrix, grads.T @ (weights.unsqueeze(-1) * grads))


def test_structures_are_values() -> None:
    for value in (*STRUCTURES, GaussNewton(), Hessian(), MonteCarloFisher(3), EmpiricalFisher()):
        assert eval(repr(value), vars(po.curvature)) == value
        assert hash(eval(repr(value), vars(po.curvature))) == hash(value)
