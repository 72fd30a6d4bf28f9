"""Precisions of members side by side: what each says, stacked."""

import pytest
import torch
from matrixcases import STRUCTURES, as_matrix, normal

from posterity.precisions import LowRankCovariance
from posterity.precisions.block import PerMember

FLOAT64 = torch.float64


@pytest.fixture(params=STRUCTURES)
def cases(request):
    return [STRUCTURES[request.param](seed, ()) for seed in range(3)]


@pytest.fixture
def members(cases):
    return PerMember(tuple(case.precision for case in cases))


def test_everything_is_that_of_the_parts(members):
    size, parts = members.size, members.parts
    vectors, noise = normal(1, "v", 3, size), normal(2, "n", 3, 4, size)
    jacobian = normal(3, "j", 5, 2, size)
    for index, part in enumerate(parts):
        assert members.member(index) is part
        assert torch.equal(members.logdet[index], part.logdet)
        assert torch.equal(members.diagonal()[index], part.diagonal())
        assert torch.equal(members.variance()[index], part.variance())
        assert torch.equal(members.covariance()[index], part.covariance())
        assert torch.equal(members.matvec(vectors)[index], part.matvec(vectors[index]))
        assert torch.equal(members.solve(vectors)[index], part.solve(vectors[index]))
        assert torch.equal(members.colour(noise)[index], part.colour(noise[index]))
        assert torch.equal(members.quadratic(jacobian)[index], part.quadratic(jacobian))
        assert torch.equal(members.joint_quadratic(jacobian)[index], part.joint_quadratic(jacobian))
    assert members.matvec(vectors[0]).shape == (3, size)  # one vector for all


def test_each_is_rescaled_by_its_own(cases, members):
    if isinstance(members.parts[0], LowRankCovariance):
        with pytest.raises(TypeError, match="does not tell the curvature of the data from the prior"):
            members.rescaled(1.0, torch.ones(members.size, dtype=FLOAT64))
        return
    priors = torch.stack([0.7 * case.prior + (case.prior == 0) for case in cases])  # in proportion, where there is one
    for scale in (torch.tensor([0.5, 1.0, 3.0], dtype=FLOAT64), 2.0):
        together = members.rescaled(scale, priors)
        for index, case in enumerate(cases):
            own = float(scale[index]) if isinstance(scale, torch.Tensor) else scale
            wanted = own * case.curvature + torch.diag(priors[index])
            torch.testing.assert_close(as_matrix(together.member(index)), wanted, rtol=1e-10, atol=1e-10)


def test_one_prior_for_all():
    members = PerMember(tuple(STRUCTURES["dense"](seed, ()).precision for seed in range(2)))
    together = members.rescaled(1.0, torch.ones(members.size, dtype=FLOAT64))
    for index in range(2):
        wanted = STRUCTURES["dense"](index, ()).curvature + torch.eye(members.size, dtype=FLOAT64)
        torch.testing.assert_close(as_matrix(together.member(index)), wanted, rtol=1e-12, atol=1e-12)
