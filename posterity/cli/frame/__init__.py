"""What verbs share: options, where rows come from, problems and their runs, scores, run folders, output."""
