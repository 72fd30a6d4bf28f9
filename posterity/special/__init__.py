"""Special functions, quadrature, activations by name.

Functions of numbers only; integrals over posteriors are in `predictive`.
"""
