"""NUTS on eleven posteriors of posteriordb and German credit: errors against reference draws, and diagnostics.

Example: posterity study posteriors --out results/posteriordb
"""
