"""MC dropout on a curve and on two moons, all masks of a tiny network, the KL condition.

Example: posterity study dropout --seed 1
"""
