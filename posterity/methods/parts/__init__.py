"""Machinery that several methods share: chains, gradients of bounds, Gaussians at modes, E-steps.

An algorithm that a user can name belongs one folder up.
"""
