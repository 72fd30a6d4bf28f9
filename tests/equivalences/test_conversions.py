"""The knobs of other libraries, turned as a Tempering says, give the same gradients and the same optimum."""

import dataclasses

import pytest
import torch
from contracts.cases import classification, labels
from goldcases import load
from torch.nn import functional as F

import posterity as po
from posterity.evidence import elbo
from posterity.posteriors import Gaussian
from posterity.precisions import Diagonal

FLOAT64 = torch.float64
TEMPERINGS = [po.Tempering.bayes(), po.Tempering.tempered(0.2), po.Tempering.cold(3.0), po.Tempering(0.7, 2.0)]


@pytest.mark.parametrize("tempering", TEMPERINGS, ids=str)
def test_weight_decay_beside_a_mean_loss(tempering):
    joint = dataclasses.replace(classification(FLOAT64), tempering=tempering)
    (x, y), theta = labels(FLOAT64), joint.initial()
    _, grad, _ = joint.value_and_grad(theta, joint.check(po.model.Batch(x, y)))
    weights = theta.clone().requires_grad_()
    mean_loss = F.cross_entropy(joint.outputs(weights, x), y)
    decay = tempering.weight_decay(joint.prior.scale, num_data=20)
    theirs = torch.autograd.grad(mean_loss, weights)[0] + decay * theta
    torch.testing.assert_close(theirs, -grad / (20 * tempering.likelihood_power), rtol=1e-10, atol=1e-12)
    summed = tempering.weight_decay(joint.prior.scale, num_data=20, rows=20)
    assert summed == pytest.approx(20 * decay, rel=1e-12)


@pytest.mark.parametrize("tempering", TEMPERINGS, ids=str)
def test_the_fixed_point_of_sgd_with_weight_decay_is_the_mode(tempering):
    joint = dataclasses.replace(classification(FLOAT64), tempering=tempering)
    x, y = labels(FLOAT64)
    weights = torch.nn.Parameter(joint.initial())
    decay = tempering.weight_decay(joint.prior.scale, num_data=20)
    optimizer = torch.optim.SGD([weights], lr=0.5, momentum=0.9, weight_decay=decay)
    for _ in range(1500):
        optimizer.zero_grad()
        F.cross_entropy(joint.outputs(weights, x), y).backward()
        optimizer.step()
    _, grad, _ = joint.value_and_grad(weights.detach(), joint.check(po.model.Batch(x, y)))
    assert float(grad.abs().max()) < 1e-5
    assert float(weights.detach().abs().max()) > 1e-3


@pytest.mark.parametrize("row", range(3))
def test_kl_weight_beside_a_mean_loss_has_the_gold_optimum(row):
    """The mean over rows of E (y - f)^2 beta / 2, plus the weighted KL: its gradient vanishes where the gold says."""
    case = load("linear_meanfield_vi")
    x, y, at = case.inputs["X"], case.inputs["y"], f"rows.{row}."
    tempering = po.Tempering.tempered(case.at(at + "eta"))
    mean, scale = (case.at(at + name).clone().requires_grad_() for name in ("mean", "std"))
    prior = po.priors.Normal(case.inputs["alpha"] ** -0.5)
    losses = 0.5 * case.inputs["beta"] * ((y - x @ mean).square() + x.square() @ scale.square())  # (N,)

    def slope(weight, data_loss):
        grads = torch.autograd.grad(data_loss + weight * prior.kl(mean, scale), [mean, scale], retain_graph=True)
        return max(float(grad.abs().max()) for grad in grads)

    assert slope(tempering.kl_weight(num_data=7), losses.mean()) < 1e-8
    assert slope(tempering.kl_weight(num_data=7, rows=7), losses.sum()) < 1e-8
    assert slope(2.0 * tempering.kl_weight(num_data=7), losses.mean()) > 1e-3


def test_losses_of_batches_add_up_to_the_bound():
    """Sums over the rows of a batch, each with its share of the KL."""
    case = load("linear_meanfield_vi")
    tempering = po.Tempering.tempered(2.5)
    joint = po.Joint(
        torch.nn.Linear(2, 1, bias=False, dtype=FLOAT64),
        po.likelihoods.Gaussian(0.5),
        po.priors.Normal(0.8),
        7,
        tempering,
    )
    x, y = case.inputs["X"], case.inputs["y"].unsqueeze(1)
    q = Gaussian(joint, torch.tensor([0.3, 0.9], dtype=FLOAT64), Diagonal(torch.tensor([20.0, 30.0])))
    whole, total = elbo(q, (x, y)), 0.0
    for low, high in ((0, 3), (3, 7)):
        part = dataclasses.replace(q, joint=dataclasses.replace(joint, num_data=high - low))
        fit = elbo(part, (x[low:high], y[low:high])).data_fit
        total += -fit + tempering.kl_weight(num_data=7, rows=high - low) * whole.kl
    assert total == pytest.approx(-whole.tempered, rel=1e-12)


def test_one_knob_for_each_member():
    powers = po.Tempering.tempered(torch.tensor([0.5, 2.0], dtype=FLOAT64))
    torch.testing.assert_close(powers.kl_weight(10), torch.tensor([0.05, 0.2], dtype=FLOAT64))
    scales = torch.tensor([1.0, 2.0], dtype=FLOAT64)
    torch.testing.assert_close(powers.weight_decay(scales, 10), torch.tensor([0.05, 0.05], dtype=FLOAT64))


def test_doors():
    with pytest.raises(ValueError, match=r"prior_power = 1.*cold\(T\)"):
        po.Tempering.cold(0.5).kl_weight(10)
    with pytest.raises(ValueError, match="prior_power = 1"):
        po.Tempering(1.0, torch.tensor([1.0, 2.0])).kl_weight(10)
    with pytest.raises(ValueError, match=r"kl_weight: num_data must be a positive number\. Got 0"):
        po.Tempering.bayes().kl_weight(0)
    with pytest.raises(ValueError, match=r"weight_decay: prior_scale must be a positive number\. Got -1\.0"):
        po.Tempering.bayes().weight_decay(-1.0, 10)
