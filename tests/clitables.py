"""The table of `posterity compare`, read back from what it prints."""

import re


def rows(output):
    """Label, then the other cells, of each line of the table."""
    lines = re.finditer(r"^ ([A-Za-z][^\n]*?)((?: +[-+.\de*]+){3,}) *$", output, re.M)
    return {line[1]: line[2].split() for line in lines}
