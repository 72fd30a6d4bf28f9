"""`infer`: the starting point of a run, its loop over steps, and interruption."""

import dataclasses
import logging
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, nn

from posterity.errors import shown
from posterity.inference.acceleration import Acceleration, Stepper
from posterity.inference.callbacks import Callback, ProgressBar, Validation, as_callbacks, shows_progress
from posterity.inference.checkpoint import Checkpoint, Checkpointer, last_good, stored_problem
from posterity.inference.fastest import Step, fastest
from posterity.inference.identity import identity, refuse_unlike
from posterity.inference.kept import Kept, refuse_too_many
from posterity.inference.memory import refuse_too_large
from posterity.inference.method import Method, check_arguments, with_passes
from posterity.inference.run import Run, Trace, check_loss
from posterity.inference.validator import Validator
from posterity.model import Joint, Problem
from posterity.model.data import Data, Feed, StreamData, TensorData
from posterity.model.passes import Precision
from posterity.model.problem import data_of
from posterity.model.scales import chosen_scales, leaves_out, with_scales_of
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior
from posterity.processes import active, ended_together, using
from posterity.storage import flatten

Start: TypeAlias = Posterior | Tensor | Callable[[], nn.Module] | None
"""What a run may start from."""


def starting_point(method: Method, joint: Problem, start: Start, data: Data, key: Key) -> tuple[Problem, Tensor]:
    """Return (joint, theta) to start from; theta (P,) or (M, P) is a new tensor, whose memory members may share.

    A posterior gives its weights by name (also the values of weights that the joint freezes), its buffers, and the
    fitted parameters of its likelihood. A single theta is repeated where the joint or the data have members.
    """
    if start is None:
        theta = method.initial(joint, key)
    elif isinstance(start, Posterior):
        if type(start.joint) is not type(joint):
            kinds = f"a {type(start.joint).__name__}, and this problem is a {type(joint).__name__}"
            raise ValueError(f"start is the posterior of {kinds}. Start from a posterior of the same problem.")
        start = start.start()
        theta = _same_dtype(joint, start.point())
        if isinstance(joint, Joint) and isinstance(start.joint, Joint):
            joint, theta = _from_posterior(joint, theta, start, start.joint)
    elif isinstance(start, Tensor):
        theta = _same_dtype(joint, start)
        if isinstance(joint, Joint) and joint.likelihood.num_free and theta.shape[-1:] == (joint.num_weights,):
            free = joint.likelihood.free(theta)  # only weights are given: start the likelihood's parameters here
            theta = torch.cat([theta, free.expand(*theta.shape[:-1], -1)], dim=-1)
    elif callable(start) and not isinstance(start, nn.Module):
        theta = _from_factory(method, joint, start, key)
    else:
        hint = " Leave it out: the joint begins at its module's own weights." if isinstance(start, nn.Module) else ""
        wanted = "a Posterior, a tensor (P,) or (M, P), a function that returns a new module, or None"
        raise TypeError(f"start must be {wanted}. Got {shown(start)}.{hint}")
    return joint, _members(joint, theta, data)


def _from_factory(method: Method, joint: Problem, factory: Callable[[], nn.Module], key: Key) -> Tensor:
    """Return the method's own start, with the weights of a new module wherever it takes fresh weights or the module's.

    Each call of the factory draws from generators that are seeded by the key of the member.
    """
    problem = joint.as_joint("start as a function", "Give theta (P,) or (M, P).")
    theta = method.initial(dataclasses.replace(problem, network=problem.network.made_by(factory, key)), key)
    if theta.dim() > 1 and len(theta) > 1 and torch.equal(theta[0], theta[1]):
        raise ValueError(
            "start: two calls of the function gave the same weights, so that members would be equal. Let it make a new "
            "module at each call, with weights from torch's own generator, which is seeded for each member."
        )
    return theta


def _same_dtype(joint: Problem, theta: Tensor) -> Tensor:
    if theta.dtype != joint.dtype:
        raise ValueError(f"start must have the model's dtype {joint.dtype}. Got {theta.dtype}. Convert one of them.")
    return theta.detach().to(joint.device)


def _from_posterior(joint: Joint, theta: Tensor, start: Posterior, origin: Joint) -> tuple[Joint, Tensor]:
    known = {**origin.network.frozen, **origin.network.layout.unflatten(theta)}
    shapes = _shapes(origin)
    for name, shape in _shapes(joint).items():
        if shapes.get(name) != shape:
            raise ValueError(
                f"start comes from another network: it has no '{name}' of shape {shape}. "
                "Start from a posterior of the same network."
            )
    if theta.dim() > 1 and any(name not in origin.network.frozen for name in joint.network.frozen):
        raise ValueError(
            "start has several members, so the frozen weights would differ by member. Start from q.member(0)."
        )
    network = joint.network.replace(
        frozen={name: known[name].to(joint.device) for name in joint.network.frozen},
        buffers={name: b.to(joint.device) for name, b in {**origin.network.buffers, **start.buffers}.items()},
    )
    joint = dataclasses.replace(joint, network=network)
    weights = joint.network.layout.flatten(known)
    raw = joint.likelihood.free_from(origin.likelihood, weights)
    return joint, torch.cat([weights, raw.expand(*weights.shape[:-1], -1)], dim=-1)


def _shapes(joint: Joint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of the network, frozen ones included."""
    frozen = {name: tuple(value.shape) for name, value in joint.network.frozen.items()}
    return {**frozen, **{part.name: part.shape for part in joint.network.layout}}


def _members(joint: Problem, theta: Tensor, data: Data) -> Tensor:
    """Check theta, and repeat a single one for each member of the joint or the data."""
    if theta.dim() not in (1, 2) or theta.shape[-1] != joint.size or not theta.numel():
        raise ValueError(
            f"start must have {joint.size} entries, ({joint.size},) or (members, {joint.size}). "
            f"Got shape {tuple(theta.shape)}."
        )
    if not bool(torch.isfinite(theta).all()):
        where = joint.layout.name_at(int((~torch.isfinite(theta)).nonzero()[0, -1]))
        raise ValueError(
            f"The starting weights must be finite. Got NaN or infinity in '{where}'. Repair or retrain it."
        )
    theta = theta.detach().clone()
    in_data = data.rows.targets.shape[0] if isinstance(data, TensorData) and data.rows.per_member else None
    for owner, members in (("joint", joint.num_members), ("data", in_data)):
        if members is None:
            continue
        if theta.dim() == 1:
            theta = theta.expand(members, -1)
        elif theta.shape[0] != members:
            raise ValueError(
                f"There must be one row of theta for each of the {members} members of the {owner}. "
                f"Got {theta.shape[0]}. Give start, joint and data the same number of members."
            )
    return theta


logger = logging.getLogger("posterity")


class Interrupt:
    """A context in which the first Ctrl-C only sets `came`; a second one interrupts at once.

    A step overwrites its state in place, so a state stored in the middle of a step could not be resumed exactly. A
    signal is left alone if `wanted` is false, outside the main thread, and if it has another handler than Python's
    own or one that says `stops_runs`, as that of SIGTERM at the command line does.
    """

    def __init__(self, wanted: bool) -> None:
        self.came = False
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM) if self._wanted else ():
            handler = signal.getsignal(number)
            if handler is signal.default_int_handler or getattr(handler, "stops_runs", False):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        logger.warning("interrupted: this step is finished and the run stored; press again to stop at once")


VALIDATIONS = 50  # validations in a run
CHECK_EVERY = 100  # steps between checks of the loss on a GPU, where each waits for the device


@ended_together()
def infer(
    method: Method,
    joint: Problem,
    data: object,
    *,
    start: Start = None,
    validation: object = None,
    seed: int = 0,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback | Callable[[Run], object]] = (),
    progress: bool | None = None,
    accelerate: Acceleration = "auto",
    precision: Precision | None = None,
    micro_batch: int | None = None,
) -> tuple[Posterior, Trace]:
    """Run `method` on the problem `joint` with `data`; returns the posterior and the trace of the run.

    - `data`: (inputs, targets[, weights]) tensors or arrays, a `Dataset`, a `DataLoader`; None for a `Density`.
    - `start`: a Posterior, theta (P,) or (M, P), or a function that returns a new module at each call, for members and
      chains to begin at; None: the method's own start, mostly the module's own weights.
    - `validation`: data on which the negative log-likelihood is recorded during the run.
    - `seed`: seed, data and method determine every number of the run.
    - `checkpoint`: a folder in which the run is stored; the same call resumes an interrupted run, bit for bit, and one
      with more steps goes on where that is well defined (see `Checkpoint`).
    - `callbacks`: see `posterity.inference.callbacks`, `EarlyStopping` among them. A function of the run is called
      after every step.
    - `accelerate`: "auto" records the step as a CUDA graph where device and method allow; "off" never does. "fastest"
      also compiles the network by torch.compile, and keeps to that where a few steps on copies show it to be faster,
      as it is for large batches of images on a GPU. Compiled layers round otherwise, so that the last digits of a run
      depend on the choice, which is logged and stored with the run.
    - `precision`: "bf16" runs the network of a step under torch.autocast; weights, states and the posterior, which
      predicts in float32, stay float32. For methods that follow gradients of batches, and sums of `Laplace`.
    - `micro_batch`: most rows in a pass: a larger batch goes in pieces, whose gradients add up to its own.
    - `progress`: whether to show a bar on standard error; None: if that is a terminal.

    >>> import torch, posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=20)
    >>> q, trace = po.infer(po.methods.MAP(steps=200, batch_size=None), joint, (x, 2 * x))
    >>> bool(trace["loss"][-1] < trace["loss"][0])
    True
    """
    _refuse_bad_arguments(method, joint, seed)
    given = as_callbacks(callbacks)
    if accelerate not in get_args(Acceleration):
        raise ValueError(f"infer: accelerate must be 'auto', 'fastest' or 'off'. Got {shown(accelerate)}.")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("infer needs gradients, and torch.inference_mode() is on. Call it outside of that.")
    key = Key(operator.index(seed))
    rows = data_of(joint, data)
    method = method.settled(joint, rows)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    processes = active()
    if processes is not None:  # a process without them would not take part in what the others agree on
        kinds = [type(callback).__name__ for callback in given if not isinstance(callback, ProgressBar)]
        stores = None if checkpoint is None else (checkpoint.steps, checkpoint.seconds, checkpoint.least)
        what, remedy = "kind of callbacks or checkpoint", "give them to all; process 0 alone writes and shows progress"
        processes.refuse_differing(what, repr((kinds, stores)), remedy)
    joint = with_scales(method, joint, rows, start, key, checkpoint)
    joint, theta = starting_point(method, joint, start, rows, key.fold("start"))
    rows = joint.checked(rows.to(joint.device))
    if theta.dim() > 1:
        # The method itself counts rows of theta that it makes of one problem (an ensemble, chains).
        refuse_too_large(method, joint, rows, members=len(theta) if method.traits.takes_members else 1)
    theta = theta.contiguous()
    joint = method.prepared(joint, rows)
    stepped = with_passes(method, joint, rows, precision, micro_batch)
    feed = method.batches(rows, key.fold("batches"))
    validator = None if validation is None else Validator(joint, validation)
    run = Run(method, joint, len(feed), 0, method.init(joint, theta, key.fold("init")), validate=validator)
    step: Step = Stepper(method, stepped, accelerate)
    choosing = fastest(method, joint, rows, step, precision, micro_batch) if accelerate == "fastest" else None
    hooks = [*([] if choosing is None else [choosing]), *_hooks(given, run, progress)]
    keeper = None
    expected = sum(step <= run.steps for step in method.traits.kept_steps)
    folder = None if checkpoint is None else checkpoint.path
    if expected:
        refuse_too_many(method.keep(run.state), expected, folder)
    run.kept = Kept(expected, folder)
    if checkpoint is not None and isinstance(rows, StreamData):
        rows.refuse_unrepeatable()
    if checkpoint is not None or processes is not None:
        held_out = "none" if validator is None else validator.fingerprint()
        passes = {name: value for name, value in (("precision", precision), ("micro_batch", micro_batch)) if value}
        depends = identity(
            start=theta, method=method, seed=key.seed, data=rows, validation=held_out, model=joint, **passes
        )
        if processes is not None:
            refuse_unlike(processes, depends)
        if checkpoint is not None:
            keeper = Checkpointer(checkpoint, hooks, depends)
            keeper.resume(run)
    del theta  # steps need the memory
    with last_good(keeper, run):
        _loop(run, rows, feed, key.fold("steps"), hooks, keeper, choosing or step, micro_batch)
        if processes is not None:
            refuse_unlike(processes, flatten(run.state))
        posterior = run.posterior()
    for doubt in method.doubts(joint, run.trace):
        logger.warning(doubt)
    if validator is not None:
        posterior = method.refined(posterior, validator.sample())
    if isinstance(posterior.joint, Joint):
        chosen = chosen_scales(posterior.joint)
        run.trace.record(run.step, {name: scale for name, scale in chosen.items() if name not in run.trace})
    return posterior, run.trace


def with_scales(
    method: Method, joint: Problem, rows: Data, start: object, key: Key, checkpoint: Checkpoint | None = None
) -> Problem:
    """The problem with the scales that were left out, as the method or an interrupted run of it chose them.

    `key` is that of the run.
    """
    if not isinstance(joint, Joint) or not leaves_out(joint):
        return joint
    begun = None if checkpoint is None else stored_problem(checkpoint, joint)
    if begun is not None:
        joint = with_scales_of(joint, begun)
        if not leaves_out(joint):
            return joint
    before = start.joint if isinstance(start, Posterior) and isinstance(start.joint, Joint) else None
    with using(None):  # the same short fits in each process
        return method.with_scales(joint, joint.checked(rows.to(joint.device)), before, key.fold("scales"))


def _loop(
    run: Run,
    data: Data,
    feed: Feed,
    key: Key,
    hooks: Sequence[Callback],
    keeper: Checkpointer | None,
    step: Step,
    micro_batch: int | None,
) -> None:
    method, joint, traits = run.method, run.joint, run.method.traits
    interval = 1 if joint.device.type == "cpu" else CHECK_EVERY
    clock = time.perf_counter() - run.trace.seconds
    started: list[Callback] = []
    try:
        for hook in hooks:
            hook.start(run)
            started.append(hook)
        with Interrupt(wanted=keeper is not None) as interrupt:
            for batch in iter(()) if run.stopped else feed.from_step(run.step):
                run.state, info = step(run.state, batch, key.fold(run.step))  # type: ignore[arg-type]
                run.step += 1
                run.trace.record(run.step, info)
                run.stopped = method.finished(run.state)
                if run.step % interval == 0 or run.step == run.steps or run.stopped:
                    check_loss(joint, run.trace, run.state, interval, traits.row)
                if run.step == run.steps or run.stopped:
                    closing = with_passes(method, joint, data, None, micro_batch)
                    run.trace.record(run.step, method.closing(closing, run.state, data))
                if run.step in traits.kept_steps:
                    run.kept.append(method.keep(run.state))
                for hook in hooks:
                    hook.after_step(run)
                run.trace.seconds = time.perf_counter() - clock
                came, due = _agreed(run, interrupt.came, keeper, hooks)
                if keeper is not None:
                    keeper.after_step(run, due=came or due)
                if came:
                    raise KeyboardInterrupt
                if run.stopped:
                    logger.info("stopped after step %d: %s", run.step, run.stopped)
                    break
    finally:
        for hook in started:
            hook.end(run)


def _agreed(run: Run, came: bool, keeper: Checkpointer | None, hooks: Sequence[Callback]) -> tuple[bool, bool]:
    """Return whether an interruption came, and whether the run is to be stored, in any process that shares it.

    A callback that stops the run in one of them stops it in all.
    """
    processes, due = active(), keeper is not None and keeper.due(run)
    if processes is None or (keeper is None and all(isinstance(hook, ProgressBar) for hook in hooks)):
        return came, due
    came, due, stopped = processes.any(came, due, bool(run.stopped))
    run.stopped = run.stopped or ("a callback in another process stopped it" if stopped else "")
    return came, due


def _refuse_bad_arguments(method: object, joint: object, seed: object) -> None:
    check_arguments("infer", method, joint)
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"infer: seed must be a whole number. Got {shown(seed)}.")


def _hooks(callbacks: Sequence[Callback], run: Run, progress: bool | None) -> list[Callback]:
    """Return all callbacks in the order they run: validation before its readers, the progress bar last."""
    validations = [hook for hook in callbacks if isinstance(hook, Validation)]
    if run.validate is not None and not validations:
        validations = [Validation(every=max(1, run.steps // VALIDATIONS) if run.method.traits.anytime else run.steps)]
    hooks = [*validations, *(hook for hook in callbacks if not isinstance(hook, Validation))]
    if shows_progress(progress):
        hooks.append(ProgressBar())
    return hooks
