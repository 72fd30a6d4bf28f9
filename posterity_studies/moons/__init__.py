"""Two moons by seven methods and five seeds: NLL, calibration, entropy on the data and far away.

Example: posterity study moons --seed 10
"""
