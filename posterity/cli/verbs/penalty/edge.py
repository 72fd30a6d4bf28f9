"""Signals in deep random networks on the edge of chaos and beside it, as `posterity penalty --edge-of-chaos` tells."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posterity.cli.verbs.penalty.words import asked_edge
from posterity.numerics.random import Key
from posterity.priors import EdgeOfChaos
from posterity.theory import Signals, signal_propagation

DEPTH, WIDTH, NETWORKS = 30, 300, 5
SIDES = {"below": 0.7, "at the edge": 1.0, "above": 1.4}  # times sigma_w^2


@dataclass(frozen=True)
class Edges:
    """Signals of several networks by the place of their weights: below, at and above the edge."""

    rule: EdgeOfChaos
    runs: dict[str, list[Signals]]

    columns = ("sigma_w^2", "q at the end", "in theory", "c at the end", "in theory")

    def headline(self) -> str:
        """The edge in a line."""
        keeps = "keeps any q" if math.isnan(self.rule.q_star) else f"q* = {self.rule.q_star:.6g}"
        return (
            f"{self.rule.activation}, biases of variance {self.rule.bias_variance:g}: on the edge of chaos "
            f"sigma_w^2 = {self.rule.weight_variance:.6g}, {keeps}"
        )

    def cells(self) -> Iterator[tuple[str, ...]]:
        """The rows of the table."""
        for side, several in self.runs.items():
            found = (
                float(torch.stack([getattr(one, part)[-1] for one in several]).mean())
                for part in ("variance", "mean_field_variance", "correlation", "mean_field_correlation")
            )
            yield (side, f"{SIDES[side] * self.rule.weight_variance:.4g}", *(f"{value:.4g}" for value in found))

    def note(self) -> str:
        """How the numbers were made."""
        return (
            f"Two inputs with q = 1 and c = 0.5 through {DEPTH} layers of {WIDTH}: means over {NETWORKS} networks of "
            "weights N(0, sigma_w^2 / fan-in). On the edge signals change slowest; beside it q or c go exponentially."
        )

    def draw(self, path: Path) -> None:
        """q and c by layer."""
        from posterity.report.penalties import signals_figure

        runs = {
            rf"{side}, $\sigma_w^2$ = {SIDES[side] * self.rule.weight_variance:.3g}": several
            for side, several in self.runs.items()
        }
        title = f"{self.rule.activation}: dots are means of {NETWORKS} networks of width {WIDTH}, lines infinite width"
        signals_figure(runs, path, title=title)

    def document(self) -> dict[str, Any]:
        """All of it for JSON."""
        q_star = self.rule.q_star
        return {
            "activation": self.rule.activation,
            "bias_variance": self.rule.bias_variance,
            "weight_variance": self.rule.weight_variance,
            "q_star": None if math.isnan(q_star) else q_star,
            "depth": DEPTH,
            "width": WIDTH,
            "networks": NETWORKS,
            "signals": [
                {
                    "side": side,
                    "weight_variance": SIDES[side] * self.rule.weight_variance,
                    "variance": torch.stack([one.variance for one in several]).mean(0).tolist(),
                    "correlation": torch.stack([one.correlation for one in several]).mean(0).tolist(),
                    "mean_field_variance": several[0].mean_field_variance.tolist(),
                    "mean_field_correlation": several[0].mean_field_correlation.tolist(),
                }
                for side, several in self.runs.items()
            ],
        }


def edge(text: str) -> Edges:
    """Signals of random networks around the edge of chaos of ACTIVATION or ACTIVATION,BIAS_VARIANCE."""
    rule = asked_edge("--edge-of-chaos", text)
    assert isinstance(rule.activation, str)
    runs = {
        side: [
            signal_propagation(
                rule.activation,
                times * rule.weight_variance,
                rule.bias_variance,
                width=WIDTH,
                depth=DEPTH,
                key=Key(network),
            )
            for network in range(NETWORKS)
        ]
        for side, times in SIDES.items()
    }
    return Edges(rule, runs)
