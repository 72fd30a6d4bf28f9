"""Linearised posteriors against dense Jacobians and covariances, for every structure and kind of layer."""

import dataclasses

import modulezoo
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.curvature import BlockDiagonal, CorrectedKronecker, Diagonal, Full, Kronecker, LowRank
from posterity.curvature.derivatives import derivatives
from posterity.jacobians.head import Head
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import Laplace, LargestVariance, LastLayer, Matching
from posterity.numerics import Key
from posterity.posteriors import Linearized
from posterity.precisions import Dense
from posterity.predictive import Exact, LaplaceBridge, MonteCarlo, Probit, from_outputs

FLOAT64 = torch.float64
STRUCTURES = {
    "dense": "dense",
    "full": Full(),
    "diagonal": Diagonal(),
    "kronecker": Kronecker(),
    "corrected kronecker": CorrectedKronecker(),
    "block diagonal": BlockDiagonal(),
    "low rank": LowRank(rank=4),
}


def strided() -> nn.Module:
    """Convolutions with stride, padding and groups, and group norm."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 2, 2, bias=False),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


def kinds():
    zoo = [modulezoo.mlp, modulezoo.lenet, modulezoo.conv_batch_norm, modulezoo.layer_norm, modulezoo.embedding]
    return [*zoo, modulezoo.Tied, strided]


def module_and_rows(kind, rows=5):
    if kind is strided:
        return modulezoo.make(kind), Key(0).normal((rows, 2, 6, 6), FLOAT64).to(torch.get_default_device())
    return modulezoo.make(kind), modulezoo.inputs(kind, rows)


def fitted(module, x, likelihood=None, **options):
    """The Laplace posterior at the module's own weights."""
    likelihood = Gaussian(scale=0.5) if likelihood is None else likelihood
    outputs = module.eval()(x)
    if isinstance(likelihood, Gaussian):
        y = outputs.detach() + 0.1 * Key(5).normal(tuple(outputs.shape), FLOAT64).to(x.device)
    else:
        y = torch.arange(len(x), device=x.device) % outputs.shape[1]
    joint = po.Joint(module, likelihood, po.priors.Normal(scale=0.7), num_data=len(x))
    dense = options.get("structure") == "dense"
    if dense:  # `Full` keeps rows in place of the matrix where there are few
        options["structure"] = Full()
    q, _ = po.infer(Laplace(tuning=None, **options), joint, (x, y), progress=False)
    if not dense:
        return q
    precision = Dense(torch.linalg.inv(q.gaussian.precision.covariance()))
    return Linearized(q.joint, dataclasses.replace(q.gaussian, precision=precision))


def dense_jacobian(q, x):
    """d outputs / d random weights, (N, D, R), by torch.func."""
    mean, joint = q.gaussian.mean, q.joint
    rows = torch.func.jacrev(lambda theta: joint.outputs(theta, x, q.buffers or None).flatten(1))(mean)
    return rows if joint.random_indices is None else rows[..., joint.random_indices]


def check_moments(q, x):
    jacobian, covariance = dense_jacobian(q, x), q.gaussian.precision.covariance()
    flat = jacobian.flatten(0, 1)
    close = torch.testing.assert_close
    mean, spread = q.output_moments(x)
    close(mean, q.joint.outputs(q.gaussian.mean, x, q.buffers or None), rtol=1e-10, atol=1e-10)
    close(spread, jacobian @ covariance @ jacobian.mT, rtol=1e-8, atol=1e-8)
    close(q.output_moments(x, marginal=True)[1], spread.diagonal(dim1=-2, dim2=-1), rtol=1e-9, atol=1e-9)
    close(q.joint_output_moments(x)[1], flat @ covariance @ flat.T, rtol=1e-8, atol=1e-8)
    shift = torch.einsum("ndr,sr->snd", jacobian, q.gaussian.deviations(3, Key(4)))
    close(q.outputs(x, 3, Key(4)), mean + shift.view(3, *mean.shape), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_moments_and_draws_are_those_of_dense_matrices(kind, structure):
    module, x = module_and_rows(kind)
    q = fitted(module, x, structure=STRUCTURES[structure])
    check_moments(q, x)
    closed, drawn = q.predict(x), q.predict(x, integrator=MonteCarlo(4))
    assert closed.mean.shape == drawn.mean.shape == q.gaussian.predict(x, draws=3).mean.shape


SUBSETS = [(subset, structure) for subset in (LastLayer(), Matching("0.*")) for structure in STRUCTURES]
SUBSETS += [
    (LargestVariance(7), structure) for structure in ("dense", "full", "diagonal", "low rank")
]  # no layers to factorise


@pytest.mark.parametrize(("subset", "structure"), SUBSETS, ids=str)
@pytest.mark.parametrize("kind", [modulezoo.mlp, strided], ids=lambda kind: kind.__name__)
def test_subsets(kind, subset, structure):
    module, x = module_and_rows(kind)
    q = fitted(module, x, structure=STRUCTURES[structure], subset=subset)
    assert q.gaussian.precision.size < len(q.gaussian.mean)
    check_moments(q, x)
    thetas = q.sample(2, Key(0))
    fixed = torch.ones(len(q.gaussian.mean), dtype=torch.bool)
    fixed[q.joint.random_indices] = False
    assert torch.equal(thetas[:, fixed], q.gaussian.mean[fixed].expand(2, -1))
    assert q.gaussian.predict(x, draws=3).mean.shape == q.predict(x, integrator=MonteCarlo(4)).mean.shape


def test_the_output_layer_needs_no_backward_pass():
    module, x = module_and_rows(modulezoo.mlp)
    q = fitted(module, x, Categorical(), structure=Kronecker(), subset=LastLayer())
    (piece,) = derivatives(q.joint, q.gaussian.mean, x)
    assert isinstance(piece.jacobian.parts[0], Head)
    torch.testing.assert_close(piece.jacobian.rows(), dense_jacobian(q, x), rtol=1e-12, atol=1e-12)


def test_tied_weights_in_the_output_layer_are_not_taken_for_it_alone():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.layer(x).tanh())

    x = modulezoo.inputs(modulezoo.mlp, 4)
    check_moments(fitted(modulezoo.make(Twice), x, structure=Full()), x)


class Largest(TorchDispatchMode):
    """Sees how many numbers the largest tensor has that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and 0 not in tensor.stride():
                self.numel = max(self.numel, tensor.numel())
        return result


def wide(outputs=10):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, outputs)), Key(0).normal((64, 30))


@pytest.mark.cpu
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "corrected kronecker"])
def test_whole_jacobians_are_never_formed(structure):
    module, x = wide()
    q = fitted(module.double(), x.double(), Categorical(), structure=STRUCTURES[structure])
    dense = 64 * 10 * q.gaussian.precision.size
    for call in (
        lambda: q.predict(x.double()),
        lambda: q.predict(x.double(), integrator=LaplaceBridge(project=True)),
        lambda: q.outputs(x.double(), 5, Key(0)),
        lambda: q.gaussian.predict(x.double(), draws=5),
    ):
        with Largest() as seen:
            call()
        assert seen.numel < dense / 20


@pytest.mark.cpu
def test_many_classes_need_no_covariance():
    module, x = wide(outputs=2000)
    q = fitted(
        module.double(), x.double(), Categorical(), structure=Diagonal(), subset=LastLayer(),
        curvature=po.curvature.EmpiricalFisher(),
    )  # fmt: skip
    with Largest() as seen:
        predictive = q.predict(x[:1].double())
    assert seen.numel <= len(q.gaussian.mean) < 2000**2 / 40
    features = torch.cat([module[1](module[0](x[:1].double())), torch.ones(1, 1, dtype=FLOAT64)], 1).detach()
    named = q.joint.network.layout.unflatten(torch.zeros_like(q.gaussian.mean).index_copy(
        0, q.joint.random_indices, q.gaussian.variance
    ))  # fmt: skip
    variance = (named["2.weight"] @ features[0, :-1] ** 2) + named["2.bias"]
    wanted = Probit()(Categorical(), module(x[:1].double()).detach(), variance.unsqueeze(0), Key(0))
    torch.testing.assert_close(predictive.probs, wanted.probs, rtol=1e-10, atol=1e-12)


@pytest.mark.cpu
@pytest.mark.parametrize("integrator", [None, LaplaceBridge(project=True)], ids=["marginal", "covariance"])
def test_a_memory_budget_bounds_the_tensors_and_changes_nothing_else(integrator):
    module, x = wide()
    x = x.double()
    q = fitted(module.double(), x, Categorical(), structure=Kronecker())
    q.predict(x, integrator=integrator)  # bases are cast once
    for budget in (8 * 50 * 64, 8 * 50 * 640):  # one column of all rows; all ten of all rows
        with Largest() as seen:
            predictive = q.predict(x, integrator=integrator, memory_budget=budget)
        results = 64 * 10 * (1 if integrator is None else 10)
        assert 8 * seen.numel <= max(budget, 8 * 41 * 41, 8 * x.numel(), 8 * results)
        torch.testing.assert_close(predictive.probs, q.predict(x, integrator=integrator).probs, rtol=1e-10, atol=1e-12)


def test_columns_that_do_not_fit_together_follow_each_other():
    module, x = module_and_rows(modulezoo.lenet)
    q = fitted(module, x, structure=Kronecker())
    pieces = list(derivatives(q.joint, q.gaussian.mean, x, budget=1))
    assert [(piece.low, piece.fresh) for piece in pieces] == [(n, k == 0) for n in range(5) for k in range(2)]
    tight, loose = (q.output_moments(x, marginal=True, memory_budget=budget)[1] for budget in (1, None))
    torch.testing.assert_close(tight, loose, rtol=1e-12, atol=1e-12)
    whole = [q.output_moments(x, memory_budget=budget)[1] for budget in (1, None)]
    torch.testing.assert_close(*whole, rtol=1e-12, atol=1e-12)


def test_a_memory_budget_must_be_a_number():
    module, x = module_and_rows(modulezoo.mlp)
    with pytest.raises(ValueError, match=r"memory_budget must be a positive .* Got 0"):
        fitted(module, x).predict(x, memory_budget=0)


@pytest.mark.parametrize("kind", [modulezoo.mlp, strided], ids=lambda kind: kind.__name__)
def test_the_joint_predictive_is_the_normal_of_all_rows(kind):
    module, x = module_and_rows(kind)
    q = fitted(module, x, structure=Kronecker())
    mean, covariance = q.joint_output_moments(x)
    predictive = q.predict(x, joint=True)
    y = mean + 0.3
    matrix = covariance + 0.25 * torch.eye(10, dtype=FLOAT64)
    wanted = torch.distributions.MultivariateNormal(mean.flatten(), matrix).log_prob(y.flatten())
    torch.testing.assert_close(predictive.joint_log_prob(y), wanted, rtol=1e-9, atol=1e-9)
    alone = q.predict(x)
    torch.testing.assert_close(predictive.log_prob(y), alone.log_prob(y), rtol=1e-9, atol=1e-9)
    assert float((wanted - alone.log_prob(y).sum()).abs()) > 0.1  # rows are correlated


def test_joint_predictives_say_what_they_cannot_do():
    module, x = module_and_rows(modulezoo.mlp)
    q = fitted(module, x)
    with pytest.raises(TypeError, match=r"all rows at once\. Got a DataLoader"):
        q.predict(DataLoader(TensorDataset(x), batch_size=2), joint=True)
    with pytest.raises(ValueError, match=r"5 rows takes about [\d,]+ bytes, and 1,000 are"):
        q.predict(x, joint=True, memory_budget=1000)
    with pytest.raises(TypeError, match="closed-form output moments, which Gaussian has not"):
        q.gaussian.predict(x, joint=True)
    classes = fitted(module, x, Categorical())
    with pytest.raises(TypeError, match=r"Got Categorical.*q\.outputs\(inputs, draws, key\)"):
        classes.predict(x, joint=True)
    assert torch.isfinite(
        from_outputs(Categorical(), classes.outputs(x, 9, Key(0))).joint_log_prob(torch.zeros(5).long())
    )


def smooth() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 3))


@pytest.mark.parametrize("likelihood", [Gaussian(scale=0.5), Categorical()], ids=["gaussian", "softmax"])
@pytest.mark.parametrize("subset", ["all", "last"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_derivatives_in_the_inputs(structure, subset, likelihood):
    x = Key(0).normal((3, 1, 3, 3), FLOAT64).to(torch.get_default_device())
    options = {"subset": LastLayer()} if subset == "last" else {}
    q = fitted(modulezoo.make(smooth), x, likelihood, structure=STRUCTURES[structure], **options)
    point = x[:2].clone().requires_grad_()
    check = torch.autograd.gradcheck
    assert check(lambda inputs: q.output_moments(inputs)[1], point)
    assert check(lambda inputs: q.output_moments(inputs, marginal=True), point)
    assert check(lambda inputs: q.joint_output_moments(inputs)[1], point)
    if isinstance(likelihood, Categorical):
        for integrator in (Probit(), LaplaceBridge(project=True), Exact()):
            assert check(lambda inputs, way=integrator: q.predict(inputs, integrator=way).probs, point)
    else:
        assert check(lambda inputs: (q.predict(inputs).mean, q.predict(inputs).variance), point)


def test_nothing_keeps_a_graph_unless_an_input_asks_for_one():
    module, x = module_and_rows(strided)
    q = fitted(module, x, Categorical(), structure=Kronecker())
    free = x.clone().requires_grad_()
    with torch.no_grad():
        silent = [*q.output_moments(free), q.predict(free).probs, q.outputs(free, 2, Key(0))]
    kept = [*q.output_moments(x), q.predict(x).probs, q.outputs(x, 2, Key(0)), q.gaussian.predict(x, draws=2).probs]
    assert not any(tensor.requires_grad for tensor in (*silent, *kept))
    asked = [*q.output_moments(free), q.predict(free).probs, q.outputs(free, 2, Key(0))]
    assert all(tensor.requires_grad for tensor in asked)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_inference_mode_changes_nothing(structure):
    module, x = module_and_rows(modulezoo.mlp)
    q = fitted(module, x, Categorical(), structure=STRUCTURES[structure])
    with torch.inference_mode():
        inside = [q.predict(x.clone()).probs, q.gaussian.predict(x, draws=2).probs]
    outside = [q.predict(x).probs, q.gaussian.predict(x, draws=2).probs]
    for first, second in zip(inside, outside, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
    assert q.predict(x.clone().requires_grad_()).probs.requires_grad


def test_draws_in_blocks_are_the_same_for_weights_and_functions(monkeypatch):
    module, x = module_and_rows(modulezoo.mlp)
    q = fitted(module, x, structure=Kronecker())
    monkeypatch.setitem(po.posteriors.gaussian.LARGE, x.device.type, 2 * q.gaussian.precision.size)
    thetas = q.sample(5, Key(3))
    torch.testing.assert_close(thetas - q.gaussian.mean, q.gaussian.deviations(5, Key(3)), rtol=1e-12, atol=1e-12)
    assert len(torch.unique(thetas[:, 0])) == 5
    by_hand = torch.stack([q.joint.outputs(theta, x) for theta in thetas])
    torch.testing.assert_close(q.gaussian.outputs(x, 5, Key(3)), by_hand, rtol=1e-12, atol=1e-12)
