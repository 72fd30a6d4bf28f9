"""Optimisers for training loops of one's own."""

from posterity.optim.ivon import IVON

__all__ = ["IVON"]
