"""Logistic regression by MAP, Gaussians, Markov chains and exact inference: figures and numbers in a folder.

Example: posterity study logistic --out results/logistic
"""
