"""The columns of a run's trace, handed to any logger."""

from collections.abc import Callable
from typing import Any

from posterity.errors import positive_whole, shown
from posterity.inference.callbacks import Callback
from posterity.inference.run import Run

Write = Callable[[dict[str, float], int], Any]


class Log(Callback):
    """Hands what a run records to `write(values, step)`, a dictionary a step, as most loggers take it.

    The first, every `every`-th and the last step are handed over. Columns that are not recorded in every step, such as
    "validation_nll", are handed over whenever they are. A run with members has columns "loss/0", "loss/1" and so on.
    Reading values waits for a GPU; hence `every`.

    `Log(wandb.log)` and `Log(mlflow.log_metrics)` need no more. TensorBoard takes a number at a time:

        writer = torch.utils.tensorboard.SummaryWriter("runs/first")
        Log(lambda values, step: [writer.add_scalar(name, value, step) for name, value in values.items()])

    >>> import torch, posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=20)
    >>> rows = []
    >>> log = Log(lambda values, step: rows.append((step, sorted(values))), every=20)
    >>> _ = po.infer(po.methods.MAP(steps=50, batch_size=10), joint, (x, x), callbacks=[log])
    >>> rows
    [(1, ['loss']), (20, ['loss']), (40, ['loss']), (50, ['loss', 'mode_distance'])]
    """

    def __init__(self, write: Write, every: int = 10) -> None:
        if not callable(write):
            raise TypeError(f"Log.write must be a function of a dictionary and a step. Got {shown(write)}.")
        positive_whole("Log.every", every)
        self.write, self.every = write, every
        self._last: dict[str, int] = {}  # step at which each column was recorded last
        self._written: dict[str, int] = {}  # step at which each was handed over

    def start(self, run: Run) -> None:
        self._last, self._written = {}, dict.fromkeys(run.trace, run.step)

    def after_step(self, run: Run) -> None:
        fresh = self._recorded(run)
        rare = [name for name in fresh if self._last.get(name) != run.step - 1]
        self._last.update(dict.fromkeys(fresh, run.step))
        self._hand_over(run, fresh if run.step % self.every == 0 or run.step == run.steps else rare)

    def end(self, run: Run) -> None:
        """Hand over the last step of a run that has stopped early."""
        self._hand_over(run, [name for name in self._recorded(run) if self._written.get(name) != run.step])

    def _recorded(self, run: Run) -> list[str]:
        return [name for name in run.trace if run.trace.last_step(name) == run.step]

    def _hand_over(self, run: Run, names: list[str]) -> None:
        values: dict[str, float] = {}
        for name in names:
            latest = run.trace.recent(name, 1)[0]
            if latest.dim():
                values.update({f"{name}/{index}": value for index, value in enumerate(latest.tolist())})
            else:
                values[name] = float(latest)
            self._written[name] = run.step
        if values:
            self.write(values, run.step)
