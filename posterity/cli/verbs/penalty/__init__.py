"""`posterity penalty`: parses names and formulas of penalties, and prints the prior that each stands for.

The maths is in `penalties`.
"""
