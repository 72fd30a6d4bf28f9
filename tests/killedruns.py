"""Runs that end as if they were killed."""

from posterity.inference import Callback, Run


class KilledError(Exception):
    """What ends them."""


class KillAfter(Callback):
    """Ends the run as a kill would: after the step, before it is stored."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Run) -> None:
        if run.step == self.step:
            raise KilledError
