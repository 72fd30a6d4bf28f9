"""Kernels of Markov chains, one step at a time against gold, and what they leave unchanged."""

import math

import pytest
import torch
from goldcases import load
from scipy import stats
from torch import Tensor

from posterity.kernels import (
    Place,
    Target,
    adjusted,
    hamiltonian,
    leapfrog,
    no_u_turn,
    place_at,
    random_walk,
    unadjusted,
)
from posterity.kernels.hamiltonian import log_joint

FLOAT64 = torch.float64
pytestmark = pytest.mark.cpu  # pure functions, whose noise comes from a generator of the CPU
ALWAYS, NEVER = -math.inf, 0.0  # log uniform numbers that accept everything, and nothing that is worse


def logistic(case):
    """The log joint of the gold file, without constants."""
    inputs, targets = case.inputs["X"], case.inputs["t"]

    def target(w: Tensor) -> tuple[Tensor, Tensor]:
        logits = w @ inputs.T
        value = (targets * logits - torch.nn.functional.softplus(logits)).sum(-1)
        grad = (targets - logits.sigmoid()) @ inputs - w / case.inputs["prior_std"] ** 2
        return value - 0.5 * w.square().sum(-1) / case.inputs["prior_std"] ** 2, grad

    return target


@pytest.fixture(scope="module")
def gold():
    case = load("mcmc_steps")
    target = logistic(case)
    return case, target, place_at(target, case.inputs["w"].unsqueeze(0)), case.inputs["eps"].unsqueeze(0)


def log_uniform(value: float) -> Tensor:
    return torch.tensor([value], dtype=FLOAT64)


def test_the_target_is_that_of_the_file(gold):
    case, _, place, _ = gold
    case.check("V", -place.value[0])
    case.check("grad_V", -place.grad[0])


def test_unadjusted_langevin(gold):
    case, target, place, noise = gold
    after, _ = unadjusted(target, place, noise, case.inputs["gamma"])
    case.check("ula_next", after.position[0])


def test_adjusted_langevin(gold):
    case, target, place, noise = gold
    after, move = adjusted(target, place, noise, log_uniform(-1e-300), case.inputs["gamma"])
    case.check("ula_next", after.position[0])  # a ratio above one is always taken
    case.check("mala_log_accept", move.accept.log()[0])
    back = -noise - math.sqrt(case.inputs["gamma"] / 2) * (place.grad + after.grad)  # the noise that leads back
    returned, reverse = adjusted(target, after, back, log_uniform(ALWAYS), case.inputs["gamma"])
    torch.testing.assert_close(returned.position, place.position, rtol=1e-12, atol=1e-12)
    case.check("mala_log_ratio", -reverse.accept.log()[0])


def test_random_walk(gold):
    case, target, place, noise = gold
    ratio = case.expected["rwmh_log_ratio"]
    after, move = random_walk(target, place, noise, log_uniform(ratio - 1e-9), case.inputs["rwmh_scale"])
    case.check("rwmh_proposal", after.position[0])
    case.check("rwmh_log_ratio", move.accept.log()[0])
    stayed, _ = random_walk(target, place, noise, log_uniform(ratio + 1e-9), case.inputs["rwmh_scale"])
    assert torch.equal(stayed.position, place.position)


def test_leapfrog_and_hamiltonian(gold):
    case, target, place, momentum = gold
    step, steps = case.inputs["hmc_step"], int(case.inputs["hmc_L"])
    end, last = leapfrog(target, place, momentum, step, steps)
    case.check("hmc_q", end.position[0])
    case.check("hmc_p", last[0])
    case.check("hmc_delta_H", (log_joint(place.value, momentum) - log_joint(end.value, last))[0])
    after, move = hamiltonian(target, place, momentum, log_uniform(NEVER - 1e-300), step, steps)
    case.check("hmc_q", after.position[0])
    case.check("hmc_accept_prob", move.accept[0])


def test_the_leapfrog_is_reversible_and_keeps_volume(gold):
    case, target, place, momentum = gold
    step, steps = case.inputs["hmc_step"], int(case.inputs["hmc_L"])
    end, last = leapfrog(target, place, momentum, step, steps)
    for begun, back in ((last, -step), (-last, step)):  # backwards in time, and with the momentum turned round
        returned, _ = leapfrog(target, end, begun, back, steps)
        torch.testing.assert_close(returned.position, place.position, rtol=1e-12, atol=1e-12)

    def flow(point: Tensor) -> Tensor:
        at = place_at(target, point[:2].unsqueeze(0))
        moved, out = leapfrog(target, at, point[2:].unsqueeze(0), step, steps)
        return torch.cat([moved.position[0], out[0]])

    jacobian = torch.func.jacrev(flow)(torch.cat([place.position[0], momentum[0]]))
    torch.testing.assert_close(torch.linalg.det(jacobian), torch.ones((), dtype=FLOAT64), rtol=1e-10, atol=0.0)


def test_mala_is_hmc_with_one_leapfrog(gold):
    case, target, place, _ = gold
    gamma = case.inputs["gamma"]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(500, 2, dtype=FLOAT64, generator=generator)
    uniform = torch.rand(500, dtype=FLOAT64, generator=generator).log()
    place = place_at(target, place.position + torch.randn(500, 2, dtype=FLOAT64, generator=generator))
    one, first = adjusted(target, place, noise, uniform, gamma)
    other, second = hamiltonian(target, place, noise, uniform, math.sqrt(2 * gamma), 1)
    torch.testing.assert_close(one.position, other.position, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first.accept, second.accept, rtol=1e-10, atol=1e-12)
    assert 0.5 < float(first.accept.mean()) < 0.99


def test_unadjusted_langevin_has_the_variance_of_theory():
    case = load("mcmc_steps")
    h, gamma, chains = case.inputs["h"], case.inputs["gamma"], 20_000
    generator = torch.Generator().manual_seed(1)

    def target(x: Tensor) -> tuple[Tensor, Tensor]:
        return -0.5 * (h * x.square()).sum(-1), -h * x

    place = place_at(target, torch.zeros(chains, 3, dtype=FLOAT64))
    for _ in range(80):  # (1 - 0.15 * 0.5)^160 = 4e-6 of the start is left
        noise = torch.randn(chains, 3, dtype=FLOAT64, generator=generator)
        place, _ = unadjusted(target, place, noise, gamma)
    expected = case.expected["ula_stationary_var"]
    off = (place.position.var(0) - expected) / (expected * math.sqrt(2 / chains))
    assert float(off.abs().max()) < 5.0
    wrong = (place.position.var(0) - case.expected["target_var"]) / (expected * math.sqrt(2 / chains))
    assert float(wrong[1:].min()) > 10.0


CHAINS = 40_000


def student(x: Tensor) -> tuple[Tensor, Tensor]:
    """Student's t with 5 degrees of freedom in one dimension."""
    return -3.0 * (x.square() / 5.0).log1p().sum(-1), -6.0 * x / (5.0 + x.square())


def banana(x: Tensor) -> tuple[Tensor, Tensor]:
    """x1 ~ N(0, 1), x2 | x1 ~ N(x1^2 / 2, 0.5^2)."""
    away = 4.0 * (x[:, 1] - 0.5 * x[:, 0].square())
    value = -0.5 * x[:, 0].square() - away.square() / 8.0
    return value, torch.stack([-x[:, 0] + away * x[:, 0], -away], -1)


def exact(name: str, generator: torch.Generator) -> Tensor:
    """Independent draws (CHAINS, P) of the target."""
    normal = torch.randn(CHAINS, 7, dtype=FLOAT64, generator=generator)
    if name == "student":
        return normal[:, :1] / (normal[:, 1:6].square().sum(-1, keepdim=True) / 5.0).sqrt()
    return torch.stack([normal[:, 0], 0.5 * normal[:, 0].square() + 0.5 * normal[:, 1]], -1)


TARGETS = {"student": student, "banana": banana}


def transition(
    kernel: str, target: Target, place: Place, generator: torch.Generator, step: float, mistake: str = ""
) -> Tensor:
    """Positions after one transition of all chains with a fixed step size."""
    normal = torch.randn(place.position.shape, dtype=FLOAT64, generator=generator)
    uniform = torch.rand(CHAINS, dtype=FLOAT64, generator=generator).log()
    if kernel == "nuts":
        deepest = 6

        def noise(pieces: int) -> Tensor:
            numbers = torch.rand(pieces, 2, CHAINS, dtype=FLOAT64, generator=generator).log()
            return torch.full_like(numbers, ALWAYS) if mistake == "the last point" else numbers

        directions = 2.0 * (torch.rand(deepest + 1, CHAINS, generator=generator) < 0.5).double() - 1.0
        if mistake == "one direction":
            directions = torch.ones_like(directions)
        coins = torch.rand(deepest, CHAINS, dtype=FLOAT64, generator=generator).log()
        steps, scale = torch.full((CHAINS,), step, dtype=FLOAT64), torch.ones(1, normal.shape[1], dtype=FLOAT64)
        drawn, _ = no_u_turn(target, place, normal, steps, scale, directions, coins, noise)
        return place.position + drawn.position  # the kernel's are measured from the start
    if kernel == "hmc":
        return hamiltonian(target, place, normal, uniform, step, 5)[0].position
    if kernel == "mala":
        return adjusted(target, place, normal, uniform, step)[0].position
    if kernel == "metropolis":
        return random_walk(target, place, normal, uniform, step)[0].position
    return unadjusted(target, place, normal, step)[0].position


def several(
    kernel: str, target: Target, before: Tensor, generator: torch.Generator, step: float, mistake: str = ""
) -> Tensor:
    """Positions after three transitions."""
    for _ in range(3):
        before = transition(kernel, target, place_at(target, before), generator, step, mistake)
    return before


def distance(name: str, before: Tensor, after: Tensor, generator: torch.Generator) -> float:
    """The largest of: Kolmogorov and Smirnov's distance from fresh draws, over its 1e-6 quantile; and moments in SE."""
    fresh = exact(name, generator)
    limit = math.sqrt(-0.5 * math.log(0.5e-6) * 2 / CHAINS)
    found = [
        float(stats.ks_2samp(after[:, k].numpy(), fresh[:, k].numpy()).statistic) / limit for k in range(after.shape[1])
    ]
    for statistic in (torch.tanh, lambda x: (0.5 * x).cos(), lambda x: x.square().clamp(max=20.0)):
        change = (statistic(after) - statistic(before)).mean(0)  # paired: start and end have one law
        error = (statistic(after) - statistic(before)).std(0) / math.sqrt(CHAINS)
        found.append(float((change.abs() / error).max()) / 5.0)
    return max(found)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "step"), [("nuts", 0.3), ("nuts", 0.9), ("hmc", 0.4), ("mala", 0.3), ("metropolis", 1.0)]
)
def test_transitions_leave_the_target_unchanged(name: str, kernel: str, step: float) -> None:
    generator = torch.Generator().manual_seed(17)
    before = exact(name, generator)
    after = several(kernel, TARGETS[name], before, generator, step)
    assert float((after != before).any(-1).double().mean()) > 0.3  # it moves
    assert distance(name, before, after, generator) < 1.0


@pytest.mark.parametrize(("name", "step"), [("student", 1.5), ("banana", 0.3)])
def test_a_large_step_of_unadjusted_langevin_does_not(name: str, step: float) -> None:
    generator = torch.Generator().manual_seed(17)
    before = exact(name, generator)
    after = transition("langevin", TARGETS[name], place_at(TARGETS[name], before), generator, step)
    assert distance(name, before, after, generator) > 2.0


@pytest.mark.parametrize("name", TARGETS)
def test_planted_bugs_change_the_target(name: str) -> None:
    """What the test above would say of mistakes: an accept step left out, a proposal ratio forgotten."""
    generator = torch.Generator().manual_seed(17)
    before = exact(name, generator)
    target = TARGETS[name]
    place = place_at(target, before)
    normal = torch.randn(before.shape, dtype=FLOAT64, generator=generator)
    uniform = torch.rand(CHAINS, dtype=FLOAT64, generator=generator).log()
    never_refused = hamiltonian(target, place, normal, torch.full_like(uniform, ALWAYS), 0.9, 3)[0].position
    assert distance(name, before, never_refused, generator) > 1.0
    proposal = unadjusted(target, place, normal, 0.3)[0]  # accepted as if the proposal were symmetric
    taken = uniform < proposal.value - place.value
    asymmetric = torch.where(taken.unsqueeze(-1), proposal.position, before)
    assert distance(name, before, asymmetric, generator) > 1.0


@pytest.mark.parametrize("mistake", ["one direction", "the last point"])
def test_mistakes_planted_in_trees_change_the_target(mistake: str) -> None:
    generator = torch.Generator().manual_seed(17)
    before = exact("banana", generator)
    after = several("nuts", banana, before, generator, 0.6, mistake)
    assert distance("banana", before, after, generator) > 1.0


def test_metropolis_and_hastings_mend_a_wrong_gradient() -> None:
    """Half the gradient in proposal and ratio is another proposal, no other target."""
    generator = torch.Generator().manual_seed(17)
    before = exact("banana", generator)

    def half(x: Tensor) -> tuple[Tensor, Tensor]:
        value, grad = banana(x)
        return value, 0.5 * grad

    after = transition("mala", half, place_at(half, before), generator, 0.3)
    assert distance("banana", before, after, generator) < 1.0
