"""One step of MacKay's fixed point as an M-step."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.evidence import Evidence, Groups, MacKay, MacKayUpdate, PerLayer, Shared, marginal_likelihood, retuned
from posterity.likelihoods import Bernoulli, Gaussian
from posterity.methods import MAP, Conjugate, LastLayer
from posterity.methods import Laplace as LaplaceFit
from posterity.numerics import Key
from posterity.posteriors import Point
from posterity.priors import Laplace, Normal

ROWS = 25


def data() -> tuple[Tensor, Tensor]:
    x = Key(1).normal((ROWS, 2), torch.float64)
    return x, torch.sin(2.0 * x[:, :1]) + 0.3 * Key(2).normal((ROWS, 1), torch.float64)


def network(tempering: po.Tempering | None = None) -> po.Joint:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(0.5 * Key(3).fold(name).normal(tuple(parameter.shape), torch.float64))
    tempering = po.Tempering.bayes() if tempering is None else tempering
    return po.Joint(net, Gaussian(0.5), Normal(0.8), ROWS, tempering)


@pytest.mark.parametrize("groups", [Shared(), PerLayer()], ids=str)
@pytest.mark.parametrize("tempering", [None, po.Tempering.tempered(0.5)], ids=["bayes", "tempered"])
def test_effective_numbers_over_squares(groups: Groups, tempering: po.Tempering | None) -> None:
    joint, rows = network(tempering), data()
    start, _ = po.infer(MAP(steps=100, batch_size=None), joint, rows, progress=False)
    q, _ = po.infer(LaplaceFit(tuning=None), joint, rows, start=start, progress=False)
    after = MacKayUpdate(groups)(joint, q)
    gaussian, alpha = q.gaussian, 0.8**-2
    sigma, squares = gaussian.variance, gaussian.mean.square()
    parts = [slice(0, 17)] if isinstance(groups, Shared) else [slice(0, 12), slice(12, 17)]
    precision = after.bound_prior.precision(torch.zeros(17, dtype=torch.float64))
    for part in parts:
        effective = len(sigma[part]) - alpha * float(sigma[part].sum())
        torch.testing.assert_close(
            precision[part], (effective / squares[part].sum()).expand(len(sigma[part])), rtol=1e-9, atol=0.0
        )
    power = float(joint.tempering.likelihood_power)
    effective = (17 - alpha * float(sigma.sum())) / power
    residuals = float((rows[1] - joint.outputs(gaussian.mean, rows[0])).square().sum())
    assert after.likelihood.scale**-2 == pytest.approx((ROWS - effective) / residuals, rel=1e-9)
    assert MacKayUpdate(groups, noise=False)(joint, q).likelihood is joint.likelihood


def test_its_steps_at_one_mode_lead_where_the_search_goes() -> None:
    joint, rows = network(), data()
    start, _ = po.infer(MAP(steps=100, batch_size=None), joint, rows, progress=False)
    q, _ = po.infer(LaplaceFit(tuning=None), joint, rows, start=start, progress=False)
    found = retuned(q, MacKay())
    for _ in range(100):
        of = marginal_likelihood(q)
        joint = MacKayUpdate()(joint, q)
        moved = dataclasses.replace(
            q.gaussian,
            joint=joint,
            precision=of.precision_at(torch.tensor([joint.prior.scale**-2]), torch.tensor(joint.likelihood.scale)),
            data_terms=of.data_terms(torch.tensor(joint.likelihood.scale)),
        )
        q = po.posteriors.Linearized(joint, moved)
    assert joint.prior.scale == pytest.approx(found.joint.prior.scale, rel=1e-4)
    assert joint.likelihood.scale == pytest.approx(found.joint.likelihood.scale, rel=1e-4)


def test_only_random_weights_are_re_estimated() -> None:
    joint, rows = network(), data()
    q, _ = po.infer(LaplaceFit(subset=LastLayer(), tuning=None), joint, rows, progress=False)
    after = MacKayUpdate()(joint, q)
    precision = after.bound_prior.precision(torch.zeros(17, dtype=torch.float64))
    torch.testing.assert_close(precision[:12], torch.full((12,), 0.8**-2, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert float(precision[12]) != pytest.approx(0.8**-2, rel=1e-3)
    assert after.random == joint.random


def test_what_it_cannot_do_is_said() -> None:
    joint, rows = network(), data()
    with pytest.raises(TypeError, match=r"posterior of Laplace\. Got Point"):
        MacKayUpdate()(joint, Point(joint, joint.initial()))
    linear = po.Joint(nn.Linear(2, 1).double(), Gaussian(0.5), Normal(), ROWS)
    exact, _ = po.infer(Conjugate(), linear, rows, progress=False)
    with pytest.raises(ValueError, match=r"methods\.Laplace"):
        MacKayUpdate()(linear, exact)
    joint = po.Joint(joint.network, Bernoulli(), Laplace(), ROWS)
    q, _ = po.infer(LaplaceFit(tuning=None), joint, (rows[0], (rows[1] > 0).double()), progress=False)
    with pytest.raises(ValueError, match="neither a Normal prior nor Gaussian noise"):
        MacKayUpdate()(joint, q)
    with pytest.raises(TypeError, match=r"MacKayUpdate\.groups must be of kind Groups"):
        MacKayUpdate(Evidence())  # type: ignore[arg-type]
