"""Accuracy, NLL, calibration and more against the temperature of the ELBO; resumes after an interruption.

Example: posterity study temperature --data two-moons --widths 50,200 --taus 1e-3:1:4 --steps 500
"""
