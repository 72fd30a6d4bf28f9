"""The posterior of some data as the prior of the rest is the posterior of all."""

import dataclasses
import logging
import math

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.curvature import CorrectedKronecker, Diagonal, Full, Kronecker, Structure
from posterity.model import Network
from posterity.numerics import Key
from posterity.precisions import Dense
from posterity.priors import Correlated

NOISE = 0.4


def rows(count: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    x = Key(seed).fold("x").normal((count, width), torch.float64)
    return x, x.sum(-1, keepdim=True) + NOISE * Key(seed).fold("y").normal((count, 1), torch.float64)


def linear(width: int, num_data: int, prior: po.priors.Prior | None = None, **kwargs: object) -> po.Joint:
    module = nn.Linear(width, 1, bias=False, dtype=torch.float64)
    prior = po.priors.Normal(0.7) if prior is None else prior
    return po.Joint(module, po.likelihoods.Gaussian(scale=NOISE), prior, num_data, **kwargs)  # type: ignore[arg-type]


def laplace(joint: po.Joint, data: tuple[Tensor, Tensor], structure: Structure | None) -> po.posteriors.Linearized:
    """The Laplace approximation at the mode of a linear model, which one Newton step finds."""
    x, y = data
    hessian = x.T @ x / NOISE**2
    prior = joint.bound_prior
    zero = torch.zeros(joint.num_weights, dtype=torch.float64)
    slope = x.T @ y.flatten() / NOISE**2 + prior.value_and_grad(zero)[1]
    matrix = prior.matrix if isinstance(prior, Correlated) else Dense(torch.diag(prior.precision(zero)))
    curvature = torch.stack([matrix.matvec(row) for row in torch.eye(len(zero), dtype=torch.float64)])
    mode = torch.linalg.solve(hessian + curvature, slope)
    q, _ = po.infer(po.methods.Laplace(structure=structure, tuning=None), joint, data, start=mode)
    assert isinstance(q, po.posteriors.Linearized)
    return q


def split_design(structure: Structure) -> tuple[Tensor, Tensor]:
    """Rows, those of each half orthogonal where the structure is diagonal."""
    if not isinstance(structure, Diagonal):
        return rows(24, 4, 0)
    x = torch.cat([torch.eye(4, dtype=torch.float64) * size for size in (1.0, 2.0, 0.5, 3.0, 1.5, 0.1)])
    return x, x.sum(-1, keepdim=True) + 0.3


@pytest.mark.parametrize("structure", [Full(), Diagonal(), Kronecker()], ids=str)
def test_sequential_is_all_at_once(structure: Structure) -> None:
    x, y = split_design(structure)
    first = laplace(linear(4, 8), (x[:8], y[:8]), structure)
    second = laplace(po.continued(linear(4, 16), first), (x[8:], y[8:]), structure)
    whole = laplace(linear(4, 24), (x, y), structure)
    assert torch.allclose(second.point(), whole.point(), rtol=1e-9)
    assert torch.allclose(second.gaussian.precision.covariance(), whole.gaussian.precision.covariance(), rtol=1e-8)
    assert float(first.log_evidence + second.log_evidence) == pytest.approx(float(whole.log_evidence), rel=1e-10)


@pytest.mark.parametrize(("early", "late"), [(3, 4), (3, 40), (40, 4)])
def test_sequential_is_all_at_once_with_fewer_rows_than_weights(early: int, late: int) -> None:
    """In the dual form the precision is of low rank, and turns dense when there are many rows."""
    x, y = rows(early + late, 9, 1)
    first = laplace(linear(9, early), (x[:early], y[:early]), Full())
    second = laplace(po.continued(linear(9, late), first), (x[early:], y[early:]), Full())
    whole = laplace(linear(9, early + late), (x, y), Full())
    assert torch.allclose(second.point(), whole.point(), rtol=1e-8)
    assert torch.allclose(second.gaussian.variance, whole.gaussian.variance, rtol=1e-8)
    assert float(first.log_evidence + second.log_evidence) == pytest.approx(float(whole.log_evidence), rel=1e-9)


def test_the_exact_posterior_goes_on_too() -> None:
    x, y = rows(20, 4, 2)
    first, _ = po.infer(po.methods.Conjugate(), linear(4, 6), (x[:6], y[:6]))
    second = laplace(po.continued(linear(4, 14), first), (x[6:], y[6:]), Full())
    whole, _ = po.infer(po.methods.Conjugate(), linear(4, 20), (x, y))
    assert torch.allclose(second.point(), whole.point(), rtol=1e-9)
    assert torch.allclose(second.gaussian.variance, whole.gaussian.variance, rtol=1e-9)


def test_the_noise_is_tuned_and_the_prior_is_not(caplog: pytest.LogCaptureFixture) -> None:
    x, y = rows(60, 4, 3)
    first = laplace(linear(4, 20), (x[:20], y[:20]), Full())
    joint = po.continued(linear(4, 40), first)
    mode = laplace(joint, (x[20:], y[20:]), Full())
    with caplog.at_level(logging.INFO, "posterity"):
        q, _ = po.infer(po.methods.Laplace(tuning=po.evidence.Evidence()), joint, (x[20:], y[20:]), start=mode.point())
    assert "a Correlated one is what earlier data left" in caplog.text
    assert q.joint.prior is joint.prior
    found = float(q.joint.likelihood.scale)
    scales = NOISE * torch.linspace(0.5, 2.0, 301, dtype=torch.float64)
    residual = (y[20:] - x[20:] @ mode.point().unsqueeze(-1)).square().sum()
    earlier = torch.linalg.inv(first.gaussian.precision.covariance())
    evidence = [
        -40 * math.log(s) - 0.5 * residual / s**2 - 0.5 * torch.logdet(x[20:].T @ x[20:] / s**2 + earlier)
        for s in scales.tolist()
    ]
    assert found == pytest.approx(float(scales[int(torch.stack(evidence).argmax())]), abs=0.003 * NOISE * 2)
    assert float(q.log_evidence) > float(mode.log_evidence)


def test_the_power_of_the_prior_is_that_of_the_earlier_posterior() -> None:
    x, y = rows(20, 3, 4)
    first = laplace(linear(3, 8), (x[:8], y[:8]), Full())
    cold = po.continued(linear(3, 12, tempering=po.Tempering.cold(0.5)), first)
    q, _ = po.infer(po.methods.Laplace(tuning=None), cold, (x[8:], y[8:]), start=first)
    earlier = torch.linalg.inv(first.gaussian.precision.covariance())
    wanted = 2.0 * (x[8:].T @ x[8:] / NOISE**2 + earlier)
    assert torch.allclose(torch.linalg.inv(q.gaussian.precision.covariance()), wanted, rtol=1e-8)


def test_points_and_parts_are_refused() -> None:
    x, y = rows(8, 3, 5)
    joint = linear(3, 8)
    point, _ = po.infer(po.methods.MAP(steps=2), joint, (x, y))
    with pytest.raises(TypeError, match="Got Point, which says nothing"):
        po.continued(joint, point)
    net = po.Joint(
        po.networks.MLP([3, 4, 1]).double(), po.likelihoods.Gaussian(scale=NOISE), po.priors.Normal(), num_data=8
    )
    single, _ = po.infer(po.methods.Laplace(subset=po.methods.LargestVariance(3), tuning=None), net, (x, y))
    with pytest.raises(ValueError, match=r"over whole tensors. Got one over 3 single weights"):
        po.continued(net, single)
    whole, _ = po.infer(po.methods.Laplace(tuning=None), net, (x, y))
    after = po.continued(net, whole)
    with pytest.raises(ValueError, match=r"Use subset=AllWeights\(\)"):
        po.infer(po.methods.Laplace(subset=po.methods.LastLayer()), after, (x, y))
    with pytest.raises(ValueError, match=r"Use subset=AllWeights\(\)"):
        po.infer(po.methods.Laplace(subset=po.methods.LargestVariance(3)), after, (x, y))
    with pytest.raises(TypeError, match=r"must be a Joint. Got int"):
        po.continued(3, whole)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="within one structure"):
        po.infer(po.methods.Laplace(structure=Diagonal(), tuning=None), after, (x, y))
    corrected, _ = po.infer(po.methods.Laplace(structure=CorrectedKronecker(), tuning=None), net, (x, y))
    with pytest.raises(ValueError, match=r"Use the structure Kronecker\(\)"):
        po.infer(po.methods.Laplace(structure=CorrectedKronecker(), tuning=None), po.continued(net, corrected), (x, y))


def test_a_last_layer_goes_on_as_the_linear_model_that_it_is() -> None:
    """Its features stay where they are: rows in two parts give the posterior of all rows on these features."""
    x, y = rows(24, 3, 8)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def joint(count: int) -> po.Joint:
        return po.Joint(module, po.likelihoods.Gaussian(scale=NOISE), po.priors.Normal(0.7), num_data=count)

    method = po.methods.Laplace(subset=po.methods.LastLayer(), tuning=None)
    first, _ = po.infer(method, joint(10), (x[:10], y[:10]))
    problem = po.continued(joint(14), first)
    assert problem.network.layout.names == ("2.weight", "2.bias")
    assert torch.equal(problem.network.frozen["0.weight"], module[0].weight.detach())
    second, _ = po.infer(method, problem, (x[10:], y[10:]), start=first)
    whole, _ = po.infer(method, joint(24), (x, y))
    assert torch.allclose(second.gaussian.precision.covariance(), whole.gaussian.precision.covariance(), rtol=1e-9)
    features = torch.cat([module[:2](x), torch.ones(24, 1, dtype=torch.float64)], 1).detach()
    dense = features.T @ features / NOISE**2 + torch.eye(5, dtype=torch.float64) / 0.7**2
    assert torch.allclose(second.gaussian.precision.covariance(), torch.linalg.inv(dense), rtol=1e-9)
    again = po.continued(joint(24), second)  # and further still
    assert torch.equal(again.prior.mean, second.gaussian.mean)


def blobs(seed: int, centre: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Two classes above and below a point of the plane."""
    generator = Key(seed).generator()
    y = torch.arange(100) % 2
    x = 0.5 * torch.randn(100, 2, generator=generator) + torch.tensor(centre)
    return x + torch.stack([torch.zeros(100), 2.0 * y - 1.0], -1), y


@pytest.mark.parametrize("structure", [Full(), Kronecker()], ids=str)
def test_a_network_keeps_what_it_learnt(structure: Structure) -> None:
    """The second task turns the boundary on its own side; without the first one's curvature the whole plane turns."""
    first, (x, y) = blobs(0, (-3.0, 0.0)), blobs(1, (3.0, 0.0))
    second = (x, 1 - y)
    network = Network(po.networks.MLP([2, 16, 2]))
    network = network.replace(initial=network.fresh(Key(0)))  # the same on every device
    joint = po.Joint(network, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=100)
    train = po.methods.MAP(steps=300, batch_size=None, optimizer=po.optim.Adam(0.03), schedule=po.optim.Cosine())
    mode, _ = po.infer(train, joint, first)
    q, _ = po.infer(po.methods.Laplace(structure=structure, tuning=None), joint, first, start=mode)
    problem = po.continued(joint, q)
    kept, _ = po.infer(train, problem, second, start=q)
    lost, _ = po.infer(train, joint, second, start=q)
    after, _ = po.infer(po.methods.Laplace(structure=structure, tuning=None), problem, second, start=kept)
    old = [po.metrics.accuracy(p.predict(first[0]), first[1]) for p in (kept, lost, after)]
    assert old[0] > 0.9 > old[1] + 0.1
    assert old[2] > 0.9
    assert po.metrics.accuracy(after.predict(second[0]), second[1]) > 0.9
    assert bool((after.gaussian.precision.logdet > q.gaussian.precision.logdet).all())


def test_members_go_on_side_by_side() -> None:
    x, y = rows(10, 3, 6)
    joint = linear(3, 10)
    starts = torch.tensor([[1.0, 1.0, 1.0], [0.9, 1.1, 1.0]], dtype=torch.float64)
    method = po.methods.Laplace(tuning=None)
    both, _ = po.infer(method, joint, (x, y), start=starts)
    problem = po.continued(joint, both)
    assert problem.num_members == 2
    again, _ = po.infer(method, problem, (x, y), start=both)
    one, _ = po.infer(method, po.continued(joint, both.member(1)), (x, y), start=both.member(1))
    assert torch.allclose(again.member(1).gaussian.variance, one.gaussian.variance, rtol=1e-12)
    assert torch.allclose(again.member(1).log_evidence, one.log_evidence, rtol=1e-12)


def test_is_saved_with_its_prior(tmp_path) -> None:
    x, y = rows(10, 3, 7)
    joint = linear(3, 10)
    q = laplace(joint, (x, y), Full())
    again = laplace(po.continued(joint, q), (x, y), Full())
    again.save(tmp_path / "run")
    loaded = po.load(tmp_path / "run", nn.Linear(3, 1, bias=False, dtype=torch.float64))
    assert isinstance(loaded.joint, po.Joint)
    theta = torch.ones(3, dtype=torch.float64)
    assert torch.equal(loaded.joint.log_prior(theta), again.joint.log_prior(theta))
    assert dataclasses.replace(loaded.joint, num_data=3).prior.mean.tolist() == q.point().tolist()
