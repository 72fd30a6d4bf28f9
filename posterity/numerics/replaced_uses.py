"""Operations on weights that are replaced by others while a network runs."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_OPERATIONS: dict[Any, int] = {functional.linear: -1, functional.conv1d: 1, functional.conv2d: 1}  # axis of channels

Operation = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Replacement = Callable[[Operation, int, Tensor, Tensor, Tensor | None, tuple[str | None, str | None]], Tensor]


class ReplacedUses(TorchFunctionMode):
    """Calls `replacement` in the place of every linear map or convolution by a tracked tensor inside `with`.

    The replacement gets the operation as a function of source, weight and bias, the axis of its channels, those three,
    and the names of weight and bias (None for one that is not tracked). The tensors must be the very objects that the
    operations get; any other operation that makes a tensor of one is refused by a RuntimeError.

    >>> import torch
    >>> weight = torch.ones(1, 2)
    >>> def doubled(operation, axis, source, weight, bias, names):
    ...     return 2 * operation(source, weight, bias)
    >>> with ReplacedUses({"weight": weight}, doubled):
    ...     print(functional.linear(torch.ones(1, 2), weight))
    tensor([[4.]])
    """

    def __init__(self, tensors: Mapping[str, Tensor], replacement: Replacement) -> None:
        """Track these tensors."""
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._alive = dict(tensors)  # an id is one tensor's only as long as that lives
        self._replacement = replacement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = [self._names[id(value)] for value in (*args, *kwargs.values()) if id(value) in self._names]
        if not touched:
            return func(*args, **kwargs)
        if func in _OPERATIONS:
            return self._replaced(func, *args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            raise RuntimeError(
                f"'{touched[0]}' goes through {getattr(func, '__name__', func)} in this pass, though not in the one "
                "that was looked at first. Use WeightSampling, which takes every network."
            )
        return result

    def _replaced(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any
    ) -> Tensor:
        def operation(source: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            made: Tensor = func(source, weight, bias, *rest, **named)
            return made

        names = self._names.get(id(weight)), None if bias is None else self._names.get(id(bias))
        return self._replacement(operation, _OPERATIONS[func], input, weight, bias, names)
