"""Jacobians of network outputs in the weights, held in factors, with a rule for each type of layer.

Rules for a layer type belong here; sums over data are in `curvature`.
"""
