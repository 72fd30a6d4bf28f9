"""How a network uses its weights, and the derivatives of each use in factors.

A layer type belongs here. Sums over data are in `curvature`.
"""
