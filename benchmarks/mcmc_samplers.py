"""NUTS by `posterity` and by other libraries, each vectorised over chains in the way its documentation has it.

All start at draws of the prior, adapt a step size to an acceptance of 0.8 and a diagonal mass matrix, and stop trees at
depth 10; the settings are everybody's defaults. A sampler is built once for a target and called with seeds. JAX
compiles while its samplers are built; `posterity` does so in a first run, and a second one compiles nothing.
"""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import posterity as po
from benchmarks.mcmc_targets import Target

PACKAGES = ("numpyro", "blackjax", "pyro-ppl", "jax", "arviz", "numpy", "scikit-learn")


@dataclass(frozen=True)
class Length:
    """How many chains, transitions of adaptation, and draws."""

    chains: int
    warmup: int
    draws: int


@dataclass(frozen=True)
class Drawn:
    """What a run gives: theta (C, D, P), leapfrogs (C, D) and divergences (C, D) of the transitions kept."""

    theta: np.ndarray
    leapfrogs: np.ndarray
    divergent: np.ndarray


@dataclass(frozen=True)
class Sampler:
    """`sample(seed)` makes a whole run; unless `compiled`, the first of them compiles."""

    sample: Callable[[int], Drawn]
    compiled: bool = True


def posterity(target: Target, length: Length, device: str, kind: str = "NUTS") -> Sampler:
    """`po.infer` with one of our samplers on a density of all chains at once."""
    place = torch.device(device)
    of_theta, shapes = target.torch_density(place), {"theta": (target.size,)}
    density = po.Density(of_theta, shapes, batched=True, dtype=torch.float32, device=place)
    method = getattr(po.methods, kind)(draws=length.draws, warmup=length.warmup, chains=length.chains)

    def sample(seed: int) -> Drawn:
        samples: Any = po.infer(method, density, None, seed=seed, progress=False)[0]
        seen = samples.statistics
        return Drawn(*(part.cpu().numpy() for part in (samples.theta, seen["leapfrogs"], seen["divergent"])))

    return Sampler(sample, compiled=False)


def refuse_another_device(device: str) -> None:
    """JAX falls back to the CPU by itself; a row that says so is worth more than figures of another device."""
    import jax  # type: ignore[import-not-found]

    if device == "cuda" and jax.default_backend() == "cpu":
        raise RuntimeError("JAX sees no CUDA device here, though torch does")


def numpyro(target: Target, length: Length, device: str) -> Sampler:
    """NumPyro's `MCMC` with vectorised chains, compiled as a whole: by itself it compiles again in every `run`."""
    import jax
    from numpyro.infer import MCMC, NUTS  # type: ignore[import-not-found]

    refuse_another_device(device)
    log_density = target.jax_density()

    def run(key: Any, start: Any) -> Any:
        mcmc = MCMC(
            NUTS(potential_fn=lambda theta: -log_density(theta)),
            num_warmup=length.warmup,
            num_samples=length.draws,
            num_chains=length.chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(key, init_params=start, extra_fields=("num_steps", "diverging"))
        seen = mcmc.get_extra_fields(group_by_chain=True)
        return mcmc.get_samples(group_by_chain=True), seen["num_steps"], seen["diverging"]

    def arguments(seed: int) -> tuple[Any, Any]:
        return jax.random.PRNGKey(seed), jax.numpy.asarray(target.start(length.chains, seed))

    compiled = jax.jit(run).lower(*arguments(0)).compile()
    return Sampler(lambda seed: Drawn(*(np.asarray(part) for part in compiled(*arguments(seed)))))


def blackjax(target: Target, length: Length, device: str) -> Sampler:
    """BlackJAX's window adaptation and NUTS in one compiled function, mapped over chains."""
    import blackjax as library  # type: ignore[import-not-found]
    import jax
    from blackjax.adaptation.base import get_filter_adapt_info_fn  # type: ignore[import-not-found]

    refuse_another_device(device)
    log_density = target.jax_density()

    def chain(key: Any, start: Any) -> Any:
        adapting, drawing = jax.random.split(key)
        adaptation = library.window_adaptation(library.nuts, log_density, adaptation_info_fn=get_filter_adapt_info_fn())
        (state, parameters), _ = adaptation.run(adapting, start, length.warmup)
        step = library.nuts(log_density, **parameters).step

        def transition(state: Any, key: Any) -> Any:
            state, seen = step(key, state)
            return state, (state.position, seen.num_integration_steps, seen.is_divergent)

        return jax.lax.scan(transition, state, jax.random.split(drawing, length.draws))[1]

    def arguments(seed: int) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.PRNGKey(seed), length.chains)
        return keys, jax.numpy.asarray(target.start(length.chains, seed))

    compiled = jax.jit(jax.vmap(chain)).lower(*arguments(0)).compile()
    return Sampler(lambda seed: Drawn(*(np.asarray(part) for part in compiled(*arguments(seed)))))


def pyro(target: Target, length: Length, device: str) -> Sampler:
    """Pyro's `MCMC`, one chain after the other."""
    import pyro as library  # type: ignore[import-not-found]
    from pyro.infer import MCMC, NUTS  # type: ignore[import-not-found]

    batched = target.torch_density(torch.device(device))
    calls = 0

    def potential(values: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return -batched(values["theta"].unsqueeze(0)).squeeze(0)

    def chain(start: torch.Tensor) -> Drawn:
        counts: list[int] = []  # gradients so far, after each transition
        mcmc = MCMC(
            NUTS(potential_fn=potential),
            num_samples=length.draws,
            warmup_steps=length.warmup,
            initial_params={"theta": start},
            hook_fn=lambda kernel, values, stage, step: counts.append(calls),
            disable_progbar=True,
        )
        mcmc.run()
        divergent = np.zeros(length.draws, dtype=bool)
        divergent[mcmc.diagnostics()["divergences"]["chain 0"]] = True
        return Drawn(mcmc.get_samples()["theta"].cpu().numpy(), np.diff(counts)[-length.draws :], divergent)

    def sample(seed: int) -> Drawn:
        library.set_rng_seed(seed)
        drawn = [chain(start) for start in torch.from_numpy(target.start(length.chains, seed)).to(device)]
        parts = ((each.theta, each.leapfrogs, each.divergent) for each in drawn)
        return Drawn(*(np.stack(part) for part in zip(*parts, strict=True)))

    return Sampler(sample)


def mean_depth(leapfrogs: np.ndarray) -> float:
    """Mean depth of trees, from leapfrogs alone, so that it means the same for all: depth j has up to 2^j - 1."""
    return float(np.ceil(np.log2(leapfrogs + 1.0)).mean())


def diagnosed(values: np.ndarray) -> tuple[float, float]:
    """Least bulk effective sample size and largest R-hat of (C, D, Q), by ArviZ, else by `posterity.diagnostics`."""
    columns = [values[..., index].astype(np.float64) for index in range(values.shape[-1])]
    try:
        import arviz  # type: ignore[import-not-found]

        ess, rhat = functools.partial(arviz.ess, method="bulk"), arviz.rhat
    except ImportError:
        from posterity.diagnostics import bulk_ess, rhat

        columns, ess = [torch.from_numpy(column) for column in columns], bulk_ess
    with ThreadPoolExecutor() as pool:  # a second of work for each of 31 columns of 1,024 chains
        least = min(map(float, pool.map(ess, columns)))
        worst = max(map(float, pool.map(rhat, columns))) if len(values) > 1 else math.nan  # one chain has none
    return least, worst
