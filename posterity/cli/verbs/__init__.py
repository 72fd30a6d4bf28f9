"""The verbs, one file each: a function that typer calls, and what it prints.

What two verbs need is in `frame`.
"""
