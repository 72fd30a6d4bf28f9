"""A cold posterior is a tempered one under a wider prior."""

import dataclasses

import pytest
import torch
from contracts.cases import classification, labels, linear_regression, narrow_regression, numbers
from matrixcases import as_matrix

import posterity as po
from posterity.methods import MAP, Conjugate, Laplace
from posterity.optim import SGD

FLOAT64 = torch.float64


def pair(joint, temperature):
    """(L P0)^(1/T), and L^(1/T) with prior variance times T."""
    wider = po.priors.Normal(joint.prior.scale * temperature**0.5)
    return (
        dataclasses.replace(joint, tempering=po.Tempering.cold(temperature)),
        dataclasses.replace(joint, prior=wider, tempering=po.Tempering.tempered(temperature)),
    )


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
def test_conjugate(temperature):
    cold, tempered = (
        po.infer(Conjugate(), j, numbers(FLOAT64))[0] for j in pair(linear_regression(FLOAT64), temperature)
    )
    torch.testing.assert_close(cold.point(), tempered.point(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        as_matrix(cold.gaussian.precision), as_matrix(tempered.gaussian.precision), rtol=1e-12, atol=1e-12
    )
    plain, _ = po.infer(Conjugate(), linear_regression(FLOAT64), numbers(FLOAT64))
    torch.testing.assert_close(
        as_matrix(cold.gaussian.precision), as_matrix(plain.gaussian.precision) / temperature, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(cold.point(), plain.point(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("curvature", [po.curvature.GaussNewton(), po.curvature.Hessian()], ids=str)
def test_laplace(temperature, curvature):
    joints = pair(narrow_regression(FLOAT64), temperature)
    cold, tempered = (po.infer(Laplace(tuning=None, curvature=curvature), j, numbers(FLOAT64))[0] for j in joints)
    torch.testing.assert_close(
        as_matrix(cold.gaussian.precision), as_matrix(tempered.gaussian.precision), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("temperature", [0.1, 4.0])
def test_map_takes_the_same_steps(temperature):
    cold, tempered = (
        po.infer(MAP(steps=20, batch_size=6, optimizer=SGD(0.01)), j, labels(FLOAT64))[0]
        for j in pair(classification(FLOAT64), temperature)
    )
    torch.testing.assert_close(cold.point(), tempered.point(), rtol=1e-10, atol=1e-10)


def test_a_cold_mode_is_the_mode():
    """Both powers scale the gradient alone: a step size T times as large takes the same steps."""
    cold = dataclasses.replace(classification(FLOAT64), tempering=po.Tempering.cold(0.25))
    first, _ = po.infer(MAP(steps=20, optimizer=SGD(0.01)), cold, labels(FLOAT64))
    second, _ = po.infer(MAP(steps=20, optimizer=SGD(0.04)), classification(FLOAT64), labels(FLOAT64))
    torch.testing.assert_close(first.point(), second.point(), rtol=1e-10, atol=1e-10)
