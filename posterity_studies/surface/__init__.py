"""Loss surfaces of a line and of a network with two weights each, and methods on a posterior with two modes.

Example: posterity study surface --seed 1
"""
