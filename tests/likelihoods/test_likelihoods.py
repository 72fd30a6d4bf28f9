"""What is special to each likelihood."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hyperbolic import log_density
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.curvature import GaussNewton
from posterity.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    Poisson,
    StudentT,
)
from posterity.model import Batch, Joint
from posterity.numerics.random import Key
from posterity.priors import Normal
from posterity.storage import decode, encode


def test_gaussian_log_prob_keeps_all_constants() -> None:
    outputs = torch.tensor([[1.0, -2.0], [0.5, 0.0]], dtype=torch.float64)
    targets = torch.tensor([[0.0, 1.0], [2.0, -1.0]], dtype=torch.float64)
    scale = torch.tensor([0.5, 3.0], dtype=torch.float64)
    expected = torch.distributions.Normal(outputs, scale).log_prob(targets).sum(-1)
    torch.testing.assert_close(Gaussian((0.5, 3.0)).log_prob(outputs, targets), expected, rtol=1e-14, atol=0.0)


def test_gaussian_sums_over_an_event_of_several_axes() -> None:
    outputs = Key(0).normal((2, 4, 3, 5), torch.float64, torch.get_default_device())
    targets = outputs[0] + 1.0
    likelihood = Gaussian(2.0)
    value = likelihood.log_prob(outputs, targets)
    assert value.shape == (2, 4)
    expected = torch.distributions.Normal(outputs, 2.0).log_prob(targets).sum((-1, -2))
    torch.testing.assert_close(value, expected)
    assert likelihood.output_hessian(outputs, targets).shape == (2, 4, 15, 15)
    members = Gaussian(2.0, learn=True).with_free(torch.tensor([[0.0], [math.log(2.0)]], dtype=torch.float64))
    torch.testing.assert_close(members.log_prob(outputs, targets)[1], expected[1])


def test_gaussian_check_turns_a_vector_into_a_column() -> None:
    targets = torch.tensor([1.0, 2.0])
    checked = Gaussian().check(torch.zeros(2, 1), targets)
    assert checked.shape == (2, 1)
    assert Gaussian().check(torch.zeros(2), targets).shape == (2,)
    assert Gaussian().check(torch.zeros(1, 1), targets[:1]).shape == (1, 1)


@pytest.mark.parametrize("scale", [(1.0, 2.0), torch.ones(2), torch.ones(3, 1, 2)], ids=["tuple", "tensor", "members"])
def test_gaussian_check_refuses_a_scale_for_other_outputs(scale: object) -> None:
    likelihood = Gaussian(scale)
    with pytest.raises(ValueError, match=r"one entry for each of 2 outputs. Got outputs of shape \(4, 3\)"):
        likelihood.check(torch.zeros(4, 3), torch.zeros(4, 3))
    assert likelihood.check(torch.zeros(4, 2), torch.zeros(4, 2)).shape == (4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.0}, r"Gaussian\.scale must be a positive number .*Got 0\.0"),
        ({"scale": -1.0}, r"Got -1\.0"),
        ({"scale": math.nan}, "Got nan"),
        ({"scale": "1"}, "Got '1'"),
        ({"scale": ()}, r"Got \(\)"),
        ({"scale": (1.0, 0.0)}, r"Gaussian\.scale\[1\] must be a positive number\. Got 0\.0"),
        ({"scale": torch.tensor([1.0, -1.0])}, r"Got tensor\(2,\) \[1\.0, -1\.0\]"),
        ({"scale": torch.ones(2, 2)}, r"\(M, 1, D\)\. Got tensor\(2, 2\)"),
        ({"scale": torch.ones(2, 1, 2), "learn": True}, r"when it is not learnt"),
        ({"log_scale_prior": (0.0, 1.0)}, "Give learn=True"),
        ({"learn": True, "log_scale_prior": (0.0, 0.0)}, "standard deviation must be a positive number"),
        ({"learn": True, "log_scale_prior": (0.0,)}, r"must be \(mean, standard deviation\)"),
        ({"learn": True, "log_scale_prior": (math.inf, 1.0)}, r"must be \(mean, standard deviation\)"),
    ],
)
def test_gaussian_refuses_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gaussian(**arguments)


def test_gaussian_free_parameters() -> None:
    shared, each = Gaussian(0.5, learn=True), Gaussian((0.5, 2.0), learn=True)
    like = torch.zeros(1, dtype=torch.float64)
    assert shared.free_names() == {"log_scale": (1,)}
    assert each.free_names() == {"log_scale": (2,)}
    assert shared.free(like).tolist() == [math.log(0.5)]
    assert each.free(like).tolist() == [math.log(0.5), math.log(2.0)]
    assert Gaussian(torch.tensor(0.5), learn=True).free_names() == {"log_scale": (1,)}


def test_gaussian_with_free_has_the_shape_that_broadcasts() -> None:
    likelihood = Gaussian((1.0, 1.0), learn=True)
    assert likelihood.with_free(torch.zeros(2)).scale.shape == (2,)
    assert likelihood.with_free(torch.zeros(3, 2)).scale.shape == (3, 1, 2)
    assert likelihood.with_free(torch.zeros(4, 3, 2)).scale.shape == (4, 3, 1, 2)


def test_gaussian_with_free_skips_the_checks_of_the_constructor() -> None:
    assert Gaussian(1.0, learn=True).with_free(torch.tensor([torch.nan])).scale.isnan().all()


def test_gaussian_with_free_is_differentiable_in_raw() -> None:
    outputs = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    targets = torch.zeros(3, 1, dtype=torch.float64)
    raw = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(Gaussian(learn=True).with_free(raw).log_prob(outputs, targets).sum(), raw)
    # d/d log s of -r^2 / (2 s^2) - log s is r^2 / s^2 - 1
    assert float(grad) == pytest.approx(21.0 * math.exp(-0.6) - 3.0, rel=1e-12)


def test_gaussian_fixed_gives_back_the_kind_of_scale_it_started_with() -> None:
    assert Gaussian(1.0, learn=True).fixed(torch.tensor([0.0])) == Gaussian(1.0)
    assert isinstance(Gaussian(1.0, learn=True).fixed(torch.tensor([0.5])).scale, float)
    assert isinstance(Gaussian((1.0,), learn=True).fixed(torch.tensor([0.5])).scale, tuple)
    assert Gaussian((1.0, 2.0), learn=True).fixed(torch.zeros(2)) == Gaussian((1.0, 1.0))
    assert Gaussian(torch.ones(2), learn=True, log_scale_prior=(0.0, 1.0)).fixed(torch.zeros(2)) == Gaussian((1.0, 1.0))
    assert Gaussian((1.0, 2.0), learn=True).fixed(torch.zeros(3, 2)) == Gaussian(torch.ones(3, 1, 2))


def test_gaussian_prior_of_the_log_scale() -> None:
    raw = torch.tensor([[0.1, -0.4], [1.0, 2.0]], dtype=torch.float64)
    likelihood = Gaussian((1.0, 1.0), learn=True, log_scale_prior=(-1.0, 0.5))
    expected = torch.distributions.Normal(-1.0, 0.5).log_prob(raw).sum(-1)
    torch.testing.assert_close(likelihood.free_log_prior(raw), expected)
    assert Gaussian((1.0, 1.0), learn=True).free_log_prior(raw).tolist() == [0.0, 0.0]


def test_gaussian_members_without_event_axis() -> None:
    outputs = torch.arange(6.0).reshape(2, 3)  # (M, N)
    members = Gaussian(1.0, learn=True).with_free(torch.tensor([[0.0], [math.log(2.0)]]))
    assert members.log_prob(outputs, torch.zeros(3)).shape == (2, 3)
    torch.testing.assert_close(members.variance(outputs), torch.tensor([[1.0] * 3, [4.0] * 3]))


def test_gaussian_equality_is_by_content() -> None:
    assert Gaussian(2) == Gaussian(2.0) == Gaussian(torch.tensor(2.0))
    assert Gaussian([1.0, 2.0]) == Gaussian(torch.tensor([1.0, 2.0]))
    assert len({Gaussian((1.0, 2.0)), Gaussian(torch.tensor([1.0, 2.0]))}) == 1
    assert Gaussian(1.0) != Gaussian(1.0 + 1e-12)
    assert Gaussian((1.0,)) != Gaussian(1.0)
    assert Gaussian(1.0, learn=True) != Gaussian(1.0)


def test_gaussian_keeps_no_cast_made_under_a_transform() -> None:
    likelihood, outputs = Gaussian((0.5, 2.0)), torch.zeros(3, 2)
    torch.func.grad(lambda f: likelihood.log_prob(f, outputs).sum())(outputs)
    assert likelihood._cast(outputs).data_ptr() != 0  # what is left of a transform has no storage
    assert likelihood._cast(outputs) is likelihood._cast(outputs)


def test_gaussian_member_and_back() -> None:
    for learnt in (Gaussian(1.0, learn=True), Gaussian((1.0, 2.0), learn=True)):
        raw = torch.arange(3.0 * learnt.num_free).reshape(3, -1) / 10.0  # (M, H)
        members = learnt.fixed(raw)
        torch.testing.assert_close(learnt.free_from(members, raw), raw)
        for index in range(3):
            alone = members.member(index)
            assert alone.variance(torch.zeros(1, 2)).tolist()[0] == pytest.approx(
                (2.0 * raw[index]).exp().expand(2).tolist(), rel=1e-6
            )
            torch.testing.assert_close(learnt.free_from(alone, raw), raw[index])
    assert Gaussian(2.0).member(1) == Gaussian(2.0)


def test_gaussian_free_from_another_kind_is_its_own() -> None:
    like = torch.zeros(1)
    pair = Gaussian((1.0, 2.0), learn=True)
    assert torch.equal(pair.free_from(Bernoulli(), like), pair.free(like))
    assert torch.equal(pair.free_from(Gaussian((1.0, 1.0, 1.0)), like), pair.free(like))
    assert pair.free_from(Gaussian(1.0), like).tolist() == [0.0, 0.0]
    assert Gaussian(2.0).free_from(pair, like).shape == (0,)


@pytest.mark.cpu  # the formulas take labels that were checked: on a GPU others end its context
@pytest.mark.parametrize("lead", [(), (4,)])
@pytest.mark.parametrize("label", [-99, -1, 3])
@pytest.mark.parametrize("of", [Categorical().log_prob, Categorical().total_log_prob])
def test_no_other_number_stands_for_a_missing_label(
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], lead: tuple[int, ...], label: int
) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        of(torch.zeros(*lead, 2, 3), torch.tensor([1, label]))


def test_categorical_is_exact_far_from_zero() -> None:
    outputs = torch.tensor([[0.0, 1000.0], [0.0, -1000.0], [1e4, 1e4]], dtype=torch.float64)
    value = Categorical().log_prob(outputs, torch.tensor([0, 1, 0]))
    assert value.tolist() == pytest.approx([-1000.0, -1000.0, -math.log(2.0)], rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_categorical_check_gives_int64(dtype: torch.dtype) -> None:
    checked = Categorical().check(torch.zeros(2, 3), torch.tensor([0, 2], dtype=dtype))
    assert checked.dtype == torch.int64
    assert checked.tolist() == [0, 2]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("output_shape", [(3,), (3, 1)], ids=str)
@pytest.mark.parametrize("target_shape", [(3,), (3, 1)], ids=str)
def test_bernoulli_check_gives_the_outputs_shape_and_dtype(
    dtype: torch.dtype, output_shape: tuple[int, ...], target_shape: tuple[int, ...]
) -> None:
    targets = torch.tensor([0, 1, 1]).to(dtype).reshape(target_shape)
    checked = Bernoulli().check(torch.zeros(output_shape), targets)
    assert checked.dtype == torch.float32
    assert checked.shape == output_shape
    assert checked.reshape(-1).tolist() == [0.0, 1.0, 1.0]


@given(logit=st.floats(-700.0, 700.0), label=st.sampled_from([0.0, 1.0]))
@settings(deadline=None, max_examples=60)
def test_bernoulli_equals_categorical_with_a_zero_logit(logit: float, label: float) -> None:
    outputs = torch.tensor([[logit]], dtype=torch.float64)
    value = Bernoulli().log_prob(outputs, torch.tensor([[label]], dtype=torch.float64))
    pair = torch.cat([torch.zeros_like(outputs), outputs], dim=-1)
    expected = Categorical().log_prob(pair, torch.tensor([int(label)]))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("label", "logit"), [(1.0, 40.0), (0.0, -40.0)])
def test_bernoulli_keeps_the_tail_of_a_sure_answer(label: float, logit: float) -> None:
    value = Bernoulli().log_prob(torch.tensor([logit], dtype=torch.float64), torch.tensor([label], dtype=torch.float64))
    assert float(value) == pytest.approx(-math.exp(-40.0), rel=1e-10, abs=0.0)
    variance = Bernoulli().variance(torch.tensor([logit], dtype=torch.float64))
    assert float(variance) == pytest.approx(math.exp(-40.0), rel=1e-10, abs=0.0)


@pytest.mark.parametrize(
    "likelihood",
    [
        StudentT(5.0, (0.5, 2.0), learn=True, log_scale_prior=(0.0, 1.0)),
        StudentT(5.0, torch.ones(3, 1, 2)),
        Categorical(positions=2),
        Heteroscedastic(),
        Poisson(),
    ],
    ids=str,
)
def test_is_stored_and_read_back(likelihood: Likelihood) -> None:
    tensors: dict[str, torch.Tensor] = {}
    assert decode(encode(likelihood, tensors), tensors) == likelihood


def test_functions_are_not_stored() -> None:
    with pytest.raises(TypeError, match=r"likelihood\.log_density must be .* to be stored\. Got function"):
        encode(Custom(log_density), {}, "likelihood")


@dataclass(frozen=True)
class Smoothed(Categorical):
    """Half of each label is spread over all classes."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * super().log_prob(outputs, targets) + 0.5 * outputs.log_softmax(-1).mean(-1)


@dataclass(frozen=True)
class Absolute(Gaussian):
    """Errors by their absolute value, entry by entry."""

    def entry_log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(targets - outputs).abs()


@dataclass(frozen=True)
class Doubled(Categorical):
    """Twice the Fisher information."""

    def output_fisher(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        return 2.0 * super().output_fisher(outputs, event_dims)


@pytest.mark.parametrize("likelihood", [Smoothed(), Absolute(1.0)], ids=str)
def test_a_subclass_is_fitted_by_its_own_density(likelihood: Likelihood) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    x = Key(0).normal((5, 2), torch.float64)
    targets = torch.tensor([0, 1, 2, 1, 0]) if isinstance(likelihood, Categorical) else x @ x.new_ones(2, 3)
    joint = Joint(net, likelihood, Normal(1.0), num_data=5)
    theta, batch = joint.initial(), joint.check(Batch(x, targets))
    leaf = theta.clone().requires_grad_()
    wanted = likelihood.log_prob(joint.outputs(leaf, x), batch.targets).sum() + joint.log_prior(leaf)
    (slope,) = torch.autograd.grad(wanted, leaf)
    for _ in range(2):  # by autograd, then by the chain of linear layers
        value, grad, _ = joint.value_and_grad(theta, batch)
        torch.testing.assert_close(value, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, slope, rtol=1e-12, atol=1e-12)
    weighed = batch._replace(weights=torch.ones(batch.targets.shape, dtype=torch.float64))
    if isinstance(likelihood, Absolute):
        torch.testing.assert_close(joint.value_and_grad(theta, weighed)[0], wanted.detach())


@pytest.mark.parametrize("positions", [0, 1])
def test_the_curvature_of_a_subclass_is_of_its_own_fisher_information(positions: int) -> None:
    net = torch.nn.Conv1d(2, 3, 1).double() if positions else torch.nn.Linear(2, 3).double()
    x = Key(0).normal((4, 2, *[2] * positions), torch.float64)
    y = torch.zeros(4, *[2] * positions, dtype=torch.long)
    plain, doubled = (Joint(net, kind(positions), Normal(1.0), num_data=4) for kind in (Categorical, Doubled))
    matrices = [GaussNewton().matrix(joint, joint.initial(), Batch(x, y), None) for joint in (plain, doubled)]
    torch.testing.assert_close(matrices[1], 2.0 * matrices[0], rtol=1e-9, atol=1e-9)
