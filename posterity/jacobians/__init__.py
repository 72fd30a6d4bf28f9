"""Uses of weights in a network and their derivatives in factors.

Sums over data are in `curvature`.
"""
