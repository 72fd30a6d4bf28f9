"""The option --executor: where the many fits of a command run."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posterity.options import check, option, refused

if TYPE_CHECKING:
    from posterity.inference import Executor

IN_TURN, PROCESSES, RAY = WORDS = ("in-turn", "processes", "ray")


def executor_option(usual: str, panel: str) -> Any:
    """Return the field of --executor, on which no result depends; `usual` describes its default."""
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
    """Where a verb with many fits runs them."""

    executor: str | None = executor_option(IN_TURN, "Method")

    def __post_init__(self) -> None:
        check(self)


def executor_named(
    word: str | None, jobs: int | None = None, threads: int | None = None, gpus: float = 0.0
) -> "Executor":
    """Return the executor of this name, with `jobs` fits at a time (None: one for each core).

    Without a name it is `processes` if `jobs` is above 1, else `in-turn`. Each fit has `threads` threads; None: as many
    as this process. On a cluster each fit reserves `gpus`.
    """
    from posterity.inference import Processes, Ray, Sequential

    word = word or (PROCESSES if (jobs or 1) > 1 else IN_TURN)
    if word == IN_TURN:
        return Sequential()
    if word == PROCESSES:
        return Processes(jobs or os.cpu_count() or 1, threads=threads)
    return Ray(None if word == RAY else word, workers=jobs, gpus=gpus, threads=threads)
