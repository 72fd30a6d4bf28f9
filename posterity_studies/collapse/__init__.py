"""How wide networks fall back to their prior at eta = 1, and do not at eta = tau p/N: slopes against theory.

Example: posterity study collapse --out results/collapse
"""
