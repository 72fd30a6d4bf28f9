"""Two hundred arrays of chains, ordinary and odd, for the comparison of diagnostics with ArviZ.

They come from numpy's legacy generator, whose streams are frozen, so that the stored numbers of
`diagnostics/arviz_gold.json` belong to the same arrays everywhere.
"""

import numpy as np

SEEDS = range(8)


def _autoregressive(random, shape, rho):
    noise = random.standard_normal(shape)
    draws = noise.copy()
    for t in range(1, shape[1]):
        draws[:, t] = rho * draws[:, t - 1] + (1.0 - rho**2) ** 0.5 * noise[:, t]
    return draws


def _metropolis(random, shape):
    """A chain that often stays where it is."""
    draws = np.zeros(shape)
    for t in range(1, shape[1]):
        proposal = draws[:, t - 1] + 3.0 * random.standard_normal(shape[0])
        accepted = random.uniform(size=shape[0]) < np.exp(0.5 * (draws[:, t - 1] ** 2 - proposal**2))
        draws[:, t] = np.where(accepted, proposal, draws[:, t - 1])
    return draws


def _with(draws, random, value, count):
    draws.flat[random.choice(draws.size, count, replace=False)] = value
    return draws


def _one_still(random, shape):
    draws = random.standard_normal(shape)
    draws[random.randint(shape[0])] = random.randint(-3, 4)  # a whole number, whose mean is exact in ArviZ too
    return draws


def _column(values):
    return np.asarray(values)[:, None]


KINDS = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "slow": lambda random, shape: _autoregressive(random, shape, 0.5),
    "very slow": lambda random, shape: _autoregressive(random, shape, 0.97),
    "random walk": lambda random, shape: random.standard_normal(shape).cumsum(1),
    "antithetic": lambda random, shape: _autoregressive(random, shape, -0.7),
    "nearly alternating": lambda random, shape: _autoregressive(random, shape, -0.98),
    "metropolis": _metropolis,
    "student-t 2": lambda random, shape: random.standard_t(2.0, size=shape),
    "cauchy": lambda random, shape: random.standard_cauchy(size=shape),
    "skewed": lambda random, shape: np.exp(2.0 * random.standard_normal(shape)),
    "whole numbers": lambda random, shape: random.poisson(3.0, size=shape).astype(float),
    "two values": lambda random, shape: np.where(random.uniform(size=shape) < 0.3, 0.1, 0.7),
    "rarely one": lambda random, shape: (random.uniform(size=shape) < 0.02).astype(float),
    "constant": lambda random, shape: np.full(shape, float(random.randint(-3, 4))),
    "constant in one chain": _one_still,
    "constant chains that differ": lambda random, shape: np.zeros(shape) + _column(np.arange(shape[0])),
    "a NaN": lambda random, shape: _with(random.standard_normal(shape), random, np.nan, 1),
    "an infinity": lambda random, shape: _with(random.standard_normal(shape), random, np.inf, 1),
    "many infinities": lambda random, shape: _with(random.standard_normal(shape), random, -np.inf, shape[1]),
    "other means": lambda random, shape: random.standard_normal(shape) + _column(random.standard_normal(shape[0])),
    "other scales": lambda random, shape: random.standard_normal(shape) * _column(1.0 + np.arange(shape[0])),
    "trend": lambda random, shape: random.standard_normal(shape) + np.linspace(0.0, 2.0, shape[1]),
    "huge offset": lambda random, shape: random.standard_normal(shape) + 1e8,
    "tiny scale": lambda random, shape: random.standard_normal(shape) * 10.0 ** -random.randint(4, 20),
    "few draws": lambda random, shape: random.standard_normal((shape[0], random.randint(4, 11))),
}
SHAPES = ((4, 100), (1, 100), (2, 51), (4, 250), (3, 37), (1, 45), (8, 60), (2, 500))  # by seed


def cases():
    """Every array (C, D) by name."""
    for number, (kind, make) in enumerate(KINDS.items()):
        for seed in SEEDS:
            yield f"{kind} {seed}", make(np.random.RandomState(1000 * number + seed), SHAPES[seed])
