"""Published accuracies of the authors of the penalties."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Published:
    """Test accuracies in per cent at the best lambda and at lambda_Th, and log10 of lambda_Th / lambda*."""

    best: float
    at_theory: float | None = None
    log_ratio: float | None = None

    def difference(self, best: float, at_theory: float | None) -> dict[str, float | None]:
        """Return accuracies in per cent minus the published ones."""
        theory = None if self.at_theory is None or at_theory is None else at_theory - self.at_theory
        return {"best": best - self.best, "at_theory": theory}


def _rows(
    net: str,
    usual: tuple[float, ...],
    best: tuple[float, ...],
    at_theory: tuple[float, ...],
    log_ratios: tuple[float, ...],
) -> dict[tuple[str, str, str], Published]:
    names = ("l2", "l1", "rows", "columns")
    results = {(net, "usual", name): Published(accuracy) for name, accuracy in zip(names, usual, strict=True)}
    rows = zip(names, best, at_theory, log_ratios, strict=True)
    return results | {(net, "bayesian", name): Published(*numbers) for name, *numbers in rows}


# By network, setup and penalty, from slides on Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian
# priors and penalties in variational inference. They name no data set; that of the paper is CIFAR-10.
PUBLISHED: Mapping[tuple[str, str, str], Published] = MappingProxyType(
    {
        **_rows(
            "cvnn",
            (88.00, 88.36, 88.43, 88.04),
            (88.69, 88.41, 88.67, 88.32),
            (88.25, 87.48, 87.45, 85.49),
            (0.5, 1.0, 2.0, 1.5),
        ),
        **_rows(
            "vgg19",
            (93.35, 93.17, 92.78, 93.37),
            (93.48, 92.89, 92.35, 93.03),
            (93.28, 92.74, 92.24, 92.85),
            (1.0, 1.0, 2.0, 1.0),
        ),
    }
)
