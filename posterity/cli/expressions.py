"""Penalties that somebody writes as a formula of mu and sigma. It is parsed and never run as Python."""

import ast
import warnings
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from posterity.errors import shown, unknown

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
    """The function that a formula of mu and sigma is: numbers, pi, + - * / ^ and the functions of `FUNCTIONS`.

    A ValueError where it is none, or does not depend on mu.

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
    """The node as a function of mu and sigma."""
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
