"""The verbs, one file each: the function of the command, and its output. Code of several verbs is in `frame`."""
