"""The command line: `frame` has what the verbs share, `verbs` has one file a verb.

Nothing here imports torch before a command runs, so that `--help` is quick. Inference belongs into the library.
"""
