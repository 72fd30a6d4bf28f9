"""The option --executor: where the many fits of a command run."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posterity.options import check, option, refused

if TYPE_CHECKING:
    from posterity.inference import Executor

IN_TURN, PROCESSES, RAY = WORDS = ("in-turn", "processes", "ray")


def executor_option(usual: str, panel: str) -> Any:
    """The option --executor, on which no number depends; `usual` says what stands for it where it is left out."""
    return option(
        None,
        help=f"Where fits run: {', '.join(WORDS)} (a cluster on this machine), or ray://HOST:PORT.",
        unit="NAME",
        check=_check,
        usual=usual,
        panel=panel,
        identity=False,
    )


def _check(name: str, word: str) -> None:
    if word not in WORDS and not (word.startswith("ray://") and word.removeprefix("ray://")):
        raise refused(
            f"{name} must be {', '.join(WORDS)}, or an address as ray://HOST:PORT. Got '{word}'.",
            "ray starts a cluster on this machine, or joins the one that RAY_ADDRESS names.",
        )


@dataclass(frozen=True)
class ExecutorOption:
    """Where the fits of a verb run that fits many."""

    executor: str | None = executor_option(IN_TURN, "Method")

    def __post_init__(self) -> None:
        check(self)


def executor_named(
    word: str | None, jobs: int | None = None, threads: int | None = None, gpus: float = 0.0
) -> "Executor":
    """The executor of `jobs` fits at a time, or of one for each core; None is `processes` where `jobs` is above 1.

    Each fit has `threads` threads; None is as many as this process has. On a cluster each fit reserves `gpus`.
    """
    from posterity.inference import Processes, Ray, Sequential

    word = word or (PROCESSES if (jobs or 1) > 1 else IN_TURN)
    if word == IN_TURN:
        return Sequential()
    if word == PROCESSES:
        return Processes(jobs or os.cpu_count() or 1, threads=threads)
    return Ray(None if word == RAY else word, workers=jobs, gpus=gpus, threads=threads)
