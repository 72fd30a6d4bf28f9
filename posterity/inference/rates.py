"""Rates of `posterity.inference.costs` on a CPU, written by `python -m benchmarks.costs`."""

ORIGIN = "AMD EPYC, 1 thread, 2026-11-18"
"""Machine, threads and date of the rates."""

RATES: dict[str, tuple[float, float, float, float]] = {
    "MAP": (2.764e-11, 4.289e-11, 0.0003729, 0),
    "MeanField": (2.508e-11, 1.266e-10, 0.000533, 0),
    "NaturalGradient": (2.341e-11, 1.666e-10, 0.000497, 0),
    "SGHMC": (2.355e-11, 2.552e-10, 0.0008322, 0),
    "leapfrogs": (2.173e-11, 1.914e-10, 0.0009462, 0),
    "Laplace, Diagonal": (1.255e-11, 2.519e-10, 0.002748, 0),
    "Laplace, Kronecker": (2.032e-11, 2.419e-10, 0.003389, 2.071e-10),
    "Laplace, Full": (4.123e-11, 0, 0.00202, 4.3e-11),
    "Conjugate": (1.097e-10, 8.985e-11, 0.001732, 0),
}
"""By kind of work: seconds a multiply-add, a byte moved, a unit in itself, and a multiply-add at the end."""
