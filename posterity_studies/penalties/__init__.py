"""Accuracy against lambda for penalties with Bayesian and usual layer factors; goes on where it was interrupted.

Example: posterity study penalties --penalties l2,rows --seeds 1 --rows 5000
"""
