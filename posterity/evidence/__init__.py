"""Evidence: log p(D) and its bounds."""

from posterity.evidence.laplace_evidence import laplace_evidence

__all__ = ["laplace_evidence"]
