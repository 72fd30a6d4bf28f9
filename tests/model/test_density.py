"""Log densities of one's own."""

import math

import pytest
import torch

from posterity.model import Density, Interval, Ordered, Positive, Simplex
from posterity.numerics import Key

SHAPES = {"level": (), "rate": (2,), "share": (3,), "cut": (2, 3), "free": (2, 2)}
CONSTRAINTS = {"rate": Positive(), "share": Simplex(), "cut": Ordered(), "level": Interval(-1.0, 2.0)}


def log_p(level, rate, share, cut, free):
    """One number for all: gamma, Dirichlet, normal."""
    value = -0.5 * (level - 0.3) ** 2 + (rate.log() - 2.0 * rate).sum(-1)
    value = value + (torch.tensor([1.0, 2.0, 0.5], dtype=share.dtype) * share.log()).sum(-1)
    return value - 0.5 * cut.square().sum((-2, -1)) - 0.5 * (free * level[..., None, None]).square().sum((-2, -1))


def density(batched=False):
    return Density(log_p, SHAPES, CONSTRAINTS, batched=batched, dtype=torch.float64)


def points(members=None):
    lead = () if members is None else (members,)
    return 0.7 * Key(0).normal((*lead, density().size), torch.float64).to(torch.get_default_device())


def test_names_shapes_and_size():
    problem = density()
    assert problem.layout.names == ("level", "rate", "share", "cut", "free")
    assert [part.shape for part in problem.layout] == [(), (2,), (2,), (2, 3), (2, 2)]
    assert problem.size == problem.num_weights == 15
    assert (problem.num_data, problem.num_members, problem.random_indices) == (1, None, None)
    assert problem.initial().shape == (15,)
    assert problem.initial().dtype == torch.float64
    assert problem.member(3) is problem.fitted(points()) is problem


def test_a_device_may_be_a_word():
    density = Density(lambda x: -x.square().sum(), {"x": (2,)}, device="cpu")  # type: ignore[arg-type]
    assert density.device == torch.device("cpu")
    assert density.value_and_grad(torch.ones(2))[0] == -2.0


def test_default_kind_is_torchs():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert Density(lambda u: u.sum(), {"u": (1,)}).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert Density(lambda u: u.sum(), {"u": (1,)}).dtype == before


@pytest.mark.parametrize("batched", [False, True])
def test_log_density_has_the_log_jacobian(batched):
    problem, theta = density(batched), points()
    values = problem.constrained(theta)
    assert {name: tuple(v.shape) for name, v in values.items()} == SHAPES

    def flat(t):  # the constrained numbers without the redundant last share
        parts = problem.constrained(t)
        return torch.cat([(v[:-1] if name == "share" else v).reshape(-1) for name, v in parts.items()])

    jacobian = torch.autograd.functional.jacobian(flat, theta)
    wanted = log_p(**values) + torch.linalg.slogdet(jacobian).logabsdet
    torch.testing.assert_close(problem.log_density(theta), wanted, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(problem.log_likelihood(theta), wanted, rtol=1e-11, atol=1e-11)
    assert float(problem.log_prior(theta)) == 0.0


@pytest.mark.parametrize("batched", [False, True])
def test_value_and_gradient(batched):
    problem = density(batched)
    for theta in (points(), points(4)):
        before = theta.clone()
        value, grad, buffers = problem.value_and_grad(theta)
        leaf = theta.clone().requires_grad_()
        wanted = problem.log_density(leaf)
        torch.testing.assert_close(value, wanted.detach(), rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(wanted.sum(), leaf)
        torch.testing.assert_close(grad, gradient, rtol=1e-12, atol=1e-12)
        assert torch.equal(theta, before)
        assert not theta.requires_grad
        assert buffers == {}
        with torch.no_grad():
            torch.testing.assert_close(problem.value_and_grad(theta)[1], grad, rtol=1e-12, atol=1e-12)


def test_members_are_a_loop_and_batched_is_mapped():
    theta = points(4)
    mapped, at_once = density(), density(batched=True)
    value, grad, _ = mapped.value_and_grad(theta)
    assert value.shape == (4,)
    for index in range(4):
        one, one_grad, _ = mapped.value_and_grad(theta[index])
        torch.testing.assert_close(value[index], one, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad[index], one_grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(at_once.value_and_grad(theta)[0], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(at_once.value_and_grad(theta)[1], grad, rtol=1e-12, atol=1e-12)
    assert mapped.log_prior(theta).shape == (4,)


def test_there_and_back():
    problem = density()
    for theta in (points(), points(4)):
        values = problem.constrained(theta)
        shuffled = dict(reversed(values.items()))
        torch.testing.assert_close(problem.unconstrained(shuffled), theta, rtol=1e-9, atol=1e-9)


def test_it_integrates_to_the_normaliser_of_the_constrained_density():
    """An exponential of rate 3: the integral over u of exp(log_density) is one."""
    problem = Density(lambda v: math.log(3.0) - 3.0 * v, {"v": ()}, {"v": Positive()}, dtype=torch.float64)
    u = torch.linspace(-40.0, 6.0, 20_001, dtype=torch.float64).unsqueeze(-1)
    assert float(torch.trapezoid(problem.log_density(u).exp(), u[:, 0])) == pytest.approx(1.0, rel=1e-9)


def test_bad_densities_are_refused():
    for make, error, message in (
        (lambda: Density(3.0, {"u": (1,)}), TypeError, r"Density\.function must be callable .*Got 3\.0"),
        (lambda: Density(log_p, [2]), TypeError, r"Density\.shapes must be a dict by parameter\. Got \[2\]"),
        (
            lambda: Density(log_p, {"u": ()}, Positive()),
            TypeError,
            r"Density\.constraints must be a dict .*Positive\(\)",
        ),
        (lambda: Density(log_p, {}), ValueError, "must name at least one parameter"),
        (
            lambda: Density(log_p, {"u": 2}),
            TypeError,
            r"Density\.shapes\['u'\] must be a tuple such as \(2,\).* Got 2\.",
        ),
        (
            lambda: Density(log_p, {"rate": ()}, {"rat": Positive()}),
            ValueError,
            "Unknown parameter 'rat'. Did you mean 'rate'",
        ),
        (lambda: Density(log_p, {"rate": ()}, {"rate": Positive}), TypeError, r"\['rate'\] must be a Constraint"),
        (lambda: Density(log_p, {"rate": ()}, {"rate": Ordered()}), ValueError, "Ordered needs an axis"),
    ):
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize("members", [None, 2])
@pytest.mark.parametrize(
    ("function", "batched"),
    [
        (lambda u: u, False),
        (lambda u: u.sum(-1, keepdim=True), False),
        (lambda u: 1.0, False),
        (lambda u: u.sum(), True),  # over the members too
        (lambda u: u, True),
        (lambda u: u.sum(-1, keepdim=True), True),
    ],
)
def test_a_function_that_gives_anything_but_one_number_is_refused(function, batched, members):
    problem = Density(function, {"u": (3,)}, batched=batched)
    theta = torch.zeros(3) if members is None else torch.zeros(members, 3)
    with pytest.raises(ValueError, match=r"must return one number.* Sum over the data"):
        problem.log_density(theta)


@pytest.mark.parametrize(
    "function", [lambda u: u.sum() if u[0] > 0 else -u.sum(), lambda u: u.sum() * float(u[0])], ids=["if", "float"]
)
def test_a_function_that_cannot_be_mapped_is_refused_with_what_to_write_instead(function):
    theta = torch.zeros(2, 3)
    with pytest.raises(TypeError, match=r"mapped over chains or members: It looks like.*\. Choose by torch\.where"):
        Density(function, {"u": (3,)}).log_density(theta)
    with pytest.raises(TypeError, match="batched=True"):
        Density(torch.sum, {"u": (3,)}, pointwise=function).log_likelihoods(theta)


def test_errors_of_the_function_itself_come_through():
    def broken(u):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        Density(broken, {"u": (3,)}).log_density(torch.zeros(2, 3))


@pytest.mark.parametrize("theta", [torch.zeros(3), torch.zeros(2, 3)], ids=["one", "members"])
def test_a_function_without_gradient_is_refused(theta):
    with pytest.raises(ValueError, match=r"has no gradient\. Compute it from the named tensors"):
        Density(lambda u: u.detach().sum(), {"u": (3,)}).value_and_grad(theta)


def test_values_outside_the_constraint_are_refused():
    problem = Density(lambda rate, level: rate + level, {"rate": (), "level": ()}, {"rate": Positive()})
    with pytest.raises(ValueError, match=r"'rate' must lie inside Positive\(\).* Got tensor\(\) -1\.0"):
        problem.unconstrained({"rate": torch.tensor(-1.0), "level": torch.tensor(0.0)})
    with pytest.raises(ValueError, match="not on its edge"):
        problem.unconstrained({"rate": torch.tensor(0.0), "level": torch.tensor(0.0)})
    with pytest.raises(ValueError, match=r"needs a value for each of level, rate\. Got rate"):
        problem.unconstrained({"rate": torch.tensor(1.0)})
