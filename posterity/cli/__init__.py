"""The command line: `frame` has what verbs share, `verbs` has one file a verb.

Nothing here imports torch before a command runs.
"""
