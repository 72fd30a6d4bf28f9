"""Prior and noise by variational EM, without held-out rows, against the best of 49 pairs on the test rows.

Example: posterity study hyperparameters --datasets energy --splits 3
"""
