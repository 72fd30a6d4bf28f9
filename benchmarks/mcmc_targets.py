"""The two posteriors of the NUTS benchmark, as log densities of a flat theta for torch (batched) and JAX (one chain).

- `logistic`: logistic regression on the breast-cancer table of scikit-learn, 569 rows, 30 standardised columns and an
  intercept, N(0, 1) prior: 31 parameters. The quantities whose effective sample size counts are the parameters.
- `net`: one hidden layer of 20 tanh units on 100 rows of 5 standard normal inputs, y = sin(1.5 (x1 + ... + x5) /
  sqrt(5)) + x1 / 2 + N(0, 0.5^2), the noise known; f(x) = b2 + tanh(x W1 / sqrt(5) + b1) w2 / sqrt(20), N(0, 1) prior
  on every weight: 141 parameters. The weights are not identified (units may be swapped and turned round), so the
  quantities are f at 20 further inputs. These sizes and this noise keep the mean depth of NUTS trees under 7.

All is float32, as JAX has it by default. Both densities leave out the constants.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

INPUTS, HIDDEN, ROWS, GRID, NOISE = 5, 20, 100, 20, 0.5
SIZES = (INPUTS * HIDDEN, HIDDEN, HIDDEN, 1)  # of W1, b1, w2, b2 in theta


@dataclass(frozen=True)
class Target:
    """A posterior: `torch_density(device)` gives (C, P) -> (C,), `jax_density()` gives (P,) -> ().

    `quantities` maps draws (C, D, P) to the numbers (C, D, Q) whose effective sample sizes are compared.
    """

    name: str
    title: str
    size: int
    torch_density: Callable[[torch.device], Callable[[Tensor], Tensor]]
    jax_density: Callable[[], Callable[[Any], Any]]
    quantities: Callable[[np.ndarray], np.ndarray]

    def start(self, chains: int, seed: int) -> np.ndarray:
        """A draw of the prior for each chain (C, P), where `posterity` begins in a density by itself."""
        return np.random.default_rng([seed, chains]).standard_normal((chains, self.size), dtype=np.float32)


def breast_cancer() -> tuple[np.ndarray, np.ndarray]:
    """Rows (569, 31), the last column ones, and labels (569,)."""
    from sklearn.datasets import load_breast_cancer

    table, labels = load_breast_cancer(return_X_y=True)
    table = (table - table.mean(0)) / table.std(0)
    return np.c_[table, np.ones(len(table))].astype(np.float32), labels.astype(np.float32)


def logistic() -> Target:
    """Logistic regression."""
    x, y = breast_cancer()

    def torch_density(device: torch.device) -> Callable[[Tensor], Tensor]:
        rows, labels = torch.from_numpy(x.T.copy()).to(device), torch.from_numpy(y).to(device)

        def log_density(theta: Tensor) -> Tensor:
            logits = theta @ rows  # (C, N)
            fit = labels * logits - torch.nn.functional.softplus(logits)
            return fit.sum(-1) - 0.5 * theta.square().sum(-1)

        return log_density

    def jax_density() -> Callable[[Any], Any]:
        import jax.numpy as jnp  # type: ignore[import-not-found]

        rows, labels = jnp.asarray(x), jnp.asarray(y)

        def log_density(theta: Any) -> Any:
            logits = rows @ theta
            return jnp.sum(labels * logits - jnp.logaddexp(0.0, logits)) - 0.5 * jnp.sum(theta**2)

        return log_density

    title = f"logistic regression, breast cancer, {x.shape[1]} parameters"
    return Target("logistic", title, x.shape[1], torch_density, jax_density, lambda theta: theta)


def net_data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs (100, 5), targets (100,), and the inputs at which f is looked at (20, 5)."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, INPUTS))
    y = np.sin(1.5 * x.sum(1) / math.sqrt(INPUTS)) + 0.5 * x[:, 0] + NOISE * random.normal(size=ROWS)
    grid = random.normal(size=(GRID, INPUTS))
    return x.astype(np.float32), y.astype(np.float32), grid.astype(np.float32)


def net() -> Target:
    """The network."""
    x, y, grid = net_data()
    ends = np.cumsum(SIZES)[:-1].tolist()

    def torch_density(device: torch.device) -> Callable[[Tensor], Tensor]:
        rows = torch.from_numpy(x / math.sqrt(INPUTS)).float().to(device)
        wanted = torch.from_numpy(y).to(device)

        def log_density(theta: Tensor) -> Tensor:
            w1, b1, w2, b2 = theta.split(SIZES, dim=-1)  # type: ignore[no-untyped-call]
            hidden = torch.tanh(rows @ w1.unflatten(-1, (INPUTS, HIDDEN)) + b1.unsqueeze(-2))  # (C, N, H)
            outputs = (hidden @ w2.unsqueeze(-1)).squeeze(-1) / math.sqrt(HIDDEN) + b2  # (C, N)
            return -0.5 * ((wanted - outputs) / NOISE).square().sum(-1) - 0.5 * theta.square().sum(-1)

        return log_density

    def jax_density() -> Callable[[Any], Any]:
        import jax.numpy as jnp

        rows, wanted = jnp.asarray(x / math.sqrt(INPUTS), dtype=jnp.float32), jnp.asarray(y)

        def log_density(theta: Any) -> Any:
            w1, b1, w2, b2 = jnp.split(theta, ends)
            hidden = jnp.tanh(rows @ w1.reshape(INPUTS, HIDDEN) + b1)
            outputs = hidden @ w2 / math.sqrt(HIDDEN) + b2
            return -0.5 * jnp.sum(((wanted - outputs) / NOISE) ** 2) - 0.5 * jnp.sum(theta**2)

        return log_density

    def function(theta: np.ndarray) -> np.ndarray:
        w1, b1, w2, b2 = np.split(theta, ends, axis=-1)
        inputs = (grid / math.sqrt(INPUTS)).astype(theta.dtype)
        hidden = np.tanh(inputs @ w1.reshape(*theta.shape[:-1], INPUTS, HIDDEN) + b1[..., None, :])
        outputs: np.ndarray = (hidden @ w2[..., None])[..., 0] / math.sqrt(HIDDEN) + b2
        return outputs

    size = sum(SIZES)
    title = f"{INPUTS}-{HIDDEN}-1 tanh net on {ROWS} rows, {size} parameters"
    return Target("net", title, size, torch_density, jax_density, function)


TARGETS = {"logistic": logistic, "net": net}
