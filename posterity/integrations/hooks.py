"""What callbacks for trainers of other packages share: a late base class, the problem, and draws of IVON."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, ClassVar, Self

from torch import nn

from posterity.errors import PosterityError, shown
from posterity.model.joint import Joint
from posterity.optim.ivon import IVON
from posterity.posteriors.posterior import Posterior

logger = logging.getLogger("posterity")

AsNetwork = Callable[[nn.Module], nn.Module]
AsProblem = Callable[[nn.Module], Joint]


class Hooks:
    """The base of callbacks that leave a posterior behind.

    An instance also derives from `base`, the other package's class of callbacks, which is imported only then.
    `problem` makes the joint of `network(module)` (None: of the module); weights are matched by their names there.
    """

    base: ClassVar[tuple[str, str]]  # module and class; the extra that installs them has the package's name

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made: Self = object.__new__(_with_base(cls))
        return made

    def __init__(self, problem: AsProblem, network: AsNetwork | None) -> None:
        for name, value in {"problem": problem, "network": network}.items():
            left_out = value is None and name == "network"
            if isinstance(value, (Joint, nn.Module)) or not (callable(value) or left_out):
                raise TypeError(
                    f"{self.name}.{name} must be a function of the module, called at the end of training. Got "
                    f"{shown(value)}. Write lambda module: po.Joint(module, likelihood, prior, num_data)."
                )
        self._problem, self._network = problem, network
        self._posterior: Posterior | str = f"{self.name}.posterior is made at the end of training. Train first."

    @property
    def name(self) -> str:
        """The name of the class, for messages."""
        return type(self).__name__

    @property
    def posterior(self) -> Any:
        """The posterior of the trained module; raises a ValueError before there is one."""
        if isinstance(self._posterior, str):
            raise ValueError(self._posterior)
        return self._posterior

    def network(self, module: nn.Module) -> nn.Module:
        """Return the network of this module, with the module's own weights."""
        return module if self._network is None else self._network(module)

    def joint(self, module: nn.Module) -> Joint:
        """Return the problem of this module with its present weights; raises an error if it is none."""
        joint: object = self._problem(self.network(module))
        if not isinstance(joint, Joint):
            raise TypeError(f"{self.name}.problem must return a Joint. Got {shown(joint)}.")
        return joint


def _with_base(kind: type[Hooks]) -> Any:
    module, name = kind.base
    package = module.partition(".")[0]
    try:
        base = getattr(import_module(module), name)
    except ImportError as error:
        raise PosterityError(
            f"{kind.__name__} needs {package}. Install it with: pip install 'posterity[{package}]'."
        ) from error
    if issubclass(kind, base):  # an instance is copied
        return kind
    return type(kind.__name__, (kind, base), {"__doc__": kind.__doc__, "__module__": kind.__module__})


class _Uncounted(Exception):
    """Leaves a context of IVON without counting its sample."""


class Draw:
    """A draw of IVON's weights that one hook begins and another ends."""

    def __init__(self) -> None:
        self._optimizer: IVON | None = None
        self._context: AbstractContextManager[None] | None = None

    def begin(self, optimizer: IVON) -> None:
        """Move the weights to a draw of q."""
        context = optimizer.sampled_params(train=True)
        context.__enter__()
        self._optimizer, self._context = optimizer, context

    def end(self) -> None:
        """Put the means back, and let the gradients count in the next step."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def drop(self, *, keep_gradients: bool = False) -> None:
        """Put the means back without counting a sample, so that the next draw before a step is this one again."""
        context, self._context = self._context, None
        if context is None or self._optimizer is None:
            return
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        context.__exit__(_Uncounted, _Uncounted(), None)  # clears the gradients
        if keep_gradients:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient


def ivon_of(owner: str, optimizer: object, remedy: str) -> IVON:
    """Return the optimiser if it is IVON; raises a TypeError that says what to do if not."""
    if not isinstance(optimizer, IVON):
        raise TypeError(
            f"{owner}: the optimizer must be posterity.optim.IVON. Got {type(optimizer).__name__}. {remedy}"
        )
    return optimizer


def warn_of_clipping(owner: str, norm: float | None, remedy: str) -> None:
    """Log a warning where the trainer clips gradients, of which IVON learns its Hessian."""
    if norm:
        logger.warning(
            "%s: gradients are clipped to %g, and so the Hessian is too small and the posterior too wide wherever that "
            "acts. Use %s, and IVON(..., clip_radius=...) against long steps.",
            owner,
            norm,
            remedy,
        )
