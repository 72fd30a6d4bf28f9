"""Priors by tensor name, and the scale rules."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opaqueprior import Opaque
from torch import nn

from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.priors import FanIn, Glorot, He, Layerwise, Normal, Prior, ScaleRule

LAYOUT = Layout.of({"conv.weight": (4, 3, 5, 5), "conv.bias": (4,), "head.weight": (2, 6), "head.bias": (2,)})


def scale_of(prior: Prior, layout: Layout, name: str) -> float:
    """The one standard deviation of a tensor under a bound prior."""
    deviations = layout.unflatten(prior.variance(torch.zeros(layout.size, dtype=torch.float64)).sqrt())[name]
    assert float(deviations.max()) == pytest.approx(float(deviations.min()), rel=1e-14)
    return float(deviations.reshape(-1)[0])


@pytest.mark.parametrize(
    ("rule", "conv", "head"),
    [
        (FanIn(), 1.0 / 75.0, 1.0 / 6.0),
        (FanIn(gain=2.0), 4.0 / 75.0, 4.0 / 6.0),
        (Glorot(), 2.0 / (75.0 + 100.0), 2.0 / (6.0 + 2.0)),
        (Glorot(gain=0.5), 0.5 / (75.0 + 100.0), 0.5 / (6.0 + 2.0)),
        (He(), 2.0 / 75.0, 2.0 / 6.0),
        (He(gain=3.0), 18.0 / 75.0, 18.0 / 6.0),
    ],
    ids=str,
)
def test_rules_follow_the_fans_of_the_weight_and_of_its_bias(rule: ScaleRule, conv: float, head: float) -> None:
    prior = Layerwise.of(rule).bound(LAYOUT)
    for name, variance in {"conv": conv, "head": head}.items():
        for tensor in ("weight", "bias"):
            assert scale_of(prior, LAYOUT, f"{name}.{tensor}") == pytest.approx(math.sqrt(variance), rel=1e-14)


def test_fans_are_those_of_torch() -> None:
    for module in (nn.Linear(7, 3), nn.Conv2d(4, 6, (3, 5)), nn.Conv2d(4, 6, 3, groups=2)):
        layout = Layout.of({name: tensor.shape for name, tensor in module.named_parameters()})
        fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(module.weight)
        assert scale_of(Layerwise.of(Glorot()).bound(layout), layout, "weight") == pytest.approx(
            math.sqrt(2.0 / (fan_in + fan_out)), rel=1e-14
        )
        assert scale_of(Layerwise.of(FanIn()).bound(layout), layout, "bias") == pytest.approx(
            math.sqrt(1.0 / fan_in), rel=1e-14
        )


def test_the_first_match_wins() -> None:
    prior = Layerwise({"head.weight": Normal(0.1), "head.*": Normal(0.2), "*": Normal(0.3)}).bound(LAYOUT)
    found = [scale_of(prior, LAYOUT, name) for name in LAYOUT.names]
    assert found == pytest.approx([0.3, 0.3, 0.1, 0.2], rel=1e-14)


def test_normals_are_fused_into_one() -> None:
    prior = Layerwise({"conv.*": FanIn(), "*": Normal(0.5)}).bound(LAYOUT)
    assert isinstance(prior, Normal)
    assert prior.scale.shape == (1, LAYOUT.size)
    assert prior.scale.dtype == torch.float64
    assert prior.mean == 0.0


def test_fused_mean() -> None:
    layout = Layout.of({"a": (2,), "b": (3,)})
    shared = Layerwise.of(Normal(1.0, 0.25)).bound(layout)
    assert shared.mean == 0.25
    each = Layerwise({"a": Normal(1.0, torch.tensor([1.0, 2.0])), "b": Normal(1.0, 3.0)}).bound(layout)
    assert each.mean.tolist() == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert each.num_members is None
    members = Layerwise({"a": Normal(1.0, torch.tensor([[1.0, 2.0], [4.0, 5.0]])), "b": Normal(1.0)}).bound(layout)
    assert members.mean.tolist() == [[1.0, 2.0, 0.0, 0.0, 0.0], [4.0, 5.0, 0.0, 0.0, 0.0]]
    assert members.num_members == 2


def test_fused_members() -> None:
    layout = Layout.of({"a": (2,), "b": (1,)})
    prior = Layerwise({"a": Normal(torch.tensor([0.5, 2.0])), "b": Normal(torch.tensor([[3.0], [4.0]]))}).bound(layout)
    assert prior.scale.tolist() == [[0.5, 0.5, 3.0], [2.0, 2.0, 4.0]]
    assert prior.num_members == 2


def test_members_of_the_unbound_prior() -> None:
    prior = Layerwise({"conv.*": FanIn(), "*": Normal(torch.tensor([0.5, 2.0]))})
    assert prior.num_members == 2
    assert prior.member(1) == Layerwise({"conv.*": FanIn(), "*": Normal(2.0)})
    bound = prior.bound(LAYOUT)
    assert bound.member(1) == prior.member(1).bound(LAYOUT)


@pytest.mark.parametrize("wrap", [lambda prior: prior, Opaque], ids=["fused", "blocks"])
def test_refuses_priors_of_different_members(wrap: type) -> None:
    prior = Layerwise({"a": Normal(torch.ones(2)), "b": Normal(torch.ones(3)), "c": wrap(Normal(1.0))})
    with pytest.raises(ValueError, match="same number of members"):
        prior.bound(Layout.of({"a": (1,), "b": (1,), "c": (1,)}))


def test_blocks_equal_the_fused_prior() -> None:
    fused = Layerwise({"conv.*": Normal(0.4, 0.1), "*": Normal(1.7)}).bound(LAYOUT)
    blocks = Layerwise({"conv.*": Normal(0.4, 0.1), "*": Opaque(Normal(1.7))}).bound(LAYOUT)
    assert not isinstance(blocks, Normal)
    theta = Key(1).normal((3, LAYOUT.size), torch.float64, torch.get_default_device())
    for function in ("log_prob", "precision", "variance"):
        torch.testing.assert_close(getattr(blocks, function)(theta), getattr(fused, function)(theta))
    for piece, expected in zip(blocks.value_and_grad(theta), fused.value_and_grad(theta), strict=True):
        torch.testing.assert_close(piece, expected)
    torch.testing.assert_close(blocks.cross_entropy(theta, theta.abs()), fused.cross_entropy(theta, theta.abs()))


def test_blocks_draw_each_tensor_from_a_stream_of_its_own() -> None:
    layout = Layout.of({"a": (50,), "b": (50,)})
    prior = Layerwise.of(Opaque(Normal(1.0))).bound(layout)
    draws = layout.unflatten(prior.sample((100,), Key(0), torch.zeros(100)))
    assert not torch.equal(draws["a"], draws["b"])


def test_blocks_refuse_another_layout() -> None:
    prior = Layerwise.of(Opaque(Normal(1.0))).bound(LAYOUT)
    with pytest.raises(ValueError, match=r"Got \('w',\)\. Bind the unbound Layerwise"):
        prior.bound(Layout.of({"w": (2,)}))


def test_a_tensor_without_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no pattern matches tensor 'head\.weight'.*Patterns: conv\.\*\..*\"\*\""):
        Layerwise({"conv.*": FanIn()}).bound(LAYOUT)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Unknown pattern 'haed\.weight'\. Did you mean 'head\.weight'\?"):
        Layerwise({"haed.weight": Normal(1.0), "*": FanIn()}).bound(LAYOUT)


def test_a_pattern_behind_a_wider_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'head\.\*' matches is taken by an earlier pattern.*narrower pattern first"):
        Layerwise({"*": FanIn(), "head.*": Normal(1.0)}).bound(LAYOUT)


def test_a_last_star_may_find_nothing_left() -> None:
    prior = Layerwise({"*.weight": Normal(0.5), "*.bias": Normal(2.0), "*": Normal(9.0)}).bound(LAYOUT)
    assert float(prior.scale.max()) == 2.0


@pytest.mark.parametrize("name", ["norm.weight", "norm.bias"])
def test_a_tensor_without_fans_is_refused(name: str) -> None:
    layout = Layout.of({"linear.weight": (3, 2), name: (3,)})
    with pytest.raises(
        ValueError, match=rf'FanIn\(gain=1\.0\) needs fans.*\'{name}\' of shape \(3,\).*{{"norm\.\*": Normal'
    ):
        Layerwise.of(FanIn()).bound(layout)
    prior = Layerwise({"norm.*": Normal(1.0), "*": FanIn()}).bound(layout)
    assert scale_of(prior, layout, name) == pytest.approx(1.0, rel=1e-14)


def test_a_prior_for_other_weights_is_refused_at_bound() -> None:
    with pytest.raises(ValueError, match=r"for 3 weights\. Got tensors of 12"):
        Layerwise({"head.weight": Normal(torch.ones(1, 3)), "*": Normal(1.0)}).bound(LAYOUT)


@pytest.mark.parametrize("rules", [{}, None, [("*", FanIn())], {"*": 1.0}], ids=str)
def test_refuses_bad_rules(rules: object) -> None:
    with pytest.raises(ValueError, match=r"Layerwise\.rules.* must .* Got"):
        Layerwise(rules)


@pytest.mark.parametrize("rule", [FanIn, Glorot, He])
@pytest.mark.parametrize("gain", [0.0, -1.0, math.nan])
def test_rules_refuse_a_bad_gain(rule: type[ScaleRule], gain: float) -> None:
    with pytest.raises(ValueError, match=rf"{rule.__name__}\.gain must be a positive number\. Got"):
        rule(gain)


def test_the_unbound_prior_has_no_density() -> None:
    prior, theta = Layerwise.of(FanIn()), torch.zeros(3)
    for call in (
        lambda: prior.log_prob(theta),
        lambda: prior.value_and_grad(theta),
        lambda: prior.sample((3,), Key(0), theta),
        lambda: prior.variance(theta),
        lambda: prior.cross_entropy(theta, theta),
        lambda: prior.precision(theta),
    ):
        with pytest.raises(RuntimeError, match=r"Give it to a Joint, or call bound\(layout\)"):
            call()


def test_equality_minds_the_order_of_the_rules() -> None:
    first = Layerwise({"a*": Normal(1.0), "*b": Normal(2.0)})
    assert first == Layerwise({"a*": Normal(1.0), "*b": Normal(2.0)})
    assert hash(first) == hash(Layerwise({"a*": Normal(1.0), "*b": Normal(2.0)}))
    assert first != Layerwise({"*b": Normal(2.0), "a*": Normal(1.0)})
    assert repr(Layerwise.of(FanIn())) == "Layerwise(rules={'*': FanIn(gain=1.0)})"


def test_rules_are_copied() -> None:
    rules: dict[str, Prior | ScaleRule] = {"*": FanIn()}
    prior = Layerwise(rules)
    rules["*"] = Normal(5.0)
    assert prior == Layerwise.of(FanIn())


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 5.0)), min_size=1, max_size=5), st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_fused_density_is_the_sum_over_tensors(tensors: list[tuple[int, float]], seed: int) -> None:
    layout = Layout.of({f"t{index}": (size,) for index, (size, _) in enumerate(tensors)})
    prior = Layerwise({f"t{index}": Normal(scale) for index, (_, scale) in enumerate(tensors)}).bound(layout)
    theta = Key(seed).normal((layout.size,), torch.float64, torch.get_default_device())
    pieces = layout.unflatten(theta).values()
    expected = sum(float(Normal(scale).log_prob(piece)) for (_, scale), piece in zip(tensors, pieces, strict=True))
    assert float(prior.log_prob(theta)) == pytest.approx(expected, rel=1e-10)
