"""A terminal on which tables keep their numbers where it is narrow."""

from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_ANY = 10_000  # columns


class Terminal(Console):
    """A console whose tables have lines longer than the terminal's rather than numbers cut short."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, with room for the longest words of tables."""
        own, wide = self.width, self.options.update(width=_ANY)
        tables = [one for one in objects if isinstance(one, Table)]
        least = max((Measurement.get(self, wide, table).minimum for table in tables), default=0)
        if least <= own:
            super().print(*objects, **options)
            return
        self.width = least
        try:
            super().print(*objects, **options)
        finally:
            self.width = own
