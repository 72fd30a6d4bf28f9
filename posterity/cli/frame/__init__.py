"""What verbs share: options, settings, problems, run folders, output."""
