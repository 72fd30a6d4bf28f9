"""The methods of `benchmarks.defaults` at their defaults, and the cases that each applies to.

A method that has no default for an argument gets the least that states it: `Ensemble` and `VariationalEM` a method,
`optim.IVON` a step size and what it must know of the problem, in a training loop of one's own.
"""

import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.defaults_cases import Case
from posterity import methods
from posterity.evidence import NoiseScale, PriorScale
from posterity.inference import Method, infer
from posterity.likelihoods import Gaussian
from posterity.numerics.random import Key
from posterity.optim import IVON
from posterity.posteriors import Posterior
from posterity.priors import Normal

LOOP = {"steps": 5000, "batch_size": 128, "lr": 0.1}  # of the loop around IVON, as long as the default runs
DROPOUT = 0.1
SPEED = re.compile("one after the other|not compiled|CUDA graph|compiled anew|slow")
"""Warnings about speed say nothing about the result."""

GLM = ("linear", "glm")
NETWORKS = ("mlp", "moons", "tables")
EVERYWHERE = (*GLM, *NETWORKS)


@dataclass(frozen=True)
class Entry:
    """A method: how it is made, the groups of cases it applies to, and what its result is held against.

    `kind` says what it should reach. "point": the mode. "mode": the mode and the curvature there. "diagonal", "full"
    and "low rank": the largest ELBO of these Gaussians. "samples": the posterior's moments, by draws or a Gaussian.
    "spread": nothing but its NLL. `tunes`: it moves prior and noise, and is held against its own. `started`: it starts
    from MAP. `sampler`: it takes long, and runs on the first linear regressions only. `only`: beginnings of the names
    of cases.
    """

    make: Callable[[Case], Method | None]
    kind: str
    groups: tuple[str, ...] = EVERYWHERE
    tunes: bool = False
    started: bool = False
    sampler: bool = False
    dropout: float = 0.0
    only: tuple[str, ...] = ("",)

    def applies(self, case: str, group: str) -> bool:
        """Return whether the method is run on this case."""
        return group in self.groups and case.startswith(self.only)


def _variational_em(case: Case) -> Method:
    if case.group == "linear":
        return methods.VariationalEM(methods.Conjugate(), (PriorScale(), NoiseScale()))
    noise = (NoiseScale(),) if isinstance(case.likelihood, Gaussian) else ()
    return methods.VariationalEM(methods.MeanField(), (PriorScale(), *noise))


SMALL = ("linear", "logistic", "poisson", "mlp-1-12-1")
METHODS: dict[str, Entry] = {
    "MAP": Entry(lambda case: methods.MAP(), "point"),
    "Ensemble": Entry(lambda case: methods.Ensemble(methods.MAP()), "point"),
    "Conjugate": Entry(lambda case: methods.Conjugate(), "mode", ("linear",)),
    "ExpectationPropagation": Entry(lambda case: methods.ExpectationPropagation(), "samples", GLM),
    "ProbabilisticBackpropagation": Entry(lambda case: methods.ProbabilisticBackpropagation(), "spread", ("linear",)),
    "Laplace": Entry(lambda case: methods.Laplace(), "mode", started=True),
    "Laplace-alone": Entry(lambda case: methods.Laplace(), "mode"),
    "OnlineLaplace": Entry(lambda case: methods.OnlineLaplace(), "mode", tunes=True),
    "VariationalEM": Entry(_variational_em, "diagonal", tunes=True),
    "MeanField": Entry(lambda case: methods.MeanField(), "diagonal"),
    "NaturalGradient": Entry(lambda case: methods.NaturalGradient(), "diagonal"),
    "IVON": Entry(lambda case: None, "diagonal"),
    "LowRankGaussian": Entry(lambda case: methods.LowRankGaussian(), "low rank"),
    "FullRank": Entry(lambda case: methods.FullRank(), "full", (*GLM, "mlp", "moons")),
    "SWAG": Entry(lambda case: methods.SWAG(), "spread", started=True),
    "MCDropout": Entry(lambda case: methods.MCDropout(), "spread", NETWORKS, dropout=DROPOUT),
    "SGLD": Entry(lambda case: methods.SGLD(), "samples"),
    "SGHMC": Entry(lambda case: methods.SGHMC(), "samples"),
    "HMC": Entry(lambda case: methods.HMC(), "samples", sampler=True, only=(*SMALL, "mlp", "two-moons")),
    "NUTS": Entry(lambda case: methods.NUTS(), "samples", sampler=True, only=SMALL),
    "ChEES": Entry(lambda case: methods.ChEES(), "samples", sampler=True, only=SMALL),
    "MAMS": Entry(lambda case: methods.MAMS(), "samples", sampler=True, only=SMALL),
    "MCLMC": Entry(lambda case: methods.MCLMC(), "samples", sampler=True, only=SMALL),
    "MALA": Entry(lambda case: methods.MALA(), "samples", sampler=True, only=SMALL),
    "Metropolis": Entry(lambda case: methods.Metropolis(), "samples", sampler=True, only=SMALL),
    "Langevin": Entry(lambda case: methods.Langevin(), "samples", sampler=True, only=SMALL),
}


@dataclass
class Fit:
    """What a fit left: its posterior or its error, the point it started from, what it said, and its seconds."""

    posterior: Posterior | None = None
    start: Posterior | None = None
    said: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    settings: str = ""


class _Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def listening(said: list[str]) -> Iterator[None]:
    """Collect what is logged as a warning by "posterity", or warned of, inside the context; speed apart."""
    logger, heard = logging.getLogger("posterity"), list[str]()
    listener = _Listener(heard)
    logger.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(listener)
    heard += [str(warning.message) for warning in caught]
    said += [" ".join(text.split()) for text in dict.fromkeys(heard) if not SPEED.search(text)]


def fit(entry: Entry, case: Case, start: Posterior | None, seed: int = 0) -> Fit:
    """Run a method at its defaults on a case; an error is kept as text, since it is a result here."""
    result = Fit(start=start if entry.started else None)
    begin = time.perf_counter()
    with listening(result.said):
        try:
            method = entry.make(case)
            result.settings = repr(LOOP) if method is None else repr(method)
            if method is None:
                result.posterior = ivon(case, seed)
            else:
                joint = case.joint(entry.dropout)
                result.posterior, _ = infer(method, joint, case.train, start=result.start, seed=seed, progress=False)
        except Exception as error:
            result.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    result.seconds = time.perf_counter() - begin
    return result


def ivon(case: Case, seed: int) -> Posterior:
    """A training loop of one's own with `optim.IVON`, told the number of rows and the prior; scales left out are 1."""
    if not case.scales_given:
        noise = Gaussian(scale=1.0) if isinstance(case.likelihood, Gaussian) else case.likelihood
        case = replace(case, prior=Normal(scale=1.0), likelihood=noise)
    joint, module, (x, y) = case.joint(), case.module(), case.train
    count, key, size = len(x), Key(seed).fold("ivon"), min(int(LOOP["batch_size"]), len(x))
    prior = float(joint.bound_prior.precision(joint.initial()).flatten()[0])
    optimizer = IVON(module.parameters(), lr=LOOP["lr"], ess=count, weight_decay=prior / count, seed=seed)
    for step in range(int(LOOP["steps"])):
        rows = key.fold(step).permutation(count, "cpu")[:size]
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss = -case.likelihood.log_prob(module(x[rows]), y[rows]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return optimizer.posterior(joint, module)
