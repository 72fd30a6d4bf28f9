"""Fits by name: the settings of a fit, the table of methods, and the choice of a network for a table.

The command line and the estimators share them. Except in `choice`, torch is imported when a method is made.
"""
