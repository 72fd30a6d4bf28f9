"""Logistic regression by MAP, Laplace, variational and exact inference: figures and numbers in a folder.

Example: posterity study logistic --out results/logistic
"""
