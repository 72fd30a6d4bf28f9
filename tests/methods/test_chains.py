"""What samplers over all rows and samplers on mini-batches have in common."""

import pytest
import torch
from contracts.cases import linear_regression, numbers

import posterity as po
from posterity.methods import HMC, MALA, NUTS, SGHMC, SGLD, Langevin, Metropolis

METHODS = (NUTS, HMC, MALA, Langevin, Metropolis, SGLD, SGHMC)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ({"draws": 0}, "draws must be a positive whole number. Got 0."),
        ({"chains": 1.5}, "chains must be a positive whole number. Got 1.5."),
        ({"thin": True}, "thin must be a positive whole number. Got True."),
        ({"warmup": True}, "warmup must be a whole number of at least 0. Got True."),
        ({"warmup": -1}, "warmup must be a whole number of at least 0. Got -1."),
        ({"warmup": 0.0}, "warmup must be a whole number of at least 0. Got 0.0."),
    ],
)
def test_numbers_that_cannot_be(method, setting, wanted):
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole text is compared
        method(**setting)
    assert str(error.value) == f"{method.__name__}.{wanted}"


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_points_are_refused_and_never_sampled_without_their_prior(method):
    whole = linear_regression(torch.float64)
    joint = po.Joint(whole.network, whole.likelihood, whole.prior, whole.num_data, random="0.weight")
    for start in (None, whole.initial()):
        with pytest.raises(ValueError, match=rf"{method.__name__} samples all weights, .* joint\.with_weights"):
            po.infer(method(draws=1, warmup=0, chains=2), joint, numbers(torch.float64), start=start)


@pytest.mark.parametrize("method", METHODS)
def test_a_start_has_a_row_for_each_chain_or_is_copied_to_all(method):
    joint, sampler = linear_regression(torch.float64), method(draws=1, warmup=0, chains=3)
    one = joint.initial()
    copies = sampler.each_chain(joint, one)
    assert torch.equal(copies, torch.stack([one, one, one]))
    copies[0] += 1.0
    assert torch.equal(copies[1], one)  # none is a view of another, nor of the start
    assert torch.equal(one, joint.initial())
    with pytest.raises(ValueError, match=rf"{method.__name__}\.chains is 3, .* Got 2 rows\. Use chains=2"):
        sampler.each_chain(joint, one.expand(2, -1))
