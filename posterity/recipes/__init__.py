"""How a fit is made from words: the settings of a fit, the methods by their words, the network of a table.

The command line and the estimators share them. Nothing here imports torch before a method is made, but `choice`.
"""
