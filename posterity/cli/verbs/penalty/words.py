"""Penalties by name and as formulas, which are parsed and never run."""

import ast
import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from posterity import penalties as pen
from posterity.errors import positive, positive_whole, shown, unknown
from posterity.networks import MLP, VGG, ConvNet, LeNet, ResNet
from posterity.priors import (
    Cauchy,
    EdgeOfChaos,
    FanIn,
    Glorot,
    GroupLasso,
    He,
    Horseshoe,
    Laplace,
    Logistic,
    Normal,
    Prior,
    ScaleRule,
    StudentT,
)

Value = Callable[[Tensor, Tensor], Tensor]
NAMES = ("mu", "sigma")
FUNCTIONS = ("abs", "cos", "exp", "log", "sin", "sqrt", "tanh")
_OPERATIONS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "true_divide", ast.Pow: "pow"}
_LONGEST = 500  # characters: a formula for people, which no stack is too small for


class Expression(NamedTuple):
    """A formula as a function of two tensors of one shape, and which of the two it uses; a sum is in brackets."""

    text: str
    value: Value
    uses: frozenset[str]


def expression(text: str) -> Expression:
    """Parse a formula of mu and sigma: numbers, pi, + - * / ^ and the functions of `FUNCTIONS`.

    Raises a ValueError for any other text, and for a formula without mu.

    >>> quartic = expression("mu^4 + sigma / 2")
    >>> quartic.value(torch.tensor([2.0]), torch.tensor([1.0])), sorted(quartic.uses)
    (tensor([16.5000]), ['mu', 'sigma'])
    """
    text = " ".join(text.split())
    if not text or len(text) > _LONGEST:
        _refuse(text, f"It must have between 1 and {_LONGEST} characters.")
    try:
        with warnings.catch_warnings():  # about literals, which Python only thinks odd
            warnings.simplefilter("ignore")
            tree = ast.parse(text.replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = (error.msg if isinstance(error, SyntaxError) else str(error)) or "nested too deeply"
        _refuse(text, f"Python's grammar says: {reason}. Write products with *, as 2*mu, and powers as mu^4.")
    uses = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) & frozenset(NAMES)
    value = _value(tree.body, text)
    if "mu" not in uses:
        _refuse(text, "It does not depend on mu, and a penalty must.")
    is_sum = isinstance(tree.body, ast.BinOp) and isinstance(tree.body.op, (ast.Add, ast.Sub))
    return Expression(f"({text})" if is_sum else text, value, uses)


def _value(node: ast.expr, text: str) -> Value:
    """Return the node as a function of mu and sigma."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _constant(node.value, text)  # type: ignore[arg-type]
    if isinstance(node, ast.Name) and node.id == "pi":
        return lambda mu, sigma: torch.full_like(mu, torch.pi)
    if isinstance(node, ast.Name) and node.id in NAMES:
        return (lambda mu, sigma: mu) if node.id == "mu" else (lambda mu, sigma: sigma)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inner, sign = _value(node.operand, text), -1.0 if isinstance(node.op, ast.USub) else 1.0
        return lambda mu, sigma: sign * inner(mu, sigma)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        operation = getattr(torch, _OPERATIONS[type(node.op)])
        left, right = _value(node.left, text), _value(node.right, text)
        return lambda mu, sigma: operation(left(mu, sigma), right(mu, sigma))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        if len(node.args) != 1 or node.keywords:
            _refuse(text, f"{node.func.id} takes one argument.")
        function, argument = getattr(torch, node.func.id), _value(node.args[0], text)
        return lambda mu, sigma: function(argument(mu, sigma))
    return _not_allowed(node, text)


def _constant(number: float, text: str) -> Value:
    try:
        value = float(number)
    except OverflowError:
        _refuse(text, "A number in it is too large.")
    return lambda mu, sigma: torch.full_like(mu, value)


def _not_allowed(node: ast.expr, text: str) -> NoReturn:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    name = node.func.id if called else node.id if isinstance(node, ast.Name) else None  # type: ignore[attr-defined]
    if name is not None and name not in FUNCTIONS:
        known = FUNCTIONS if called else (*NAMES, "pi")
        _refuse(text, unknown("function" if called else "name", name, known))
    _refuse(text, f"It may have numbers, mu, sigma, pi, + - * / ^ and {', '.join(FUNCTIONS)} of one argument.")


def _refuse(text: str, reason: str) -> NoReturn:
    raise ValueError(f"The penalty {shown(text)} is no formula of mu and sigma. {reason}")


PENALTIES: dict[str, pen.Penalty] = {
    "l2": pen.SquaredL2(),
    "l1": pen.L1(),
    "rows": pen.GroupLasso("rows"),
    "columns": pen.GroupLasso("columns"),
    "channels": pen.GroupLasso("channels"),
}
PRIORS: dict[str, tuple[int, Callable[..., Prior]]] = {  # by the count of numbers after the colon
    "normal": (1, Normal),
    "laplace": (1, Laplace),
    "student-t": (2, StudentT),
    "cauchy": (1, Cauchy),
    "logistic": (1, Logistic),
    "horseshoe": (1, Horseshoe),
    "rows": (1, lambda rate: GroupLasso(rate, "rows")),
    "columns": (1, lambda rate: GroupLasso(rate, "columns")),
    "channels": (1, lambda rate: GroupLasso(rate, "channels")),
}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lenet": LeNet,
    "cvnn": ConvNet,
    "vgg19": lambda: VGG(19),
    "resnet-20": lambda: ResNet(20),
}
RULES: dict[str, Callable[[], ScaleRule]] = {"fan-in": FanIn, "glorot": Glorot, "he": He}
Reader = Literal["dirac", "gaussian"]
_LEAST, _LARGEST = 1e-50, 1e50


class NamedPenalty(NamedTuple):
    """A penalty by name or formula, without and with its factor, and the default family that reads it."""

    kind: pen.Penalty
    penalty: pen.Penalty
    reader: Reader


def parse_penalty(text: str, factor: float) -> NamedPenalty:
    """Parse a penalty by name or formula, times its factor."""
    sized("--factor", factor)
    known = PENALTIES.get(text.strip().lower())
    if known is not None:
        return NamedPenalty(known, pen.Sum((known,), (factor,)), "dirac")
    if text.strip().isidentifier() and text.strip() != "mu":
        raise ValueError(f"{unknown('penalty', text.strip(), PENALTIES)} Or give a formula, as 'mu^4'.")
    formula = expression(text)
    kind = pen.Function(formula.value, formula.text)
    return NamedPenalty(kind, pen.Sum((kind,), (factor,)), "gaussian" if "sigma" in formula.uses else "dirac")


def parse_prior(text: str) -> Prior:
    """Parse a prior as NAME:NUMBERS."""
    name, colon, rest = text.strip().lower().partition(":")
    if name not in PRIORS:
        raise ValueError(unknown("prior", name, PRIORS))
    count, make = PRIORS[name]
    given = numbers("--prior", rest) if colon else ()
    if len(given) != count:
        wanted = "student-t:DEGREES,SCALE" if count == 2 else f"{name}:NUMBER"
        raise ValueError(f"--prior must be {wanted}. Got '{text}'.")
    for value in given:
        sized("--prior's number", value)
    return make(*given)


def parse_family(name: str | None, sigma: str | None, otherwise: Reader) -> pen.Family:
    """Parse the family that reads the penalty: points, or Gaussians of one sigma or of several."""
    if name is not None and name not in ("dirac", "gaussian"):
        raise ValueError(unknown("family", name, ("dirac", "gaussian")))
    reader = name or ("gaussian" if sigma is not None else otherwise)
    if reader == "dirac":
        if sigma is not None:
            raise ValueError("--sigma is for --family gaussian: points have no width. Leave one of them out.")
        return pen.Dirac()
    if sigma is None:
        return pen.Gaussian()
    scales = numbers("--sigma", sigma)
    for value in scales:
        sized("--sigma", value, "or several that differ")
    return pen.Gaussian(scales)


def parse_network(text: str) -> nn.Module:
    """Return the named network on the meta device: only shapes are needed."""
    name, _, rest = text.strip().lower().partition(":")
    with torch.device("meta"):
        if name == "mlp":
            sizes = whole_numbers("--net mlp", rest)
            return MLP(sizes)
        if name not in NETWORKS or rest:
            names = unknown("network", text, NETWORKS)
            raise ValueError(f"{names} Or mlp:784,300,10, with sizes from inputs to outputs.")
        return NETWORKS[name]()


def parse_rule(text: str) -> ScaleRule:
    """Parse the rule for prior variances."""
    name, _, rest = text.strip().lower().partition(":")
    if name == "edge-of-chaos":
        return parse_edge("--rule edge-of-chaos", rest)
    if name not in RULES or rest:
        raise ValueError(unknown("rule", text, (*RULES, "edge-of-chaos:tanh")))
    return RULES[name]()


def parse_edge(option: str, text: str) -> EdgeOfChaos:
    """Parse ACTIVATION or ACTIVATION,BIAS_VARIANCE as an edge of chaos."""
    name, _, rest = text.partition(",")
    if not name.strip():
        raise ValueError(f"{option} needs an activation, as tanh or relu. Got none.")
    given = numbers(option, rest) if rest else (0.0,)
    if len(given) != 1:
        raise ValueError(f"{option} takes an activation and one number, the variance of biases. Got '{text}'.")
    return EdgeOfChaos(name.strip(), given[0])


def parse_shape(text: str | None) -> tuple[int, ...]:
    """Parse the shape of a weight tensor."""
    return (10, 10) if text is None else whole_numbers("--shape", text)


def sized(option: str, value: float, alternative: str = "") -> None:
    """Raise a ValueError unless the square and the inverse of this positive number are representable."""
    positive(option, value, alternative)
    if not _LEAST <= value <= _LARGEST:
        raise ValueError(f"{option} must be between {_LEAST:g} and {_LARGEST:g}. Got {value:g}.")


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse positive whole numbers separated by commas."""
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option} needs whole numbers with commas between them. Got '{text}'.") from error
    for value in sizes:
        positive_whole(option, value)
    return sizes


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option} needs numbers with commas between them. Got '{text}'.") from error
