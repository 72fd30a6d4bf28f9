"""Accuracy, NLL, calibration and more against the temperature of the ELBO; resumes after an interruption.

Example: posterity study temperature --data two-moons --widths 50,200 --taus 1e-3:1:4

Cold posteriors: posterity study temperature --net lenet --cold 1e-3:1:7 --prior-variance 0.05 --steps 20000
"""
