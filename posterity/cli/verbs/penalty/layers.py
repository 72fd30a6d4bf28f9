"""The factors of a penalty in the layers of a network, as `posterity penalty --net` tells them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from posterity.cli.verbs.penalty.words import asked_network, asked_rule
from posterity.errors import positive_whole
from posterity.penalties import Penalty, SquaredL2, lambda_theory, layer_factors, param_groups, usual_factors
from posterity.penalties.factors import penalised


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
        """Headings after that of the names."""
        trained = () if self.rows is None else ("weight_decay" if self._decays else "factor of r",)
        return ("shape", "fan-in", "variance", "lambda_l", "usual", *trained)

    def headline(self) -> str:
        """What the table is of."""
        return f"{self.net}: lambda_l of r = {self.penalty} with the prior variances of {self.rule}"

    def cells(self) -> Iterator[tuple[str, ...]]:
        """The rows of the table."""
        for layer in self.layers:
            numbers = (layer.variance, layer.factor, layer.usual, layer.trained)
            shape = "x".join(map(str, layer.shape))
            yield (layer.name, shape, str(layer.fan_in), *(f"{value:.4g}" for value in numbers if value is not None))

    def notes(self) -> Iterator[str]:
        """What to do with the numbers."""
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
        """All of it for JSON."""
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
    """The factors by layer of a penalty (without a factor of its own) for a network and a rule by name."""
    if rows is not None:
        positive_whole("--rows", rows)
    module, scales = asked_network(net), asked_rule(rule)
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
