"""Where backward passes at one place in memory find weights and leave gradients."""

from dataclasses import dataclass

from torch import Tensor

from posterity.model.network import Network

_KEPT = 4  # a step uses one pair of places or two


@dataclass(frozen=True, eq=False)
class Seat:
    """The weights as leaves of a graph, whose gradients are views into one flat vector: backward adds to it in place.

    Takes the network, theta (T,) of its weights and the likelihood's learnt parameters behind them, and a vector (T,)
    for the gradient, both contiguous.
    """

    leaves: list[Tensor]
    raw: Tensor

    @classmethod
    def at(cls, network: Network, theta: Tensor, grad: Tensor) -> "Seat":
        """Leaves that share the memory of theta, with gradients in that of `grad`."""
        size = network.layout.size
        flat = theta.detach()
        leaves, raw = network.views(flat[:size]), flat[size:]
        for leaf, place in zip([*leaves, raw], [*network.views(grad[:size]), grad[size:]], strict=True):
            leaf.requires_grad_().grad = place
        return cls(leaves, raw)


class Seats:
    """The seats last used: steps that write into the same memory each time find theirs made."""

    def __init__(self) -> None:
        """None yet."""
        self._kept: dict[tuple[int, int], Seat] = {}

    def __reduce__(self) -> tuple[type["Seats"], tuple[()]]:
        return Seats, ()  # they belong to the memory of this process

    def at(self, network: Network, theta: Tensor, grad: Tensor) -> Seat:
        """The seat of theta and `grad` (T,). A kept one holds on to its memory, so its address is nobody else's."""
        place = theta.data_ptr(), grad.data_ptr()
        seat = self._kept.get(place)
        if seat is None or seat.raw.shape[0] + network.layout.size != theta.shape[0]:
            seat = Seat.at(network, theta, grad)
            for old in [*self._kept][: 1 - _KEPT]:
                self._kept.pop(old, None)  # another thread may have
            self._kept[place] = seat
        return seat
