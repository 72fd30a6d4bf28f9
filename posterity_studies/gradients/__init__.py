"""Variances of gradient estimators, for one weight against exact values and for a small network.

Example: posterity study gradients --seed 1
"""
