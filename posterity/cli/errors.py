"""Wrong use of the command line."""

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """An option or argument that cannot be used as given; exit code 2. The hint is a note of the exception.

    Not a `PosterityError`, whose module needs torch.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str) -> None:
        """Take what is wrong, and what to do about it."""
        super().__init__(message)
        self.add_note(hint)


@contextmanager
def option_values(verb: str) -> Iterator[None]:
    """Turn what the library says of a bad value into a `UsageError` of the command `verb`; leave its own errors."""
    from posterity.errors import PosterityError

    try:
        yield
    except PosterityError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(str(error), f"'posterity {verb} --help' lists the options and their values.") from error
