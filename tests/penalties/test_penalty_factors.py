"""Factors of penalties by layer: against gold numbers, against priors, and against training in torch."""

import math

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import posterity as po
from posterity.methods import MAP
from posterity.model.tempering import Tempering
from posterity.numerics.layout import Layout
from posterity.optim.optimizer import SGD
from posterity.penalties import (
    L1,
    GroupLasso,
    SquaredL2,
    Sum,
    coupled_weight_decay,
    decoupled_weight_decay,
    factors_of,
    lambda_theory,
    layer_factors,
    param_groups,
    penalty_term,
    prior_of,
    usual_factors,
)
from posterity.priors import Cauchy, EdgeOfChaos, FanIn, Glorot, He, Laplace, Layerwise, Normal, StudentT

GOLD = load("penalty_lambda_per_layer")
PENALTIES = {
    "l2_squared": SquaredL2(),
    "l1": L1(),
    "group_rows": GroupLasso("rows"),
    "group_cols": GroupLasso("columns"),
}
RULES = {"var_1_over_P": FanIn(), "var_2_over_P": He(), "var_glorot": Glorot()}


def gold_layer(shape):
    """A layer whose weight has this shape (out, in, *kernel)."""
    outputs, inputs, *kernel = (int(size) for size in shape)
    return nn.Conv2d(inputs, outputs, tuple(kernel)) if kernel else nn.Linear(inputs, outputs)


def small_net():
    """Two layers in float64, always with the same weights, none of which is near zero."""
    generator = torch.Generator("cpu").manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for parameter in net.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator, device="cpu") * 2 - 1
        parameter.data.copy_(signs * (0.3 + torch.rand(parameter.shape, generator=generator, device="cpu")))
    return net


def rows(count=20):
    generator = torch.Generator("cpu").manual_seed(2)
    both = (torch.randn(count, size, generator=generator, dtype=torch.float64, device="cpu") for size in (3, 2))
    return tuple(part.to(torch.get_default_device()) for part in both)


def mean_loss(net, inputs, targets):
    """The mean over rows of -log N(targets; outputs, 1), without its constant."""
    return 0.5 * (net(inputs) - targets).square().sum(-1).mean()


def joint_of(net, prior, num_data):
    return po.Joint(net, po.likelihoods.Gaussian(scale=1.0), prior, num_data=num_data)


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("convention", RULES)
@pytest.mark.parametrize("index", range(5))
def test_factors_are_those_of_gold(index, convention, kind):
    net = gold_layer(GOLD.inputs["layers"][index]["shape"])
    factors = layer_factors(net, PENALTIES[kind], RULES[convention])
    assert list(factors) == ["weight"]
    GOLD.check(f"rows.{index}.{convention}.{kind}", factors["weight"])
    if kind == "group_rows" and convention == "var_1_over_P":
        wrong = float(GOLD.must_not_equal["group_rows_lambda_if_n_instead_of_n_plus_1"][index])
        assert factors["weight"] > 1.0002 * wrong


def test_the_factor_of_theory_and_the_values_of_penalties_are_those_of_gold():
    GOLD.check("lambda_th", lambda_theory(int(GOLD.inputs["n_train"])))
    for kind, penalty in PENALTIES.items():
        GOLD.check(f"penalty_values.{kind}", penalty(GOLD.inputs["W"]))


@pytest.mark.parametrize("index", range(3))
def test_the_edge_of_chaos_divides_factors_as_in_gold(index):
    case = load("edge_of_chaos")
    net = nn.Linear(int(case.inputs["P_l"]), 3)
    rule = EdgeOfChaos("tanh", float(case.inputs["sigma_b2"][index]))
    for kind in ("l2_squared", "l1", "group_rows"):
        case.check(f"lambda_tanh.{index}.{kind}", layer_factors(net, PENALTIES[kind], rule)["weight"])


def test_only_weights_that_sum_over_inputs_are_penalised_and_shared_ones_once():
    net = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6), nn.LayerNorm((2, 6)), nn.Linear(6, 6), nn.Linear(6, 5))
    net[3].weight = net[1].weight
    net[4].weight.requires_grad_(False)
    assert layer_factors(net, SquaredL2()) == {"1.weight": 3.0}
    net[4].weight = net[0].weight  # tied with an embedding, it still sums over inputs
    assert layer_factors(net, SquaredL2()) == {"0.weight": 3.0, "1.weight": 3.0}


def test_biases_of_attention_are_biases():
    factors = layer_factors(nn.MultiheadAttention(8, 2, add_bias_kv=True), SquaredL2())
    assert factors == {"in_proj_weight": 4.0, "out_proj.weight": 4.0}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("made", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=["weight norm", "spectral norm"])
def test_weights_that_hooks_make_of_others_are_refused(made):
    with pytest.raises(ValueError, match="makes a weight in a hook before each call"):
        layer_factors(nn.Sequential(nn.Linear(3, 2), made(nn.Linear(2, 2))), SquaredL2())


def test_compiled_networks_have_the_names_of_their_own():
    net = small_net()
    assert layer_factors(torch.compile(net, backend="eager"), L1()) == layer_factors(net, L1())


def test_transposed_convolutions_count_the_inputs_of_an_output_channel():
    assert layer_factors(nn.ConvTranspose2d(6, 10, 3), SquaredL2()) == {"weight": 27.0}
    assert layer_factors(nn.ConvTranspose2d(6, 10, 3, groups=2), SquaredL2()) == {"weight": 13.5}
    assert layer_factors(nn.ConvTranspose2d(6, 10, 3), SquaredL2(), Glorot()) == {"weight": 36.0}


def test_usual_factors_are_the_roots_of_group_sizes():
    net = nn.Conv2d(3, 8, 5)
    assert usual_factors(net, SquaredL2()) == usual_factors(net, L1()) == {"weight": 1.0}
    sizes = {"rows": 75, "columns": 8, "channels": 200}
    for over, size in sizes.items():
        assert usual_factors(net, GroupLasso(over)) == {"weight": math.sqrt(size)}


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("rule", RULES.values(), ids=str)
def test_the_prior_of_a_penalty_has_the_variance_of_its_rule(kind, rule):
    net = nn.Sequential(nn.Conv1d(2, 3, 4), nn.Flatten(), nn.Linear(6, 5))
    layout = Layout.of({name: parameter.shape for name, parameter in net.named_parameters()})
    variance = prior_of(net, PENALTIES[kind], rule).bound(layout).variance(torch.zeros(layout.size).double())
    parts = layout.unflatten(variance)
    torch.testing.assert_close(parts["0.weight"], torch.full((3, 2, 4), rule.variance(8, 12)).double())
    torch.testing.assert_close(parts["2.weight"], torch.full((5, 6), rule.variance(6, 5)).double())
    torch.testing.assert_close(parts["2.bias"], torch.full((5,), 100.0).double())


@settings(max_examples=30, deadline=None)
@given(
    penalty=st.sampled_from([*PENALTIES.values(), GroupLasso("channels")]),
    gain=st.floats(0.1, 10.0),
    strength=st.floats(0.01, 100.0),
    kind=st.sampled_from([FanIn, Glorot, He]),
)
def test_priors_give_their_factors_back(penalty, gain, strength, kind):
    net = nn.Sequential(nn.Conv1d(2, 3, 4), nn.Flatten(), nn.Linear(6, 5))
    found = factors_of(prior_of(net, penalty, kind(gain), strength), net)
    assert found.penalty == penalty
    expected = layer_factors(net, penalty, kind(gain))
    assert found.factors == pytest.approx({name: strength * factor for name, factor in expected.items()}, rel=1e-12)
    again = prior_of(net, *found)
    assert factors_of(again, net).factors == pytest.approx(found.factors, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(decay=st.floats(1e-6, 1e3), num_data=st.integers(1, 10**6), eta=st.floats(0.01, 10.0))
def test_weight_decay_and_prior_scale_are_inverse(decay, num_data, eta):
    tempering = Tempering.tempered(eta)
    scale = tempering.prior_scale(decay, num_data)
    assert tempering.weight_decay(scale, num_data) == pytest.approx(decay, rel=1e-12)
    assert coupled_weight_decay(
        decoupled_weight_decay(decay, momentum=0.9, root_mean_square=eta), momentum=0.9, root_mean_square=eta
    ) == pytest.approx(decay, rel=1e-12)


def test_factors_of_rules_and_of_bound_normals():
    net = small_net()
    layout = Layout.of({name: parameter.shape for name, parameter in net.named_parameters()})
    for prior in (Layerwise.of(FanIn()), Layerwise.of(FanIn()).bound(layout)):
        penalty, factors = factors_of(prior, net)
        assert penalty == SquaredL2()
        assert factors == pytest.approx(layer_factors(net, SquaredL2()), rel=1e-12)
    assert factors_of(Normal(0.5), net).factors == {"0.weight": 2.0, "2.weight": 2.0}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_mode_is_that_of_torch_with_weight_decay(momentum):
    inputs, targets = rows()
    joint = joint_of(small_net(), prior_of(small_net(), SquaredL2(), strength=0.3), 20)
    method = MAP(steps=50, batch_size=None, optimizer=SGD(step_size=0.05, momentum=momentum))
    found, _ = po.infer(method, joint, (inputs, targets))
    net = small_net()
    groups = param_groups(net, SquaredL2(), 20, strength=0.3)
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=momentum)
    for _ in range(50):
        optimizer.zero_grad()
        mean_loss(net, inputs, targets).backward()
        optimizer.step()
    trained = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
    torch.testing.assert_close(found.theta, trained, rtol=1e-10, atol=1e-10)
    start = torch.cat([parameter.detach().reshape(-1) for parameter in small_net().parameters()])
    assert (trained - start).abs().max() > 0.1


def test_members_train_a_grid_of_strengths_at_once():
    inputs, targets = rows()
    strengths = torch.tensor([0.1, 1.0, 5.0])
    method = MAP(steps=20, batch_size=None, optimizer=SGD(step_size=0.05, momentum=0.0))
    start = joint_of(small_net(), Normal(), 20).initial()
    grid = joint_of(small_net(), prior_of(small_net(), SquaredL2(), strength=strengths), 20)
    together, _ = po.infer(method, grid, (inputs, targets), start=start.expand(3, -1).clone())
    for member, strength in enumerate(strengths.tolist()):
        alone = joint_of(small_net(), prior_of(small_net(), SquaredL2(), strength=strength), 20)
        single, _ = po.infer(method, alone, (inputs, targets))
        torch.testing.assert_close(together.theta[member], single.theta, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", PENALTIES)
def test_rows_times_the_gradient_of_the_loss_is_that_of_the_negative_log_posterior(kind):
    penalty, strength = PENALTIES[kind], 0.7
    inputs, targets = rows()
    net = small_net()
    loss = mean_loss(net, inputs, targets)
    loss = loss + strength * lambda_theory(20) * penalty_term(net, penalty, layer_factors(net, penalty))
    loss = loss + lambda_theory(20) * sum(layer.bias.square().sum() / 200.0 for layer in (net[0], net[2]))
    loss.backward()
    joint = joint_of(small_net(), prior_of(small_net(), penalty, strength=strength), 20)
    _, grad, _ = joint.value_and_grad(joint.initial(), joint.check(po.model.Batch(inputs, targets)))
    own = torch.cat([parameter.grad.reshape(-1) for parameter in net.parameters()])
    torch.testing.assert_close(-20.0 * own, grad, rtol=1e-10, atol=1e-10)


def test_groups_carry_the_factors_of_penalties_that_are_no_weight_decay():
    net = small_net()
    groups = param_groups(net, L1(), 50, strength=2.0)
    assert [group["names"] for group in groups] == [["0.weight"], ["0.bias", "2.bias"], ["2.weight"]]
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.0, 1.0 / 5000.0, 0.0])
    assert [group["factor"] for group in groups] == pytest.approx([math.sqrt(6.0) / 25.0, 0.0, math.sqrt(8.0) / 25.0])
    assert torch.optim.AdamW(groups).param_groups[0]["factor"] == groups[0]["factor"]


def test_a_sum_of_one_kind_is_that_kind_with_a_factor():
    twice = Sum((SquaredL2(),), (2.0,))
    for rule in (FanIn(), {"0.weight": 3.0, "2.weight": 0.5}):
        decays, wanted = (
            [group["weight_decay"] for group in param_groups(small_net(), penalty, 20, factors)]
            for penalty, factors in (
                (twice, rule),
                (SquaredL2(), rule if isinstance(rule, FanIn) else {name: 2.0 * own for name, own in rule.items()}),
            )
        )
        assert decays == pytest.approx(wanted, rel=1e-12)
    groups = Sum((GroupLasso("columns"),), (0.3,))
    assert usual_factors(small_net(), groups) == usual_factors(small_net(), GroupLasso("columns"))


def test_weight_decay_under_fan_in_is_the_number_of_inputs_over_that_of_rows():
    decays = {group["names"][0]: group["weight_decay"] for group in param_groups(small_net(), SquaredL2(), 45000)}
    assert decays["0.weight"] == pytest.approx(3 / 45000)
    assert decays["2.weight"] == pytest.approx(Tempering.bayes().weight_decay(math.sqrt(1 / 4), 45000))
    assert decays["0.bias"] == pytest.approx(Tempering.bayes().weight_decay(10.0, 45000))


def test_factors_given_by_name_are_used_and_what_they_leave_out_is_not_penalised():
    net = small_net()
    prior = prior_of(net, L1(), {"2.weight": 4.0})
    assert prior.rules["2.weight"] == Laplace(0.25)
    groups = param_groups(net, SquaredL2(), 10, {"2.weight": 4.0})
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert decays == pytest.approx({"2.weight": 0.8, "0.weight": 1e-3, "0.bias": 1e-3, "2.bias": 1e-3})


def test_decoupled_decay_of_momentum_rests_where_the_coupled_one_does():
    coupled, momentum, step = 0.1, 0.8, 0.05
    decoupled = decoupled_weight_decay(coupled, momentum=momentum)
    w, velocity = 3.0, 0.0
    for _ in range(2000):
        velocity = momentum * velocity + (w - 1.0)  # of the loss (w - 1)^2 / 2
        w = w - step * velocity - step * decoupled * w
    assert w == pytest.approx(1.0 / (1.0 + coupled), rel=1e-9)


def test_one_step_of_plain_sgd_and_of_adamw_shrink_by_the_same_number():
    shrunk = []
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        net = small_net()
        optimizer = kind(param_groups(net, SquaredL2(), 20), lr=0.05)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        shrunk.append(torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]))
    torch.testing.assert_close(shrunk[0], shrunk[1], rtol=1e-12, atol=0.0)


class Lookup(nn.Module):
    """A module without a layer that sums."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 2)
        self.norm = nn.BatchNorm1d(2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layer_factors(Lookup(), L1()), "no trained tensor has a fan-in"),
        (lambda: layer_factors(nn.LazyLinear(2), L1()), "no shape yet"),
        (lambda: layer_factors(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), L1()), "parametrisation"),
        (lambda: layer_factors(nn.Linear(2, 2), Cauchy()), "no finite variance"),
        (lambda: layer_factors(nn.Linear(2, 2), StudentT(2.0)), "no finite variance"),
        (lambda: factors_of(Cauchy(), nn.Linear(2, 2)), "multiple of a penalty"),
        (lambda: factors_of(Normal(1.0, mean=0.5), nn.Linear(2, 2)), "mean 0"),
        (lambda: factors_of(Normal(torch.tensor([1.0, 2.0])), nn.Linear(2, 2)), r"prior.member\(i\)"),
        (
            lambda: factors_of(Layerwise({"0.*": Normal(), "*": Laplace()}), nn.Sequential(*small_net())),
            "one kind of prior",
        ),
        (lambda: prior_of(nn.Linear(2, 2), L1(), {"wieght": 1.0}), "Did you mean 'weight'"),
        (lambda: prior_of(nn.Linear(2, 2), L1(), {"weight": -1.0}), "factor of 'weight' must be a positive number"),
        (lambda: prior_of(nn.Linear(2, 2), L1(), strength=0.0), "strength must be a positive number"),
        (lambda: param_groups(nn.Linear(2, 2), L1(), 5, strength=torch.ones(2)), "one number"),
        (lambda: param_groups(nn.Linear(2, 2), L1(), 5, others=Laplace()), "others must be a Normal"),
        (lambda: param_groups(nn.Linear(2, 2), L1(), 0), "num_data"),
        (lambda: penalty_term(nn.Linear(2, 2), L1(), {}), "at least one tensor"),
        (lambda: decoupled_weight_decay(0.1, momentum=1.0), "momentum"),
    ],
)
def test_what_has_no_factors_is_explained(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layer_factors(nn.Linear(2, 2), Normal()), "from_prior"),
        (lambda: layer_factors(nn.Linear(2, 2), L1), r"Call it: L1\(\)"),
        (lambda: layer_factors(nn.Linear(2, 2), L1(), 0.5), "scale rule"),
        (lambda: layer_factors(lambda x: x, L1()), "torch.nn.Module"),
        (lambda: prior_of(nn.Linear(2, 2), L1(), others=1.0), "others must be a prior"),
        (lambda: factors_of(1.0, nn.Linear(2, 2)), "must be a prior"),
    ],
)
def test_what_is_no_penalty_or_prior_is_a_type_error(call, words):
    with pytest.raises(TypeError, match=words):
        call()
