"""Collapse of wide networks to their prior at eta = 1, and its absence at eta = tau p/N: slopes against theory.

Example: posterity study collapse --out results/collapse
"""
