"""The releases that are recorded, and what of each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from releases.added import ADDED_CASES, ADDED_COMMANDS, ADDED_TABLE, CONFORMAL, ESTIMATORS, STOPPED_ADDED, Estimator
from releases.cases import ASKED, CASES, COMMANDS, SPELLED_OUT, STOPPED, TABLE, Case, Stopped
from releases.observed import machine


@dataclass(frozen=True)
class Release:
    """What is recorded under the name of a release.

    `again` are the commands that now mean what they meant then, `begun` those that were also interrupted after two
    checkpoints, and `asking` has options with which the run of a command is asked.
    """

    name: str
    cases: Mapping[str, Case]
    stopped: Mapping[str, Stopped]
    table: str
    commands: Mapping[str, tuple[str, ...]]
    again: tuple[str, ...]
    begun: tuple[str, ...]
    asking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    estimators: Mapping[str, tuple[Estimator, Any]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(__file__).parent / self.name

    @cached_property
    def exact(self) -> bool:
        """Whether numbers must be those that were recorded, to the bit."""
        manifest = json.loads((self.folder / "manifest.json").read_text())
        return all(manifest[name] == value for name, value in machine().items())

    def asked(self, what: str, name: str) -> tuple[str, ...]:
        """The words that ask for the predictions or the scores of the run of a command."""
        return (*ASKED[what], name, *self.asking.get(name, ()))


FIRST = Release("0.1.0", CASES, STOPPED, TABLE, COMMANDS, tuple(SPELLED_OUT), tuple(COMMANDS))
SECOND = Release(
    "0.2.0",
    ADDED_CASES,
    STOPPED_ADDED,
    ADDED_TABLE,
    ADDED_COMMANDS,
    tuple(ADDED_COMMANDS),
    ("laplace", "folds"),
    CONFORMAL,
    ESTIMATORS,
)
RELEASES = {release.name: release for release in (FIRST, SECOND)}
