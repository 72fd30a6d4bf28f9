"""The one loop over steps."""

import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from posterity.errors import BadData, Diverged
from posterity.inference.callbacks import Callback, ProgressBar, Validation
from posterity.inference.checkpoint import Checkpoint, Checkpointer
from posterity.inference.method import Method, Target
from posterity.inference.run import Run
from posterity.inference.start import starting_point
from posterity.inference.trace import Trace
from posterity.metrics import negative_log_likelihood
from posterity.model.data import Data, NoData, StreamData, TensorData, as_data
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior
from posterity.storage import clone, encode

logger = logging.getLogger("posterity")

VALIDATIONS = 50  # looks at the validation data in a run
CHECK_EVERY = 100  # steps between looks at the loss on a GPU, where every look waits for the device


def infer(
    method: Method,
    joint: Target,
    data: object,
    *,
    start: Posterior | Tensor | None = None,
    validation: object = None,
    seed: int = 0,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> tuple[Posterior, Trace]:
    """Run `method` on the problem `joint` with `data`; give the posterior and the trace of the run.

    - `data`: (inputs, targets[, weights]) tensors or arrays, a `Dataset`, a `DataLoader`; None for a `Density`.
    - `start`: a Posterior, theta (P,) or (M, P); None begins at the module's own weights.
    - `validation`: data on which the negative log-likelihood is recorded during the run.
    - `seed`: with it, the data and the method, every number of the run is fixed.
    - `checkpoint`: a folder in which the run is kept; the same call takes an interrupted run up again, to the bit.
    - `callbacks`: see `posterity.inference.callbacks`; `EarlyStopping` among them.
    - `progress`: a bar on standard error; None shows one when that is a terminal.

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=20)
    >>> q, trace = po.infer(po.methods.MAP(steps=200, batch_size=None), joint, (x, 2 * x))
    >>> bool(trace["loss"][-1] < trace["loss"][0])
    True
    """
    if not isinstance(method, Method):
        hint = f" Call it: {method.__name__}()." if isinstance(method, type) else ""
        raise TypeError(f"infer: the first argument must be a Method. Got {method!r}.{hint}")
    joint, theta = starting_point(joint, start)
    rows = _checked(joint, as_data(data).to(joint.device))
    key = Key(seed)
    feed = method.batches(rows, key.fold("batches"))
    state = method.init(joint, theta, key.fold("init"))
    run = Run(method, joint, len(feed), 0, state, validate=_validator(joint, validation))
    hooks = list(callbacks)
    if validation is not None and not any(isinstance(hook, Validation) for hook in hooks):
        hooks.insert(0, Validation(every=max(1, len(feed) // VALIDATIONS)))
    if progress or (progress is None and sys.stderr.isatty() and find_spec("rich") is not None):
        hooks.append(ProgressBar())
    keeper = _keeper(checkpoint, method, joint, rows, theta, seed)
    if keeper is not None:
        keeper.resume(run, hooks)
    _loop(run, feed, key.fold("steps"), hooks, keeper)
    return run.posterior(), run.trace


def _loop(run: Run, feed: Any, key: Key, hooks: Sequence[Callback], keeper: Checkpointer | None) -> None:
    method, joint = run.method, run.joint
    look = 1 if joint.device.type == "cpu" else CHECK_EVERY
    clock = time.perf_counter() - run.trace.seconds
    started: list[Callback] = []
    try:
        for hook in hooks:
            hook.start(run)
            started.append(hook)
        batches = iter(()) if run.stopped else feed.from_step(run.step)
        for batch in batches:
            run.state, info = method.step(joint, run.state, batch, key.fold(run.step))
            run.step += 1
            run.trace.record(run.step, info)
            if run.step % look == 0 or run.step == run.steps:
                _check_finite(run, look)
            if method.keeps(run.step):
                run.kept.append(clone(method.keep(run.state)))
            for hook in hooks:
                hook.after_step(run)
            run.trace.seconds = time.perf_counter() - clock
            if keeper is not None:
                keeper.after_step(run, hooks)
            if run.stopped:
                logger.info("stopped after step %d: %s", run.step, run.stopped)
                break
    except KeyboardInterrupt:
        if keeper is not None:
            keeper.write(run, hooks)
        raise
    finally:
        for hook in started:
            hook.end(run)


def _check_finite(run: Run, look: int) -> None:
    """Stop with step and tensor named when the loss is not a number."""
    if "loss" not in run.trace:
        return
    recent = run.trace.recent("loss", look)
    bad = ~torch.isfinite(recent).reshape(recent.shape[0], -1).all(1)
    if not bool(bad.any()):
        return
    step = run.step - recent.shape[0] + int(bad.nonzero()[0]) + 1
    tensor = "the log-likelihood of the batch"
    theta = getattr(run.state, "theta", None)
    if isinstance(theta, Tensor) and not bool(torch.isfinite(theta).all()):
        tensor = run.joint.layout.name_at(int((~torch.isfinite(theta)).nonzero()[0, -1]))
    raise Diverged(
        f"The loss is not finite at step {step} (first seen in {tensor}). "
        "Use a smaller step size, standardise the inputs and targets, or look for extreme rows.",
        step=step,
        tensor=tensor,
    )


def _checked(joint: Target, data: Data) -> Data:
    """The data, checked against the problem, with targets shaped for the likelihood."""
    if isinstance(joint, Density):
        if not isinstance(data, NoData):
            raise BadData("A Density has its data inside. Pass None as the data.")
        return data
    batch = joint.check(data.first())
    if data.num_data != joint.num_data:
        raise BadData(
            f"Joint.num_data is {joint.num_data} but the data have {data.num_data} rows, so the likelihood would be "
            f"scaled wrongly. Make the Joint with num_data={data.num_data}."
        )
    if isinstance(data, TensorData):
        return TensorData(batch)
    assert isinstance(data, StreamData)
    example = joint.example_output(batch)
    return data.prepared(lambda rows: joint.prepared(rows, example))


def _validator(joint: Target, validation: object) -> Any:
    if validation is None:
        return None
    if not isinstance(joint, Joint):
        raise TypeError("validation needs a Joint: a Density makes no predictions. Leave validation out.")
    data = as_data(validation).to(joint.device)
    example = joint.example_output(joint.check(data.first()))

    def validate(posterior: Posterior) -> float:
        total = 0.0
        for batch in data.passes(1024).from_step(0):
            assert batch is not None
            batch = joint.prepared(batch, example)
            total += batch.size * negative_log_likelihood(posterior.predict(batch.inputs), batch.targets)
        return total / data.num_data

    return validate


def _keeper(
    checkpoint: Checkpoint | str | os.PathLike[str] | None,
    method: Method,
    joint: Target,
    data: Data,
    theta: Tensor,
    seed: int,
) -> Checkpointer | None:
    if checkpoint is None:
        return None
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    tensors: dict[str, Tensor] = {}
    identity: dict[str, Any] = {"method": encode(method, tensors, "method"), "seed": seed, "data": data.fingerprint()}
    if isinstance(joint, Joint):
        identity["model"] = joint.encode(tensors)
    else:
        identity["model"] = {"names": list(joint.layout.names), "size": joint.size}
    tensors["start"] = theta
    return Checkpointer(checkpoint, identity, tensors)
