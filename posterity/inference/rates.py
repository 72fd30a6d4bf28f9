"""Rates of `posterity.inference.costs` on a CPU, written by `python -m benchmarks.costs`."""

ORIGIN = "AMD EPYC, 1 thread, 2026-11-19"
"""Machine, threads and date of the rates."""

RATES: dict[str, tuple[float, float, float, float]] = {
    "MAP": (2.071e-11, 2.086e-11, 0.0001249, 0),
    "MeanField": (1.925e-11, 6.562e-11, 0.0001878, 0),
    "NaturalGradient": (1.915e-11, 9.562e-11, 0.0002236, 0),
    "SGHMC": (1.636e-11, 1.585e-10, 0.0003127, 0),
    "leapfrogs": (1.827e-11, 9.851e-11, 0.0003683, 0),
    "Laplace, Diagonal": (2.288e-11, 1.546e-11, 0.00181, 0),
    "Laplace, Kronecker": (1.549e-11, 5.522e-10, 0.003174, 1.933e-10),
    "Laplace, Full": (2.954e-11, 0, 0.001611, 0),
    "Conjugate": (6.989e-11, 1.716e-10, 0.0009733, 0),
}
"""By kind of work: seconds a multiply-add, a byte moved, a unit in itself, and a multiply-add at the end."""
