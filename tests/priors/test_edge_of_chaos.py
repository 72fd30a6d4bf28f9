"""The edge of chaos against gold numbers and closed forms; random networks against the theory of wide ones."""

import math

import pytest
import torch
from goldcases import load
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.priors import EdgeOfChaos, FanIn, He, Layerwise, Normal
from posterity.special.activations import slope_of
from posterity.storage.values import decode, encode
from posterity.theory import signal_propagation

GOLD = load("edge_of_chaos")


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_edges_with_biases_are_those_of_gold(name, index):
    rule = EdgeOfChaos(name, float(GOLD.inputs["sigma_b2"][index]))
    GOLD.check(f"{name}.{index}.sigma_w2", rule.weight_variance)
    GOLD.check(f"{name}.{index}.sigma_w", math.sqrt(rule.weight_variance))
    GOLD.check(f"{name}.{index}.q_star", rule.q_star)
    assert rule.chi == pytest.approx(1.0, rel=1e-12)


def test_edges_without_biases_are_those_of_gold():
    GOLD.check("relu.sigma_w2", EdgeOfChaos("relu").weight_variance)
    GOLD.check("tanh_zero_bias_sigma_w", math.sqrt(EdgeOfChaos("tanh").weight_variance))
    GOLD.check("erf_zero_bias_sigma_w", math.sqrt(EdgeOfChaos("erf").weight_variance))
    assert EdgeOfChaos("tanh").q_star == 0.0
    assert math.isnan(EdgeOfChaos("relu").q_star)  # any


@settings(max_examples=10, deadline=None)
@given(q=st.floats(1e-2, 1e2))
@example(q=1.0)  # one of the places where the search begins
def test_edges_of_erf_are_those_of_its_closed_form(q):
    weight_variance = math.pi / 4.0 * math.sqrt(1.0 + 4.0 * q)
    bias_variance = q - weight_variance * 2.0 / math.pi * math.asin(2.0 * q / (1.0 + 2.0 * q))
    rule = EdgeOfChaos("erf", bias_variance)
    assert rule.weight_variance == pytest.approx(weight_variance, rel=1e-8)
    assert rule.q_star == pytest.approx(q, rel=1e-8)


@settings(max_examples=5, deadline=None)
@given(slope=st.floats(-0.9, 0.9))
def test_edges_of_leaky_rectifiers_are_those_of_their_closed_form(slope):
    rule = EdgeOfChaos(lambda x: torch.where(x > 0, x, slope * x))
    assert rule.weight_variance == pytest.approx(2.0 / (1.0 + slope**2), rel=1e-12)


def test_functions_modules_and_names_are_the_same_activation():
    named = EdgeOfChaos("tanh", 0.05).weight_variance
    assert EdgeOfChaos(torch.tanh, 0.05).weight_variance == named
    assert EdgeOfChaos(nn.Tanh(), 0.05).weight_variance == named
    given = EdgeOfChaos(torch.tanh, 0.05, lambda x: 1.0 - x.tanh().square())
    assert given.weight_variance == pytest.approx(named, rel=1e-12)
    assert EdgeOfChaos(nn.ReLU(inplace=True)).weight_variance == pytest.approx(2.0, rel=1e-12)


def test_an_activation_that_does_not_vanish_at_zero_has_its_edge_far_out():
    rule = EdgeOfChaos("sigmoid")
    nodes = torch.linspace(-12.0, 12.0, 20001, dtype=torch.float64)
    masses = torch.softmax(-0.5 * nodes.square(), 0)
    places = math.sqrt(rule.q_star) * nodes
    square = float((masses * places.sigmoid().square()).sum())
    slope = float((masses * slope_of(torch.sigmoid)(places).square()).sum())
    assert rule.weight_variance * square == pytest.approx(rule.q_star, rel=1e-9)
    assert rule.weight_variance * slope == pytest.approx(1.0, rel=1e-9)


def test_the_rule_sets_priors_as_fan_in_with_another_gain():
    layout = Layout.of({"a.weight": (3, 10, 2), "a.bias": (3,)})
    rules = [Layerwise({"*.weight": rule, "*": Normal(1.0)}) for rule in (EdgeOfChaos("relu"), He(), FanIn(2.0**0.5))]
    edge, he, fan_in = (prior.bound(layout).variance(torch.zeros(63)) for prior in rules)
    torch.testing.assert_close(edge, he)
    torch.testing.assert_close(edge, fan_in)
    assert EdgeOfChaos("tanh", 0.05, gain=2.0).chi == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("activation", "bias_variance", "words"),
    [
        ("relu", 0.1, "bias_variance 0 alone"),
        ("gelu", 0.0, "There is one from about"),
        ("softplus", 0.1, "has no edge: where"),
        (torch.square, 0.1, "has no edge: where"),
        (torch.zeros_like, 0.0, "no signal passes"),
        ("tanhh", 0.0, "Did you mean 'tanh'"),
        ("tanh", -0.1, "bias_variance must be a number of at least 0"),
        (lambda x: x.sum(), 0.0, "for each entry"),
    ],
)
def test_activations_without_an_edge_are_explained(activation, bias_variance, words):
    with pytest.raises(ValueError, match=words):
        EdgeOfChaos(activation, bias_variance)


def test_an_edge_is_found_in_inference_mode():
    with torch.inference_mode():
        found = EdgeOfChaos(lambda x: torch.tanh(x), 0.05).weight_variance
    assert found == EdgeOfChaos("tanh", 0.05).weight_variance


def test_parameters_of_another_number_type_are_explained():
    with pytest.raises(ValueError, match=r"float64.*module\.double\(\)"):
        EdgeOfChaos(nn.PReLU())
    assert EdgeOfChaos(nn.PReLU().double()).weight_variance == pytest.approx(2.0 / (1.0 + 0.25**2), rel=1e-9)


def test_a_class_is_no_activation():
    with pytest.raises(TypeError, match="a function of a tensor"):
        EdgeOfChaos(nn.Tanh)


def test_a_named_rule_is_stored_and_comes_back():
    tensors = {}
    prior = Layerwise({"*.weight": EdgeOfChaos("tanh", 0.05, gain=0.5), "*": Normal(1.0)})
    assert decode(encode(prior, tensors), tensors) == prior
    with pytest.raises(TypeError, match="to be stored"):
        encode(EdgeOfChaos(torch.tanh), tensors)


def test_a_bias_variance_in_the_range_that_the_error_names_has_an_edge():
    assert EdgeOfChaos("gelu", 0.3).chi == pytest.approx(1.0)


@pytest.mark.parametrize("start", [0.5, -0.4, 0.99])
def test_the_recursion_is_that_of_closed_forms(start):
    signals = signal_propagation("erf", 1.3, 0.1, width=2, depth=4, variance=0.8, correlation=start)
    rectified = signal_propagation("relu", 2.0, width=2, depth=4, correlation=start)
    q, c, r = 0.8, start, start
    for layer in range(1, 5):
        second, cross = (2.0 / math.pi * math.asin(2.0 * k / (1.0 + 2.0 * q)) for k in (q, q * c))
        c = (1.3 * cross + 0.1) / (1.3 * second + 0.1)
        q = 1.3 * second + 0.1
        r = (math.sqrt(1.0 - r * r) + r * (math.pi - math.acos(r))) / math.pi
        assert float(signals.mean_field_variance[layer]) == pytest.approx(q, rel=1e-10)
        assert float(signals.mean_field_correlation[layer]) == pytest.approx(c, rel=1e-10)
        assert float(rectified.mean_field_correlation[layer]) == pytest.approx(r, rel=2e-5)


def test_opposite_inputs_stay_opposite_under_an_odd_activation():
    signals = signal_propagation("tanh", 1.5, width=50, depth=5, correlation=-1.0)
    opposite = -torch.ones(6, dtype=torch.float64, device="cpu")
    torch.testing.assert_close(signals.mean_field_correlation, opposite)
    torch.testing.assert_close(signals.correlation, opposite)


def test_a_wide_network_follows_the_recursion():
    signals = signal_propagation("tanh", 1.5, 0.05, width=1000, depth=3, correlation=0.3, key=Key(3))
    assert float(signals.correlation[0]) == pytest.approx(0.3, rel=1e-12)
    # sqrt(2 / width) is the relative standard error of a mean square; three layers add theirs, and 5 are let go.
    bound = 5.0 * math.sqrt(3 * 2.0 / 1000)
    assert torch.all((signals.variance / signals.mean_field_variance - 1.0).abs() < bound)
    assert torch.all((signals.correlation - signals.mean_field_correlation).abs() < bound)


@pytest.mark.parametrize(("bias_variance", "field"), [(0.0, "mean_field_variance"), (0.05, "mean_field_correlation")])
def test_signals_converge_slowest_on_the_edge(bias_variance, field):
    edge = EdgeOfChaos("tanh", bias_variance).weight_variance
    steps = []  # how far they still move in the last layer
    for factor in (0.6, 1.0, 1.8):
        signals = signal_propagation("tanh", factor * edge, bias_variance, width=2, depth=60)
        before, after = getattr(signals, field)[-2:]
        steps.append(float((after - before).abs()))
    assert steps[1] > 10.0 * max(steps[0], steps[2])


def test_drawn_networks_merge_inputs_below_the_edge_and_part_them_above():
    edge = EdgeOfChaos("tanh", 0.05).weight_variance
    below, on, above = (
        float(signal_propagation("tanh", factor * edge, 0.05, width=200, depth=40, correlation=0.9).correlation[-1])
        for factor in (0.6, 1.0, 2.5)
    )
    assert above < on < below
    assert below > 0.999


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"correlation": 1.5}, "between -1 and 1"),
        ({"bias_variance": -1.0}, "at least 0"),
        ({"weight_variance": 0.0}, "positive number"),
        ({"width": 1}, "at least 2"),
    ],
)
def test_signals_refuse_what_makes_no_sense(settings, words):
    with pytest.raises(ValueError, match=words):
        signal_propagation(**{"activation": "tanh", "weight_variance": 1.0, **settings})
