"""Simulation-based calibration: ranks of true values among posterior draws, all replicates in one batch.

Example: posterity study calibration --models linear --methods nuts,laplace --replicates 200
"""
