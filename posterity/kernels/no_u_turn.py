"""The no-U-turn sampler: trees of leapfrog steps, grown for all chains together."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from posterity.kernels.hamiltonian import leapfrog, log_joint
from posterity.kernels.metropolis import DIVERGENCE, finite_ratio
from posterity.kernels.state import Move, Place, Target, chosen, whitened

Run: TypeAlias = Callable[..., Any]
"""`run(function, *arguments)` is `function(*arguments)`, compiled or not; the next call may overwrite its result."""

INFINITE = 1e30  # largest log weight: beside all others infinite, and can be subtracted from itself


class Tree(NamedTuple):
    """Trajectories of all chains, in whitened coordinates: both ends, the point drawn so far, and sums over points.

    `momentum` (C, P) is the sum of the momenta, `log_weight` (C,) the log of the summed densities relative to the
    start. `active` says which trees still grow. `accept` sums probabilities of acceptance over `leapfrogs` points.
    """

    left: Place
    left_momentum: Tensor
    right: Place
    right_momentum: Tensor
    drawn: Place
    momentum: Tensor
    log_weight: Tensor
    active: Tensor
    accept: Tensor
    leapfrogs: Tensor
    divergent: Tensor
    depth: Tensor


class Branch(NamedTuple):
    """A growing half of a tree: its far end, and sums as in `Tree`; `sound` until it turns or diverges."""

    end: Place
    end_momentum: Tensor
    drawn: Place
    momentum: Tensor
    log_weight: Tensor
    sound: Tensor
    accept: Tensor
    leapfrogs: Tensor
    divergent: Tensor


def turns(first: Tensor, last: Tensor, total: Tensor) -> Tensor:
    """Whether a piece of trajectory has made a U-turn (C,), from its first and last momentum and their total.

    The end points count half, as in the trapezoidal rule for the displacement.
    """
    way = total - 0.5 * (first + last)
    return ((first * way).sum(-1) <= 0) | ((last * way).sum(-1) <= 0)


def begun(value: Tensor, grad: Tensor, momentum: Tensor, direction: Tensor) -> tuple[Tree, Branch]:
    """Trees of a single point at z = 0, and their first branches in the directions (C,) of +1 or -1."""
    here = Place(torch.zeros_like(momentum), value, grad)
    zero = torch.zeros_like(value)
    no, yes = torch.zeros_like(value, dtype=torch.bool), torch.ones_like(value, dtype=torch.bool)
    tree = Tree(here, momentum, here, momentum, here, momentum, zero, yes, zero, zero, no, zero)
    return tree, _branch(tree, direction)


def _branch(tree: Tree, direction: Tensor) -> Branch:
    ahead = direction > 0
    end = chosen(ahead, tree.right, tree.left)
    momentum = torch.where(ahead.unsqueeze(-1), tree.right_momentum, tree.left_momentum)
    zero, empty = torch.zeros_like(momentum), torch.full_like(tree.log_weight, -math.inf)
    return Branch(end, momentum, end, zero, empty, tree.active, tree.accept, tree.leapfrogs, tree.divergent)


def grown(
    target: Target, start: Tensor, scale: Tensor, branch: Branch, step: Tensor, level: Tensor, noise: Tensor, steps: int
) -> tuple[Branch, Tensor]:
    """Extend the branch by `steps` leapfrogs of size `step` (C,), a power of 2; also returns their first momentum.

    One of the new points is drawn by its weight, and replaces the point drawn before with probability (new weight /
    total weight); log-uniform `noise` (2, C) decides. Branches that have turned or diverged continue without effect:
    their tree does not join them.
    """
    target = whitened(target, start, scale)
    end, momentum, points, momenta, totals = branch.end, branch.end_momentum, [], [], [branch.momentum]
    for _ in range(steps):
        end, momentum = leapfrog(target, end, momentum, step.unsqueeze(-1))
        points.append(end)
        momenta.append(momentum)
        totals.append(totals[-1] + momentum)
    each, sums = torch.stack(momenta), torch.stack(totals)  # (K, C, P), and one more: few operations on all points
    # A point of infinite density is drawn, so that the run stops there.
    gaps = finite_ratio(log_joint(torch.stack([point.value for point in points]), each) - level).clamp(max=INFINITE)
    log_new = gaps.logsumexp(0)
    log_weight = torch.logaddexp(branch.log_weight, log_new)
    take = noise[1] < log_new - log_weight
    spans = [2**power for power in range(1, steps.bit_length())]
    turned = [turns(each[::span], each[span - 1 :: span], sums[span::span] - sums[:-1:span]) for span in spans]
    lost, accepted = gaps < -DIVERGENCE, gaps.clamp(max=0.0).exp()
    sound, accept, leapfrogs, divergent = branch.sound, branch.accept, branch.leapfrogs, branch.divergent
    for index in range(steps):
        divergent = divergent | (sound & lost[index])
        accept = accept + torch.where(sound, accepted[index], 0.0)
        leapfrogs = leapfrogs + sound
        sound = sound & ~lost[index]
        for span, has_turned in zip(spans, turned, strict=True):
            if (index + 1) % span == 0:
                sound = sound & ~has_turned[index // span]
    drawn = chosen(take, _picked(points, gaps, noise[0]), branch.drawn)
    whole = Branch(end, momentum, drawn, totals[-1], log_weight, sound, accept, leapfrogs, divergent)
    return whole, momenta[0]


def _picked(points: Sequence[Place], log_weights: Tensor, log_uniform: Tensor) -> Place:
    """Draw one of K points for each chain, in proportion to weights given by their logs (K, C)."""
    shares = (log_weights - log_weights.amax(0).clamp(min=-2.0 * DIVERGENCE)).exp()
    so_far = list(accumulate(shares.unbind(0)))
    wanted, picked = log_uniform.exp() * so_far[-1], points[-1]
    for point, limit in zip(reversed(points[:-1]), reversed(so_far[:-1]), strict=True):
        picked = chosen(wanted < limit, point, picked)  # never a point of zero weight, also where the number is 0
    return picked


def still_sound(sound: Tensor, first: Tensor, before: Tensor, last: Tensor, total: Tensor) -> Tensor:
    """Whether branches stay sound: no U-turn between a point (momentum, sum before it) and the end (momentum, sum)."""
    return sound & ~turns(first, last, total - before)


def joined(
    tree: Tree, branch: Branch, direction: Tensor, log_uniform: Tensor, following: Tensor
) -> tuple[Tree, Branch, Tensor]:
    """Join sound branches to their trees; returns the trees, next branches in directions `following`, and any activity.

    The branch's point is drawn with probability min(1, weight of branch / weight of tree), which prefers far points.
    """
    sound = branch.sound
    ahead, behind = sound & (direction > 0), sound & (direction < 0)
    left_momentum = torch.where(behind.unsqueeze(-1), branch.end_momentum, tree.left_momentum)
    right_momentum = torch.where(ahead.unsqueeze(-1), branch.end_momentum, tree.right_momentum)
    momentum = tree.momentum + branch.momentum
    new = Tree(
        chosen(behind, branch.end, tree.left),
        left_momentum,
        chosen(ahead, branch.end, tree.right),
        right_momentum,
        chosen(sound & (log_uniform < branch.log_weight - tree.log_weight), branch.drawn, tree.drawn),
        momentum,
        torch.logaddexp(tree.log_weight, branch.log_weight),
        sound & ~turns(left_momentum, right_momentum, momentum),
        branch.accept,
        branch.leapfrogs,
        branch.divergent,
        tree.depth + tree.active,
    )
    return new, _branch(new, following), new.active.any()


def opened(
    target: Target,
    start: Tensor,
    scale: Tensor,
    place: Place,
    momentum: Tensor,
    step_size: Tensor,
    directions: Tensor,
    log_uniforms: Tensor,
    noise: Tensor,
) -> tuple[Tree, Branch, Tensor, Tensor]:
    """Return what `joined` does after D doublings, and the log density of position and momentum at the start (C,).

    `log_uniforms` (D, C) and `directions` (D + 1, C), with the direction that follows, are for `joined`, `noise` (D, 2,
    C) for `grown`.
    """
    level = log_joint(place.value, momentum)
    tree, branch = begun(place.value, place.grad, momentum, directions[0])
    going = tree.active.any()
    for depth, log_uniform in enumerate(log_uniforms):
        step = step_size * directions[depth]
        branch, _ = grown(target, start, scale, branch, step, level, noise[depth], 2**depth)
        tree, branch, going = joined(tree, branch, directions[depth], log_uniform, directions[depth + 1])
    return tree, branch, going, level


def plain(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function as it is."""
    return function(*arguments)


def _extended(
    work: tuple[Target, Tensor, Tensor],
    branch: Branch,
    step: Tensor,
    level: Tensor,
    noise: Tensor,
    run: Run,
    steps: int,
) -> Branch:
    """Extend the branch by `steps` leapfrogs for each entry of `noise` (n, 2, C), or until all chains have turned."""
    starts: dict[int, tuple[Tensor, Tensor]] = {}  # momentum at the start of a block, and the sum before it
    for block, own in enumerate(noise.unbind(0)):
        before = _lasting(branch.momentum)
        branch, first = run(grown, *work, branch, step, level, own, steps)
        starts[block] = _lasting(first), before
        span = 2
        while (block + 1) % span == 0:
            since = block + 1 - span
            sound = run(still_sound, branch.sound, *starts[since], branch.end_momentum, branch.momentum)
            branch = branch._replace(sound=sound)
            del starts[since + span // 2]  # no longer span starts there
            span *= 2
        if block + 1 < len(noise) and not bool(branch.sound.any()):
            break
    return branch


def _lasting(tensor: Tensor) -> Tensor:
    """Copy a tensor that `run` may overwrite: recordings on CUDA write to the same memory each time."""
    return tensor.clone() if tensor.is_cuda else tensor


def no_u_turn(
    target: Target,
    place: Place,
    momentum: Tensor,
    step_size: Tensor,
    scale: Tensor,
    directions: Tensor,
    log_uniforms: Tensor,
    noise: Callable[[int], Tensor],
    run: Run = plain,
    first: int = 1,
) -> tuple[Place, Move]:
    """No-U-turn transition from `place`, whose gradient is in coordinates z; returns its end in z.

    **Math**: a trajectory through (x, p) doubles, by as many leapfrogs as it has points, in a random direction, until
    it or one of its halves, quarters ... makes a U-turn; the next x is drawn from its points in proportion to exp(-H),
    by sampling within each new half and then between halves with a preference for the new one. `momentum` (C, P) is of
    unit mass in the whitened coordinates of `scale`; `step_size` (C,). `directions` (D + 1, C) of +1 and -1 and
    `log_uniforms` (D, C) are the noise of the D doublings at most; `noise(n)` gives log-uniform numbers (n, 2, C) for
    n pieces of trajectory. The `first` doublings are a single call of `run`, whether or not they are all needed; after
    them each call makes a piece of 2^first leapfrogs.

    **Limit**: exact. All chains take as long as the deepest tree.

    **Cost**: 2^depth - 1 gradients of all chains, and their points of 2^first leapfrogs in memory.

    **References**: Hoffman and Gelman (2014), The no-U-turn sampler; Betancourt (2017), A conceptual introduction to
    Hamiltonian Monte Carlo, appendix A.
    """
    start, depths = place.position, len(log_uniforms)
    first = min(first, depths)
    work = target, start, scale
    tree, branch, going, level = run(
        opened, *work, place, momentum, step_size, directions[: first + 1], log_uniforms[:first], noise(first)
    )
    level = _lasting(level)
    for depth in range(first, depths):
        if not bool(going):
            break
        step = step_size * directions[depth]
        branch = _extended(work, branch, step, level, noise(2 ** (depth - first)), run, 2**first)
        tree, branch, going = run(joined, tree, branch, directions[depth], log_uniforms[depth], directions[depth + 1])
    drawn = Place(*map(_lasting, tree.drawn))
    counts = map(_lasting, (tree.divergent, tree.leapfrogs, tree.depth))
    return drawn, Move(tree.accept / tree.leapfrogs, -level, *counts)
