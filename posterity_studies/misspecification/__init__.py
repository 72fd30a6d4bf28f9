"""Tempered posteriors of linear and logistic regression, well specified and not: expected NLL without sampling.

Example: posterity study misspecification --seed 1
"""
