"""Penalties: their values, the priors that they are by points, and the factors that match a variance."""

import math

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.numerics.layout import Layout
from posterity.penalties import (
    L1,
    Dirac,
    Divergence,
    Function,
    Gaussian,
    GroupLasso,
    Penalty,
    SquaredL2,
    Sum,
    Translation,
    from_prior,
    to_prior,
)
from posterity.priors import Cauchy, Laplace, Logistic, Normal, StudentT, Tabulated
from posterity.priors import GroupLasso as GroupLassoPrior

GOLD = load("penalty_lambda_per_layer")
NAMES: dict[str, Penalty] = {
    "l2_squared": SquaredL2(),
    "l1": L1(),
    "group_rows": GroupLasso("rows"),
    "group_cols": GroupLasso("columns"),
}
QUARTIC = Function(lambda mu, nu: mu**4, "w^4")
ELASTIC = Sum((SquaredL2(), L1()), (0.7, 2.0))
EVERY = {**NAMES, "channels": GroupLasso("channels"), "elastic": ELASTIC, "quartic": QUARTIC}

factors = st.floats(0.05, 50.0)


def weight(*shape: int) -> Tensor:
    return torch.linspace(-1.3, 2.1, math.prod(shape), dtype=torch.float64).reshape(shape)


def log_prob(penalty: Penalty, factor: float, values: Tensor) -> Tensor:
    prior = penalty.prior(factor).bound(Layout.of({"weight": tuple(values.shape)}))
    return prior.log_prob(values.reshape(-1))


@pytest.mark.parametrize("name", NAMES)
def test_gold_values(name: str) -> None:
    GOLD.check(f"penalty_values.{name}", NAMES[name](GOLD.inputs["W"]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("rule", ["var_1_over_P", "var_2_over_P", "var_glorot"])
def test_gold_factors(name: str, index: int, rule: str) -> None:
    shape = tuple(int(size) for size in GOLD.inputs["layers"][index]["shape"])
    inputs, outputs = math.prod(shape[1:]), shape[0] * math.prod(shape[2:])
    variance = {"var_1_over_P": 1.0, "var_2_over_P": 2.0, "var_glorot": 2.0 * inputs / (inputs + outputs)}[rule]
    GOLD.check(f"rows.{index}.{rule}.{name}", NAMES[name].factor(variance / inputs, shape))


@pytest.mark.parametrize("name", EVERY)
@given(factor=factors)
@settings(deadline=None, max_examples=10)
def test_differences_of_the_log_prior_are_those_of_the_penalty(name: str, factor: float) -> None:
    penalty, first, second = EVERY[name], weight(2, 3, 2), 0.3 * weight(2, 3, 2).flip(0)
    difference = log_prob(penalty, factor, first) - log_prob(penalty, factor, second)
    expected = -factor * (penalty(first) - penalty(second))
    torch.testing.assert_close(difference, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("variance", [0.02, 3.0])
@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2), (4,)])
def test_the_factor_gives_the_variance(name: str, variance: float, shape: tuple[int, ...]) -> None:
    prior = EVERY[name].prior(EVERY[name].factor(variance, shape)).bound(Layout.of({"weight": shape}))
    found = prior.variance(torch.zeros(math.prod(shape), dtype=torch.float64))
    torch.testing.assert_close(found, torch.full_like(found, variance), rtol=1e-8, atol=0.0)


def test_convolutions_have_two_kinds_of_columns() -> None:
    kernel = weight(2, 3, 2, 2)
    channels = sum(kernel[:, c].norm() for c in range(3))
    columns = sum(kernel[:, c, i, j].norm() for c in range(3) for i in range(2) for j in range(2))
    torch.testing.assert_close(GroupLasso("channels")(kernel), channels)
    torch.testing.assert_close(GroupLasso("columns")(kernel), columns)


@pytest.mark.parametrize("name", ["l2_squared", "l1", "group_rows"])
def test_factors_of_members_equal_a_loop(name: str) -> None:
    together = torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64)
    thetas = weight(3, 4)
    layout = Layout.of({"weight": (2, 2)})
    values = NAMES[name].prior(together).bound(layout).log_prob(thetas)
    for value, factor, theta in zip(values, together.tolist(), thetas, strict=True):
        torch.testing.assert_close(value, NAMES[name].prior(factor).bound(layout).log_prob(theta))


def test_sums_open_and_merge() -> None:
    nested = Sum((Sum((L1(), SquaredL2()), (2.0, 1.0)), L1()), (3.0, 0.5))
    assert nested.parts == {L1(): 6.5, SquaredL2(): 3.0}
    assert Sum((Sum((L1(),), (2.0,)), L1()), (3.0, 0.5)).prior() == Laplace(1.0 / 6.5)
    assert Sum((GroupLasso(), GroupLasso()), (1.0, 0.5)).prior(2.0) == GroupLassoPrior(3.0)
    assert nested.formula == "6.5 sum of |w| + 3 sum of w^2"


def test_an_elastic_net_is_normalised_as_by_hand() -> None:
    # Z = sqrt(pi / a) exp(b^2 / (4 a)) erfc(b / (2 sqrt a)) for exp(-a w^2 - b |w|).
    z = math.sqrt(math.pi / 0.7) * math.exp(4.0 / 2.8) * math.erfc(1.0 / math.sqrt(0.7))
    values = torch.tensor([[0.0], [1e-3], [-0.4], [3.0]], dtype=torch.float64)
    expected = -0.7 * values.square() - 2.0 * values.abs() - math.log(z)
    torch.testing.assert_close(ELASTIC.prior().log_prob(values), expected.squeeze(-1), rtol=0.0, atol=1e-8)


@pytest.mark.parametrize("prior", [Normal(0.6, 0.4), Laplace(0.6, -0.2), Logistic(0.5), StudentT(5.0, 0.7)])
def test_a_divergence_to_a_power_has_the_variance(prior: Normal) -> None:
    penalty = Divergence(prior, Gaussian())
    assert penalty.prior() is prior
    like = torch.zeros(1, dtype=torch.float64)
    factor = penalty.factor(0.21, (2, 3))
    assert float(penalty.prior(factor).variance(like)) == pytest.approx(0.21, rel=1e-8)
    first, second = torch.tensor([0.3]).double(), torch.tensor([-1.1]).double()
    difference = penalty.prior(factor).log_prob(first) - penalty.prior(factor).log_prob(second)
    torch.testing.assert_close(difference, factor * (prior.log_prob(first) - prior.log_prob(second)), rtol=1e-7, atol=0)


def test_the_normaliser_of_a_table_of_heavy_tails() -> None:
    table = Function(lambda mu, nu: (1.0 + mu**2).log(), "log(1 + w^2)").prior()
    values = torch.tensor([[0.0], [3.0], [1e4], [1e12]], dtype=torch.float64)
    torch.testing.assert_close(table.log_prob(values), Cauchy().log_prob(values), rtol=1e-8, atol=1e-8)
    assert table.standard_variance == math.inf


@pytest.mark.parametrize("scale", [1e-6, 0.3, 500.0])
@pytest.mark.parametrize("centre", [0.0, -7.0])
def test_a_table_finds_a_kink_wherever_it_is(scale: float, centre: float) -> None:
    centre *= scale
    table = Function(lambda mu, nu: (mu - centre).abs() / scale, "|w - c| / b").prior()
    assert table.kink
    values = centre + scale * torch.tensor([[0.0], [1e-3], [-0.7], [30.0]], dtype=torch.float64)
    torch.testing.assert_close(table.log_prob(values), Laplace(scale, centre).log_prob(values), rtol=0.0, atol=1e-7)


def test_a_penalty_may_grow_beyond_the_largest_number() -> None:
    table = Function(lambda mu, nu: torch.cosh(mu), "cosh w").prior()
    assert float(table.log_prob(torch.zeros(1).double())) == pytest.approx(-1.0 - math.log(0.8420488764), abs=1e-8)


@pytest.mark.parametrize("depth", [1.0, 100.0, 400.0])
def test_two_narrow_wells_are_both_seen(depth: float) -> None:
    found = Function(lambda mu, nu: depth * (mu.square() - 4.0).square(), "two wells").prior()
    grid = torch.linspace(-4.0, 4.0, 400_001, dtype=torch.float64)
    density = torch.exp(-depth * (grid.square() - 4.0).square())
    wanted = float((density * grid.square()).sum() / density.sum())
    assert found.standard_variance == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("depth", [1e4, 1e6, 1e8, 1e10])
def test_wells_too_narrow_for_a_table_are_refused_and_not_lost(depth: float) -> None:
    with pytest.raises(ValueError, match="too narrow for a table"):
        Function(lambda mu, nu: depth * (mu.square() - 3.2).square(), "two wells").prior()


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("centre", [0.0, -7.0])
def test_a_table_may_be_of_any_scale_and_place(unit: float, centre: float) -> None:
    """Normal with variance unit^2 / 2 about centre units."""
    penalty = Function(lambda mu, nu: (mu / unit - centre).square(), "far")
    assert penalty.prior().standard_variance == pytest.approx(0.5 * unit**2, rel=1e-9)
    verdict = to_prior(penalty, Dirac())
    assert verdict.satisfies_star
    assert pytest.approx(-math.log(unit * math.sqrt(math.pi)), abs=1e-9) == verdict.K


def test_the_constant_of_a_narrow_prior_far_from_zero() -> None:
    verdict = to_prior(Function(lambda mu, nu: 1e4 * (mu - 1e3).square()), Dirac())
    assert pytest.approx(-0.5 * math.log(math.pi / 1e4), abs=1e-6) == verdict.K


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("scale", [0.3, 1.0, 20.0])
def test_a_penalty_may_grow_much_faster_on_one_side(scale: float, sign: float) -> None:
    """w = sign scale log(g) with g of a unit exponential: -log p is exp(x) - x, and Var x is pi^2 / 6."""
    found = Function(lambda mu, nu: (sign * mu / scale).exp() - sign * mu / scale).prior()
    assert found.standard_variance == pytest.approx(math.pi**2 / 6.0 * scale**2, rel=1e-6)
    x = torch.tensor([[-30.0], [-3.0], [0.0], [1.0], [3.0]], dtype=torch.float64)
    wanted = (x - x.exp()).squeeze(-1) - math.log(scale)
    torch.testing.assert_close(found.log_prob(sign * scale * x), wanted, rtol=1e-6, atol=1e-6)


def test_a_function_may_work_in_place() -> None:
    assert Function(lambda mu, nu: mu.mul_(mu)).prior().standard_variance == pytest.approx(0.5)


def test_members_of_a_divergence() -> None:
    together = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for prior in (Normal(0.6, 0.4), Laplace(0.6), GroupLassoPrior(2.0)):
        found = Divergence(prior, Gaussian()).prior(together)
        assert found.num_members == 2
        alone = Divergence(prior, Gaussian()).prior(2.0)
        layout, theta = Layout.of({"weight": (1, 2)}), torch.tensor([0.3, -1.2], dtype=torch.float64)
        torch.testing.assert_close(found.member(1).bound(layout).log_prob(theta), alone.bound(layout).log_prob(theta))


def random_r(mu: Tensor, nu: Tensor) -> Tensor:
    return mu.square() + torch.rand_like(mu)


BAD_FUNCTIONS = {
    "wrong shape": (lambda mu, nu: mu.square().sum(), ValueError, r"must give a tensor of the shape of mu"),
    "no tensor": (lambda mu, nu: 3.0, ValueError, r"must give a tensor of the shape of mu, \(.*\)\. Got 3\.0"),
    "not vectorised": (lambda mu, nu: mu.square() + mu.sum() + mu.std(), ValueError, "must work entry by entry"),
    "nan": (lambda mu, nu: mu.log(), ValueError, "must be finite for every mu and nu. Got nan at mu = "),
    "random": (random_r, ValueError, "two answers to one question"),
    "data": (lambda mu, nu, x: mu, TypeError, "must take two tensors, mu and nu"),
}


@pytest.mark.parametrize("name", BAD_FUNCTIONS)
def test_what_is_no_function_of_mean_and_scale_is_refused(name: str) -> None:
    function, kind, message = BAD_FUNCTIONS[name]
    mu = torch.linspace(-2.0, 2.0, 41, dtype=torch.float64)
    with pytest.raises(kind, match=message):
        Function(function).each(mu, torch.ones_like(mu))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: Function(3.0), TypeError, "Function.r must be a function of"),
        (lambda: Function(lambda mu, nu: mu.tanh() ** 2, "tanh(w)^2").prior(), ValueError, "kappa is infinite"),
        (lambda: Function(lambda mu, nu: torch.zeros_like(mu)).factor(1.0, (1, 1)), ValueError, "kappa is infinite"),
        (lambda: Function(lambda mu, nu: -mu.square()).prior(), ValueError, "kappa is infinite"),
        (
            lambda: Function(lambda mu, nu: (mu.square() - 4.0).square(), "wells").factor(0.1, (2, 2)),
            ValueError,
            "No factor gives the variance 0.1: .* stays at 4",
        ),
        (
            lambda: Function(lambda mu, nu: 1e4 * (mu.square() - 4.0).square(), "wells").prior(),
            ValueError,
            "too narrow for a table",
        ),
        (lambda: QUARTIC.prior(torch.ones(2)), ValueError, "factor must be a number"),
        (lambda: SquaredL2().prior(-1.0), ValueError, "factor must be a positive number"),
        (lambda: L1().factor(0.0, (1, 2)), ValueError, "variance must be a positive number"),
        (lambda: GroupLasso().factor(1.0, ()), ValueError, r"shape must be that of a weight tensor"),
        (lambda: GroupLasso().factor(1.0, (2, 0)), ValueError, r"shape\[1\] must be a positive whole number"),
        (lambda: GroupLasso("neurons"), ValueError, "over must be"),
        (lambda: GroupLasso().each(torch.ones(1), torch.ones(1)), TypeError, "no sum over single weights"),
        (lambda: Sum(()), TypeError, "Sum.terms must be a tuple of penalties"),
        (lambda: Sum((L1(), SquaredL2()), (1.0,)), ValueError, "one for each of the 2 terms"),
        (lambda: Sum((L1(), GroupLasso())).prior(), ValueError, "its groups differ"),
        (lambda: from_prior(Cauchy(), Gaussian()).factor(1.0, (1, 2)), ValueError, "Cauchy has no variance to match"),
        (lambda: from_prior(StudentT(2.0), Gaussian()).factor(1.0, (1, 2)), ValueError, "no variance to match"),
        (lambda: Gaussian((0.5, 0.5)), ValueError, "several that differ"),
        (lambda: Gaussian(-1.0), ValueError, "Gaussian.scale must be a positive number"),
        (lambda: Translation(), ValueError, "Give one of the two"),
        (lambda: Translation(lambda z: z), ValueError, "Translation.density must give a density"),
        (
            lambda: Translation(lambda z: (z.abs() < 1.0).double()),
            ValueError,
            "must not jump .* Let lowest or highest be",
        ),
        (lambda: Translation(lambda z: torch.exp(-z) * (z > 0.0)), ValueError, "between -?[0-9.e-]+ and 0.02"),
        (lambda: Translation(standard_moments=(1.0, 0.0, 1.0)), ValueError, "standard_entropy must be a number"),
        (lambda: Translation(standard_moments=(1.0, 2.0, 1.0), standard_entropy=0.0), ValueError, "positive variance"),
        (lambda: Tabulated(torch.zeros(13), 2.0), ValueError, "does not integrate"),
        (lambda: Tabulated(torch.zeros(14), 2.0), ValueError, "multiple of 4"),
        (lambda: Tabulated.of(torch.cos), ValueError, "or it does not integrate"),
        (lambda: Tabulated.of(lambda x: -x.clamp_min(0.0)), ValueError, "or it does not integrate"),
    ],
)
def test_bad_input_is_explained(call: object, kind: type[Exception], message: str) -> None:
    assert callable(call)
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@given(st.floats(0.05, 3.0))
@settings(deadline=None, max_examples=20)
def test_families_agree_with_their_own_quadrature(scale: float) -> None:
    densities = {
        "normal": Translation(lambda z: torch.exp(-0.5 * z.square()), lowest=-12.0, highest=12.0, scale=scale),
        "moments": Translation(standard_moments=(1.0, 0.0, 1.0, 0.0, 3.0), standard_entropy=Gaussian(1.0).entropy(1.0)),
    }
    exact = Gaussian(scale)
    for family in densities.values():
        assert family.moments(scale, 4) == pytest.approx(exact.moments(scale, 4), rel=1e-9, abs=1e-12)
        assert family.entropy(scale) == pytest.approx(exact.entropy(scale), rel=1e-9, abs=1e-9)
    frequency = torch.tensor([0.0, 0.7, 2.0], dtype=torch.float64)
    found = densities["normal"].characteristic(frequency, scale)
    torch.testing.assert_close(found, exact.characteristic(frequency, scale), rtol=1e-9, atol=1e-12)
    assert Dirac().is_fixed


@pytest.mark.parametrize("scale", [0.5, 2.0])
@pytest.mark.parametrize(
    ("density", "lowest", "highest", "moments", "entropy", "continuous"),
    [
        (torch.ones_like, -1.0, 1.0, (1.0, 0.0, 1.0 / 3.0, 0.0, 0.2), math.log(2.0), False),
        (lambda z: (z.abs() < 1.0).float(), -1.0, 1.0, (1.0, 0.0, 1.0 / 3.0, 0.0, 0.2), math.log(2.0), False),
        (lambda z: torch.exp(-z) * (z > 0.0), 0.0, 40.0, (1.0, 1.0, 2.0, 6.0, 24.0), 1.0, False),
        (lambda z: z**5, 0.0, 1.0, tuple(6.0 / (6.0 + k) for k in range(5)), 5.0 / 6.0 - math.log(6.0), False),
        (lambda z: torch.exp(-z.abs()), -40.0, 40.0, (1.0, 0.0, 2.0, 0.0, 24.0), 1.0 + math.log(2.0), True),
    ],
    ids=["uniform", "open uniform", "exponential", "power", "laplace"],
)
def test_densities_with_an_edge_have_their_moments_and_entropy(
    density: object,
    lowest: float,
    highest: float,
    moments: tuple[float, ...],
    entropy: float,
    continuous: bool,
    scale: float,
) -> None:
    family = Translation(density, lowest, highest, scale=scale)  # type: ignore[arg-type]
    tolerance = 3e-4 if continuous else 1e-9  # a kink within is left to the trapezoid rule
    wanted = [scale**k * moment for k, moment in enumerate(moments)]
    assert family.moments(scale, 4) == pytest.approx(wanted, rel=tolerance, abs=1e-12)
    assert family.entropy(scale) == pytest.approx(entropy + math.log(scale), abs=tolerance)
    assert family.is_continuous is continuous
