"""Standard UCI regression splits: RMSE and NLL beside published ones; goes on where it was interrupted.

Example: posterity study uci --datasets energy --methods map,laplace --splits 3
"""
