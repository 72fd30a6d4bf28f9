"""Loss surfaces of a line and of a network, each of two weights, and what methods make of two modes.

Example: posterity study surface --seed 1
"""
