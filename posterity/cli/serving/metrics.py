"""Counts and times of a server, as text for Prometheus."""

from bisect import bisect_left
from collections import Counter

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the buckets of request times, in seconds."""


class Metrics:
    """Counts of a server since its start, in memory that does not grow with the requests."""

    def __init__(self) -> None:
        """Start at zero."""
        self.requests: Counter[tuple[str, int]] = Counter()
        self.rows = 0
        self.in_flight = 0
        self._buckets = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.requests[path, status] += 1
        self._buckets[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds

    def text(self, passes: int) -> str:
        """Return the metrics in the text format of Prometheus."""
        lines = [
            "# HELP posterity_requests_total Answers by path and status.",
            "# TYPE posterity_requests_total counter",
        ]
        lines += [
            f'posterity_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        lines += _single("rows_total", "counter", "Rows predicted.", self.rows)
        lines += _single("passes_total", "counter", "Forward passes.", passes)
        lines += _single("requests_in_flight", "gauge", "Requests under way.", self.in_flight)
        name = "posterity_request_seconds"
        lines += [f"# HELP {name} Seconds from the head of a request to its answer.", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        lines += [f"{name}_sum {self._seconds:.6f}", f"{name}_count {total}"]
        return "\n".join(lines) + "\n"


def _single(name: str, kind: str, about: str, value: int) -> list[str]:
    return [f"# HELP posterity_{name} {about}", f"# TYPE posterity_{name} {kind}", f"posterity_{name} {value}"]
