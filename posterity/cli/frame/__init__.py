"""Code that several verbs share: options, sources of rows, tasks and their runs, scores, run folders, output."""
