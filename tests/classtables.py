"""Predictions of classes for metrics to be tried on."""

from hypothesis import strategies as st

ClassTable = tuple[list[list[float]], list[int], int]


@st.composite
def class_tables(draw: st.DrawFn, most: int) -> ClassTable:
    """Probabilities as fractions of integers to `most`, so that bin edges and ties are hit; labels; bins."""
    classes = draw(st.integers(2, 4))
    weights = st.lists(st.integers(0, most), min_size=classes, max_size=classes).filter(any)
    rows = [[weight / sum(row) for weight in row] for row in draw(st.lists(weights, min_size=1, max_size=15))]
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=len(rows), max_size=len(rows)))
    return rows, labels, draw(st.integers(1, 16))
