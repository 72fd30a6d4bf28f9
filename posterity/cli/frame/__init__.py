"""What the verbs share: options, settings, problems, run folders, tables and errors on the terminal.

A verb belongs into `verbs`.
"""
