"""EM and its bound on two clusters, labels, restarts, numbers of components, and the prior of a network.

Example: posterity study mixtures --seed 1
"""
