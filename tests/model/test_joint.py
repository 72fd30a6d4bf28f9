"""The log density of a problem and its gradient."""

import dataclasses
import itertools
import math

import modulezoo as zoo
import pytest
import torch
from goldcases import load
from torch import nn

from posterity.likelihoods import Bernoulli, Categorical, Gaussian
from posterity.model import Batch, Joint, Tempering
from posterity.numerics import Key
from posterity.priors import Normal
from posterity.priors.prior import Prior

MEMBERS = 3
ROWS = 6
LEARNT = Gaussian(0.7, learn=True)
LIKELIHOODS = {
    "gaussian": Gaussian(0.7),
    "gaussian per output": Gaussian((0.7, 1.3)),
    "learnt": LEARNT,
    "learnt per output": Gaussian((0.7, 1.3), learn=True, log_scale_prior=(0.1, 0.5)),
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
}
EVERY = pytest.mark.parametrize("name", list(LIKELIHOODS))


def close(first, second, tolerance=1e-12):
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


def problem(name="gaussian", kind=zoo.mlp, tempering=None, prior=None, num_data=20):
    module = zoo.make(kind)
    if name == "bernoulli":
        module = nn.Sequential(module, nn.Linear(2, 1).double())
    prior = Normal(1.5) if prior is None else prior
    return Joint(module, LIKELIHOODS[name], prior, num_data, tempering or Tempering.bayes())


def targets(name, rows=ROWS, seed=5):
    key, device = Key(seed), torch.get_default_device()
    if name == "categorical":
        return (key.uniform((rows,)) * 2).long().to(device)
    if name == "bernoulli":
        return (key.uniform((rows, 1), torch.float64) > 0.5).double().to(device)
    return key.normal((rows, 2), torch.float64).to(device)


def batch_of(name="gaussian", kind=zoo.mlp, weights=False, per_member=False):
    if per_member:
        each = [batch_of(name, kind, weights)._replace(inputs=zoo.inputs(kind, seed=i)) for i in range(MEMBERS)]
        each = [b._replace(targets=targets(name, seed=i)) for i, b in enumerate(each)]
        scaled = torch.stack([(i + 1.0) * b.weights for i, b in enumerate(each)]) if weights else None
        return Batch(torch.stack([b.inputs for b in each]), torch.stack([b.targets for b in each]), scaled, True)
    some = Key(3).uniform((ROWS,), torch.float64).to(torch.get_default_device()) + 0.5
    return Batch(zoo.inputs(kind), targets(name), some if weights else None)


def by_hand(joint, theta, batch):
    """The definition, row by row."""
    weights, raw = theta[: joint.num_weights], theta[joint.num_weights :]
    outputs = joint.network.outputs(weights, batch.inputs)
    likelihood = joint.likelihood.with_free(raw)
    each = [likelihood.log_prob(outputs[n : n + 1], batch.targets[n : n + 1])[0] for n in range(batch.size)]
    factors = torch.ones(batch.size) if batch.weights is None else batch.weights
    data = sum(float(factor) * value for factor, value in zip(factors, each, strict=True))
    prior = sum(-0.5 * (w / 1.5) ** 2 - math.log(1.5) - 0.5 * math.log(2 * math.pi) for w in weights)
    prior = prior + joint.likelihood.free_log_prior(raw)
    tempering = joint.tempering
    return tempering.likelihood_power * joint.num_data / batch.size * data + tempering.prior_power * prior


@EVERY
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("tempering", [Tempering.bayes(), Tempering(0.3, 1.7)])
def test_density_and_gradient_are_the_definition(name, weights, tempering):
    joint, batch = problem(name, tempering=tempering), batch_of(name, weights=weights)
    theta = (joint.initial() + 0.1).requires_grad_()
    wanted = by_hand(joint, theta, batch)
    density = joint.log_density(theta, batch)
    close(density, wanted)
    (grad,) = torch.autograd.grad(wanted, theta)
    close(torch.autograd.grad(density, theta)[0], grad)
    value, mine, _ = joint.value_and_grad(theta, batch)
    close(value, wanted.detach())
    close(mine, grad)
    assert not value.requires_grad
    assert not mine.requires_grad
    assert value.shape == ()


@EVERY
@pytest.mark.parametrize("per_member", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_members_are_a_loop(name, per_member, weights, own):
    """With `own`, each member has its own powers and prior scale."""
    tempering = Tempering(torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 3.0, 0.2])) if own else None
    joint = problem(name, tempering=tempering, prior=Normal(torch.tensor([0.5, 1.0, 2.0]) if own else 1.5))
    batch = batch_of(name, weights=weights, per_member=per_member)
    theta = zoo.fork(joint.initial(), MEMBERS)
    value, grad, _ = joint.value_and_grad(theta, batch)
    assert (value.shape, grad.shape) == ((MEMBERS,), theta.shape)
    assert grad.is_contiguous()
    leaf = theta.clone().requires_grad_()
    density = joint.log_density(leaf, batch)
    close(density.detach(), value)
    close(torch.autograd.grad(density.sum(), leaf)[0], grad)
    for index in range(MEMBERS):
        one_value, one_grad, _ = joint.member(index).value_and_grad(theta[index], batch.member(index))
        close(value[index], one_value)
        close(grad[index], one_grad)
        one = joint.member(index).log_likelihood(theta[index], batch.member(index))
        close(joint.log_likelihood(theta, batch)[index], one)
        close(joint.log_prior(theta)[index], joint.member(index).log_prior(theta[index]))


@pytest.mark.parametrize("kind", [kind for kind in zoo.KINDS if kind not in (zoo.weight_norm, zoo.Tied)])
def test_gradients_through_every_kind_of_module(kind):
    joint, batch = problem(kind=kind), batch_of(kind=kind)
    theta = zoo.fork(joint.initial(), MEMBERS)
    value, grad, after = joint.value_and_grad(theta, batch)
    for index in range(MEMBERS):
        leaf = theta[index].clone().requires_grad_()
        outputs, buffers = joint.network.run(joint.network.views(leaf), batch.inputs, train=True)
        rows = joint.likelihood.log_prob(outputs, batch.targets)
        density = joint.num_data / ROWS * rows.sum() + joint.prior.log_prob(leaf)
        close(value[index], density.detach(), 1e-11)
        close(grad[index], torch.autograd.grad(density, leaf)[0], 1e-11)
        one_value, one_grad, _ = joint.value_and_grad(theta[index], batch)
        close(one_value, density.detach(), 1e-11)
        close(one_grad, grad[index], 1e-11)
        assert all(torch.allclose(after[name][index], b, rtol=1e-12) for name, b in buffers.items())


def test_batch_norm_trains_in_value_and_grad_and_rests_in_log_density():
    joint, batch = problem(kind=zoo.batch_norm), batch_of(kind=zoo.batch_norm)
    theta = joint.initial()
    _, _, buffers = joint.value_and_grad(theta, batch)
    _, _, later = joint.value_and_grad(theta, batch, buffers)
    counts = [b["1.num_batches_tracked"] for b in (joint.network.buffers, buffers, later)]
    assert [int(count) for count in counts] == [0, 1, 2]
    rested = [float(joint.log_density(theta, batch, b)) for b in (None, buffers, joint.network.buffers)]
    assert rested[0] == rested[2]
    assert rested[0] != rested[1]


def test_mini_batches_are_scaled_to_the_whole_data():
    """Over all subsets of one size the estimate averages to the full value, and the variance is the known one."""
    case = load("minibatch_scaling")
    rows, kl = case.inputs["expected_log_lik_per_point"], case.inputs["kl"]
    # log N(y; 0, 1) = r at y = sqrt(-2 r - log 2 pi), for rows moved below the peak; the shift is taken off again
    shift = 1.0
    y = (-2.0 * (rows - shift) - math.log(2 * math.pi)).sqrt().unsqueeze(-1)
    module = nn.Linear(1, 1, bias=False).double()
    scale = math.exp(kl) / math.sqrt(2 * math.pi)  # log N(0; 0, scale^2) = -kl
    joint = Joint(module, Gaussian(1.0), Normal(scale), num_data=5)
    theta, x = torch.zeros(1, dtype=torch.float64), torch.ones(5, 1, dtype=torch.float64)
    shifted = 5 * shift
    case.check("full_elbo", joint.log_density(theta, Batch(x, y)) + shifted)
    for place, row in enumerate(case.at("rows")):
        subsets = list(itertools.combinations(range(5), row["M"]))
        parts = [Batch(x[list(subset)], y[list(subset)]) for subset in subsets]
        values = torch.stack([joint.log_density(theta, part) for part in parts]) + shifted
        case.check(f"rows.{place}.mean_scaled", values.mean())
        case.check(f"rows.{place}.var_scaled", values.var(correction=0))
        assert all(
            torch.equal(joint.value_and_grad(theta, p)[0] + shifted, v) for p, v in zip(parts, values, strict=True)
        )


def test_gradients_of_mini_batches_average_to_the_full_one():
    joint, batch = problem("categorical", num_data=ROWS), batch_of("categorical", weights=True)
    theta = joint.initial()
    _, full, _ = joint.value_and_grad(theta, batch)
    pairs = [list(pair) for pair in itertools.combinations(range(ROWS), 2)]
    each = [joint.value_and_grad(theta, batch.map(lambda t, p=pair: t[p]))[1] for pair in pairs]
    close(torch.stack(each).mean(0), full)


def test_theta_is_untouched_and_every_call_gives_a_new_gradient():
    for name in ("gaussian", "learnt"):
        joint, batch = problem(name), batch_of(name)
        for theta in (joint.initial(), zoo.fork(joint.initial(), MEMBERS), joint.initial().expand(2, -1)):
            before = theta.clone()
            _, first, _ = joint.value_and_grad(theta, batch)
            kept = first.clone()
            _, second, _ = joint.value_and_grad(theta, batch)
            assert torch.equal(theta, before)
            assert not theta.requires_grad
            assert theta.grad is None
            assert first.data_ptr() != second.data_ptr()
            assert torch.equal(first, kept)
            second.zero_()
            assert torch.equal(first, kept)
            with torch.no_grad():
                assert torch.equal(joint.value_and_grad(theta, batch)[1], kept)


class Slope(Prior):
    """log p = sum of theta: autograd gives its gradient as one number, expanded."""

    def log_prob(self, theta):
        return theta.sum(-1)

    def sample(self, shape, key, like):
        raise NotImplementedError

    variance = cross_entropy = precision = sample


def test_a_prior_whose_gradient_is_expanded():
    joint, batch = problem(prior=Slope()), batch_of()
    flat = problem(prior=Normal(1e9)).value_and_grad(joint.initial(), batch)[1]
    close(joint.value_and_grad(joint.initial(), batch)[1], flat + 1.0)
    theta = zoo.fork(joint.initial(), 2)
    close(joint.value_and_grad(theta, batch)[1][1], joint.value_and_grad(theta[1], batch)[1])


def test_a_weight_the_outputs_do_not_use_keeps_the_priors_gradient():
    module = zoo.make(zoo.mlp)
    module.unused = nn.Linear(2, 2).double()
    module.forward = lambda x, module=module: module[2](module[1](module[0](x)))
    joint = Joint(module, Gaussian(0.7), Normal(1.5), 20)
    place = joint.layout.matching("unused.*")[0]
    for theta in (joint.initial(), zoo.fork(joint.initial(), 2)):
        _, grad, _ = joint.value_and_grad(theta, batch_of())
        part = slice(place.offset, place.offset + place.size)
        close(grad[..., part], -theta[..., part] / 1.5**2)


def test_the_noise_is_the_end_of_theta():
    joint = problem("learnt per output")
    assert (joint.num_weights, joint.size) == (32, 34)
    assert joint.layout.names[-1] == "likelihood.log_scale"
    assert joint.layout.size == 34
    assert joint.initial()[32:].tolist() == pytest.approx([math.log(0.7), math.log(1.3)])
    weights, raw = joint.split(torch.zeros(5, 34))
    assert (weights.shape, raw.shape) == ((5, 32), (5, 2))
    assert problem("gaussian").size == 32


def test_learnt_noise_of_members_with_data_of_their_own_under_no_grad():
    """As samplers call it: gradients of data and of the noise's declared prior, member by member."""
    noise = Gaussian(scale=0.5, learn=True, log_scale_prior=(-1.0, 0.3))
    joint = Joint(torch.nn.Linear(1, 1).double(), noise, Normal(1.0), num_data=4)
    theta, inputs, targets = (Key(i).normal(s, torch.float64) for i, s in enumerate(((5, 3), (5, 4, 1), (5, 4, 1))))
    batch = Batch(inputs, targets, per_member=True)
    with torch.no_grad():
        value, grad, _ = joint.value_and_grad(theta, batch)
    for index in range(5):
        one, slope, _ = joint.value_and_grad(theta[index], batch.member(index))
        torch.testing.assert_close((value[index], grad[index]), (one, slope), rtol=1e-10, atol=1e-10)


def test_fitted_holds_the_noise():
    joint = problem("learnt per output")
    theta, batch = joint.initial() + 0.3, batch_of()
    fitted = joint.fitted(theta)
    assert fitted.size == 32
    assert fitted.likelihood == Gaussian(tuple((theta[32:].double().exp()).tolist()))
    close(fitted.log_likelihood(theta[:32], batch), joint.log_likelihood(theta, batch))
    members = zoo.fork(theta, MEMBERS)
    several = joint.fitted(members)
    for mine in (batch, batch_of(per_member=True)):
        together = several.log_likelihood(members[:, :32], mine)
        close(together, joint.log_likelihood(members, mine))
        for index in range(MEMBERS):
            one = joint.member(index).fitted(members[index])
            close(one.log_likelihood(members[index, :32], mine.member(index)), together[index])
            assert several.member(index).likelihood == one.likelihood
    plain = problem("gaussian")
    assert plain.fitted(plain.initial()) is plain


def test_member_takes_its_own_of_everything():
    joint = problem(tempering=Tempering(torch.tensor([0.5, 2.0]), 3.0), prior=Normal(torch.tensor([1.0, 4.0])))
    assert joint.num_members == 2
    one = joint.member(1)
    assert one is joint.member(1)  # made once: estimators ask for it in every step
    assert one is not joint.member(0)
    assert (one.tempering, one.prior, one.num_members) == (Tempering(2.0, 3.0), Normal(4.0), None)
    assert problem().num_members is None
    with pytest.raises(
        ValueError, match=r"tempering, prior and likelihood must agree on the number of members\. Got \[2, 3\]"
    ):
        problem(tempering=Tempering(torch.tensor([0.5, 2.0]), 1.0), prior=Normal(torch.ones(3)))


def test_with_weights_and_random_weights():
    joint, batch = problem(), batch_of()
    head = joint.with_weights("2.*")
    assert (head.size, head.random_indices) == (12, None)
    theta = joint.initial()
    close(head.log_likelihood(theta[-12:], batch), joint.log_likelihood(theta, batch))
    close(head.log_prior(theta[-12:]), Normal(1.5).log_prob(theta[-12:]))
    close(
        head.value_and_grad(theta[-12:], batch)[1] - head.prior.value_and_grad(theta[-12:])[1],
        joint.value_and_grad(theta, batch)[1][-12:] - joint.prior.value_and_grad(theta[-12:])[1],
    )
    partly = joint.with_weights(random="*.weight")
    assert partly.size == 32
    assert partly.random_indices.tolist() == [*range(15), *range(20, 30)]
    assert torch.equal(partly.value_and_grad(theta, batch)[1], joint.value_and_grad(theta, batch)[1])
    both = joint.with_weights("2.*", random="2.bias")
    assert both.random_indices.tolist() == [10, 11]
    assert both.with_weights("2.bias").size == 2  # keeps what is random
    assert joint.random == "*"  # the first one is as it was
    with pytest.raises(ValueError, match=r"Joint\.random: Unknown parameter '2\.biass'\. Did you mean '2\.bias'\?"):
        joint.with_weights(random="2.biass")
    with pytest.raises(ValueError, match=r"Joint\.random: Unknown parameter '2\.bias'"):
        both.with_weights("2.weight")


def test_bad_problems_are_refused():
    net = zoo.make(zoo.mlp)
    good = {"network": net, "likelihood": Gaussian(), "prior": Normal(), "num_data": 5}
    for change, error, message in (
        ({"network": None}, TypeError, r"must be a torch\.nn\.Module .*Got NoneType"),
        (
            {"likelihood": Gaussian},
            TypeError,
            r"Joint\.likelihood must be a Likelihood\. Got .* Call it: Gaussian\(\)\.",
        ),
        ({"prior": 1.0}, TypeError, r"Joint\.prior must be a Prior\. Got 1\.0\."),
        ({"tempering": 0.5}, TypeError, r"Joint\.tempering must be a Tempering\. Got 0\.5\."),
        ({"num_data": 0}, ValueError, r"Joint\.num_data must be a positive whole number of rows\. Got 0\."),
        ({"num_data": 2.0}, ValueError, r"Joint\.num_data .* Got 2\.0\."),
        ({"num_data": True}, ValueError, r"Joint\.num_data"),
        ({"random": "3.*"}, ValueError, r"Joint\.random: Unknown parameter"),
        ({"prior": Normal(torch.ones(1, 7))}, ValueError, "for 7 weights"),
    ):
        with pytest.raises(error, match=message):
            Joint(**{**good, **change})
    with pytest.raises(dataclasses.FrozenInstanceError):
        Joint(**good).num_data = 6


def test_a_network_is_shared_and_not_copied_again():
    joint = problem()
    other = dataclasses.replace(joint, num_data=7)
    assert other.network is joint.network
    assert (joint.dtype, joint.device) == (torch.float64, joint.network.initial.device)


@pytest.mark.cuda
@EVERY
def test_on_a_cuda_device(name):
    here, batch = problem(name, tempering=Tempering(torch.tensor([0.5, 1.0, 2.0]), 1.0)), batch_of(name)
    module = nn.Sequential(*here.network._module) if name == "bernoulli" else zoo.make(zoo.mlp)
    there = dataclasses.replace(here, network=module.cuda())
    theta = zoo.fork(here.initial(), MEMBERS)
    value, grad, _ = there.value_and_grad(theta.cuda(), batch.map(lambda t: t.cuda()))
    wanted = here.value_and_grad(theta, batch)
    assert (value.device.type, grad.device.type) == ("cuda", "cuda")
    close(value.cpu(), wanted[0].cpu(), 1e-9)
    close(grad.cpu(), wanted[1].cpu(), 1e-9)


def test_the_prior_of_a_learnt_noise_has_its_gradient_without_autograd_around() -> None:
    likelihood = Gaussian(1.0, learn=True, log_scale_prior=(1.0, 2.0))
    joint = Joint(nn.Linear(1, 1, dtype=torch.float64), likelihood, Normal(), 2)
    raw = torch.tensor([[0.5], [3.0]], dtype=torch.float64)
    with torch.no_grad():
        _, grad = joint.likelihood.free_value_and_grad(raw)
    torch.testing.assert_close(grad, (1.0 - raw) / 4.0)
