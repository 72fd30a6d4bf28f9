"""Standard UCI regression splits: RMSE and NLL beside published ones; resumes after an interruption.

Example: posterity study uci --datasets energy --methods map,laplace --splits 3
"""
