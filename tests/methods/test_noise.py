"""Observation noise that is learnt along with the weights."""

import dataclasses
import math

import pytest
import torch
from contracts.cases import numbers, regression
from matrixcases import as_matrix

import posterity as po
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, Conjugate, Laplace

FLOAT64 = torch.float64
TO_THE_MODE = MAP(steps=800, batch_size=None, optimizer=po.optim.Adam(0.05), schedule=po.optim.Cosine())


@pytest.fixture(scope="module")
def fitted():
    joint = regression(FLOAT64)
    return joint, po.infer(TO_THE_MODE, joint, numbers(FLOAT64))[0]


def test_map_fits_the_noise_to_the_residuals(fitted):
    joint, q = fitted
    x, y = numbers(FLOAT64)
    assert joint.likelihood.learn
    assert not q.joint.likelihood.learn
    assert q.point().shape == (joint.num_weights,)
    residual = y - q.joint.outputs(q.point(), x)
    # With a flat prior on log(scale) the mode is at the root mean square of the residuals.
    assert math.isclose(q.joint.likelihood.scale, float(residual.square().mean().sqrt()), rel_tol=1e-6)
    assert q.predict(x).aleatoric[0].item() == pytest.approx(q.joint.likelihood.scale**2)


def test_a_prior_of_the_noise_moves_its_mode():
    mean, deviation = math.log(0.5), 0.3
    likelihood = Gaussian(0.3, learn=True, log_scale_prior=(mean, deviation))
    q, _ = po.infer(TO_THE_MODE, dataclasses.replace(regression(FLOAT64), likelihood=likelihood), numbers(FLOAT64))
    x, y = numbers(FLOAT64)
    squares = float((y - q.joint.outputs(q.point(), x)).square().sum())
    scale = q.joint.likelihood.scale
    # Slope in log(scale) of -N log(scale) - squares / (2 scale^2) - (log(scale) - mean)^2 / (2 deviation^2).
    slope = -len(y) + squares / scale**2 - (math.log(scale) - mean) / deviation**2
    assert abs(slope) < 1e-4 * len(y)


def test_laplace_uses_the_fitted_noise(fitted):
    joint, q = fitted
    learnt, _ = po.infer(Laplace(tuning=None), joint, numbers(FLOAT64), start=q)
    held, _ = po.infer(Laplace(tuning=None), q.joint, numbers(FLOAT64), start=q)
    assert learnt.joint.likelihood == held.joint.likelihood
    assert learnt.joint.likelihood.scale == pytest.approx(q.joint.likelihood.scale, rel=1e-14)
    torch.testing.assert_close(
        as_matrix(learnt.gaussian.precision), as_matrix(held.gaussian.precision), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(learnt.log_evidence, held.log_evidence, rtol=1e-12, atol=1e-12)
    fresh, _ = po.infer(
        Laplace(tuning=None), joint, numbers(FLOAT64), start=q.point()
    )  # weights alone: the noise starts anew
    assert fresh.joint.likelihood.scale == pytest.approx(0.3)


def test_each_member_fits_its_own_noise():
    joint = dataclasses.replace(regression(FLOAT64), prior=po.priors.Normal(torch.tensor([0.05, 0.7])))
    method = MAP(steps=200, batch_size=None, optimizer=po.optim.Adam(0.05))
    together, _ = po.infer(method, joint, numbers(FLOAT64))
    assert together.joint.likelihood.scale.shape == (2, 1, 1)
    scales = [together.member(i).joint.likelihood.scale for i in range(2)]
    assert scales[0] > 1.5 * scales[1]  # a prior that narrow leaves the signal in the noise
    through_start, _ = po.infer(Laplace(tuning=None), joint, numbers(FLOAT64), start=together)
    through_joint, _ = po.infer(Laplace(tuning=None), together.joint, numbers(FLOAT64), start=together)
    for index in range(2):
        alone, _ = po.infer(Laplace(tuning=None), joint.member(index), numbers(FLOAT64), start=together.member(index))
        for q in (through_start, through_joint):
            one = q.member(index)
            assert one.joint.likelihood.scale == pytest.approx(scales[index], rel=1e-12)
            torch.testing.assert_close(
                as_matrix(one.gaussian.precision), as_matrix(alone.gaussian.precision), rtol=1e-10, atol=1e-10
            )


def test_conjugate_refuses_a_noise_to_be_learnt():
    with pytest.raises(ValueError, match=r"fixed scale. Use Laplace"):
        po.infer(Conjugate(), regression(FLOAT64), numbers(FLOAT64))
