"""The factors of a penalty in the layers of a network, for `posterity penalty --net`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from posterity.cli.verbs.penalty.words import parse_edge, parse_network, parse_rule
from posterity.errors import positive_whole
from posterity.numerics.random import Key
from posterity.penalties import Penalty, SquaredL2, lambda_theory, layer_factors, param_groups, usual_factors
from posterity.penalties.training import penalised
from posterity.priors import EdgeOfChaos
from posterity.theory import Signals, signal_propagation


class Layer(NamedTuple):
    """A weight tensor with its factors; `trained` is weight_decay or the factor of r, None without rows."""

    name: str
    shape: tuple[int, ...]
    fan_in: int
    variance: float
    factor: float
    usual: float
    trained: float | None


@dataclass(frozen=True)
class Layers:
    """The weights of a network under a penalty and a rule."""

    penalty: Penalty
    net: str
    rule: str
    rows: int | None
    layers: tuple[Layer, ...]

    @property
    def _decays(self) -> bool:
        return isinstance(self.penalty, SquaredL2)

    @property
    def columns(self) -> tuple[str, ...]:
        """Headings of the columns of numbers."""
        trained = () if self.rows is None else ("weight_decay" if self._decays else "factor of r",)
        return ("shape", "fan-in", "variance", "lambda_l", "usual", *trained)

    def headline(self) -> str:
        """Return the title of the table."""
        return f"{self.net}: lambda_l of r = {self.penalty} with the prior variances of {self.rule}"

    def cells(self) -> Iterator[tuple[str, ...]]:
        """The rows of the table."""
        for layer in self.layers:
            numbers = (layer.variance, layer.factor, layer.usual, layer.trained)
            shape = "x".join(map(str, layer.shape))
            yield (layer.name, shape, str(layer.fan_in), *(f"{value:.4g}" for value in numbers if value is not None))

    def notes(self) -> Iterator[str]:
        """Yield remarks on how to use the numbers."""
        if self.rows is None:
            yield "Give --rows N for lambda_Th = 1/N and what to set in an optimiser."
            return
        name = "weight_decay = 2 lambda_Th lambda_l" if self._decays else "factor of r = lambda_Th lambda_l"
        use = "of SGD or Adam" if self._decays else "in the loss, or of a proximal step"
        yield (
            f"lambda_Th = 1/{self.rows} = {lambda_theory(self.rows):.4g} beside a mean of -log p over rows; "
            f"{name}, {use}."
        )

    def document(self) -> dict[str, Any]:
        """Return the results as JSON."""
        trained = "weight_decay" if self._decays else "factor"
        return {
            "net": self.net,
            "rule": self.rule,
            "rows": self.rows,
            "lambda_theory": None if self.rows is None else lambda_theory(self.rows),
            "layers": [
                {
                    "name": layer.name,
                    "shape": list(layer.shape),
                    "fan_in": layer.fan_in,
                    "variance": layer.variance,
                    "lambda": layer.factor,
                    "usual_lambda": layer.usual,
                    trained: layer.trained,
                }
                for layer in self.layers
            ],
        }


def layers_of(penalty: Penalty, net: str, rule: str, rows: int | None) -> Layers:
    """Return the factors by layer of a penalty (itself without a factor), for a network and a rule by name."""
    if rows is not None:
        positive_whole("--rows", rows)
    module, scales = parse_network(net), parse_rule(rule)
    factors, usual = layer_factors(module, penalty, scales), usual_factors(module, penalty)
    trained: dict[str, float] = {}
    if rows is not None:
        for group in param_groups(module, penalty, rows, factors):
            trained |= dict.fromkeys(group["names"], group["weight_decay"] or group["factor"])
    return Layers(
        penalty,
        net,
        rule,
        rows,
        tuple(
            Layer(
                name,
                tuple(weight.parameter.shape),
                weight.fan_in,
                scales.variance(weight.fan_in, weight.fan_out),
                factors[name],
                usual[name],
                trained.get(name),
            )
            for name, weight in penalised(module).items()
        ),
    )


DEPTH, WIDTH, NETWORKS = 30, 300, 5
SIDES = {"below": 0.7, "at the edge": 1.0, "above": 1.4}  # times sigma_w^2


@dataclass(frozen=True)
class Edges:
    """Signals of several networks for weight variances below, at and above the edge of chaos."""

    rule: EdgeOfChaos
    runs: dict[str, list[Signals]]

    columns = ("sigma_w^2", "q at the end", "in theory", "c at the end", "in theory")

    def headline(self) -> str:
        """Return the edge of chaos in a line."""
        keeps = "keeps any q" if math.isnan(self.rule.q_star) else f"q* = {self.rule.q_star:.6g}"
        return (
            f"{self.rule.activation}, biases of variance {self.rule.bias_variance:g}: on the edge of chaos "
            f"sigma_w^2 = {self.rule.weight_variance:.6g}, {keeps}"
        )

    def cells(self) -> Iterator[tuple[str, ...]]:
        """The rows of the table."""
        for side, several in self.runs.items():
            means = (
                float(torch.stack([getattr(signals, part)[-1] for signals in several]).mean())
                for part in ("variance", "mean_field_variance", "correlation", "mean_field_correlation")
            )
            yield (side, f"{SIDES[side] * self.rule.weight_variance:.4g}", *(f"{value:.4g}" for value in means))

    def note(self) -> str:
        """Return a remark on how the numbers were made."""
        return (
            f"Two inputs with q = 1 and c = 0.5 through {DEPTH} layers of {WIDTH}: means over {NETWORKS} networks of "
            "weights N(0, sigma_w^2 / fan-in). On the edge signals change slowest; beside it q or c go exponentially."
        )

    def draw(self, path: Path) -> None:
        """Draw q and c by layer."""
        from posterity.report.penalties import signals_figure

        runs = {
            rf"{side}, $\sigma_w^2$ = {SIDES[side] * self.rule.weight_variance:.3g}": several
            for side, several in self.runs.items()
        }
        title = f"{self.rule.activation}: dots are means of {NETWORKS} networks of width {WIDTH}, lines infinite width"
        signals_figure(runs, path, title=title)

    def document(self) -> dict[str, Any]:
        """Return the results as JSON."""
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
                    "variance": torch.stack([signals.variance for signals in several]).mean(0).tolist(),
                    "correlation": torch.stack([signals.correlation for signals in several]).mean(0).tolist(),
                    "mean_field_variance": several[0].mean_field_variance.tolist(),
                    "mean_field_correlation": several[0].mean_field_correlation.tolist(),
                }
                for side, several in self.runs.items()
            ],
        }


def edge(text: str) -> Edges:
    """Simulate signals of random networks around the edge of chaos of ACTIVATION or ACTIVATION,BIAS_VARIANCE."""
    rule = parse_edge("--edge-of-chaos", text)
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
