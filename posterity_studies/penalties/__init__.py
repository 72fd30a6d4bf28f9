"""Accuracy against lambda for penalties with Bayesian and usual layer factors; resumes after an interruption.

Example: posterity study penalties --penalties l2,rows --seeds 1 --rows 5000
"""
