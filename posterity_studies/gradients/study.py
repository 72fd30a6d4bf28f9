"""The study as a whole, and its numbers as one document."""

from dataclasses import asdict, dataclass
from typing import Any

from posterity_studies.gradients import example, network


@dataclass(frozen=True)
class Study:
    """Variances of gradients: of one weight against exact values, and of a small network."""

    seed: int
    example: tuple[example.Row, ...]
    network: tuple[network.Row, ...]

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        return {
            "seed": self.seed,
            "variances_are": "of one estimate times the passes through the data that it takes",
            "one_weight": {
                "q": {"mean": example.MEAN, "scale": example.SCALE},
                "samples": example.SAMPLES,
                "estimators": [asdict(row) for row in self.example],
            },
            "network": {
                "sizes": [2, network.HIDDEN, 2],
                "rows": network.ROWS,
                "repeats": network.REPEATS,
                "estimators": [asdict(row) for row in self.network],
            },
        }


def gradients(seed: int = 0) -> Study:
    """Run the study; `seed` fixes everything random."""
    return Study(seed, tuple(example.example(seed)), tuple(network.network(seed)))
