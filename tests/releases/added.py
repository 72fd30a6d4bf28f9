"""What is recorded of 0.2.0: methods, types and commands that 0.1.0 did not have, and a few that it had."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from releases.cases import (
    BINARY,
    CLASSES,
    COLUMNS,
    KNOWN,
    LINEAR,
    ONLINE,
    REGRESSION,
    Case,
    Parameters,
    Problem,
    Rows,
    Stopped,
    counts,
    dropping,
    filled,
    linear,
    network,
    next_problem,
    numbers,
)
from tablerows import frame
from torch import Tensor, nn

from posterity import infer
from posterity.curvature import Full, GaussNewton, Kronecker
from posterity.estimators import BayesianClassifier, BayesianRegressor
from posterity.inference import Method
from posterity.likelihoods import Custom, Gaussian, Poisson, Probit
from posterity.methods import (
    MAMS,
    MAP,
    MCLMC,
    NUTS,
    SGLD,
    SWAG,
    ChEES,
    Conjugate,
    Ensemble,
    ExpectationPropagation,
    Laplace,
    LastLayer,
    MeanField,
    OnlineLaplace,
    PairedSampling,
    ProbabilisticBackpropagation,
)
from posterity.optim import SGD, Adam
from posterity.posteriors import Calibrated, Dropout, Mixture, Posterior
from posterity.predictive import Exact, MonteCarlo, TemperatureScaling, VectorScaling
from posterity.predictive import Probit as ProbitIntegral
from posterity.priors import Normal


def rectified(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 4), nn.ReLU(), nn.Linear(4, outputs))


@dataclasses.dataclass(frozen=True)
class Incomplete(Problem):
    """A problem whose rows have weights, and of which one target is missing."""

    def data(self, shift: int = 0, rows: int = 16) -> Rows:
        x, y = super().data(shift, rows)
        if shift:  # the rows that are looked at
            return x, y
        y[3, 0] = torch.nan
        return x, y, 0.5 + numbers(rows, shift=9, dtype=x.dtype).abs()  # type: ignore[return-value]


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(targets - outputs).abs().sum(-1)


LEFT_OUT: dict[str, Any] = {"likelihood": Gaussian(), "prior": Normal()}
CHOSEN = REGRESSION.but(**LEFT_OUT)
CHOSEN_CLASSES = CLASSES.but(prior=Normal())
LABELS = BINARY.but(architecture=linear, likelihood=Probit())
COUNTS = LINEAR.but(likelihood=Poisson(), targets=counts)
RECTIFIED = KNOWN.but(architecture=rectified)
INCOMPLETE = Incomplete(network, 1, REGRESSION.targets, REGRESSION.likelihood)
OWN = KNOWN.but(likelihood=Custom(absolute, mean_function=torch.clone, variance_function=torch.ones_like))
KRONECKER = Laplace(tuning=None, structure=Kronecker(), batch_size=6)
CHAINS: dict[str, Any] = {"draws": 4, "warmup": 40, "chains": 2}


def trained_elsewhere(shift: int, architecture: Callable[[int], nn.Module] = network) -> nn.Module:
    module = filled(architecture(3), torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(numbers(*parameter.shape, shift=shift, dtype=torch.float32) / 16)
    return module


def of_modules() -> tuple[Posterior, Any]:
    return Mixture.of([trained_elsewhere(1), trained_elsewhere(2)], CLASSES.likelihood), None


def of_dropout() -> tuple[Posterior, Any]:
    return Dropout.of(trained_elsewhere(1, dropping), CLASSES.likelihood, example=CLASSES.data()[0]), None


def of_checkpoints() -> tuple[Posterior, Any]:
    states = [trained_elsewhere(shift).state_dict() for shift in range(1, 5)]
    return SWAG(rank=2).from_checkpoints(CLASSES.joint(), states), None


def calibrated(method: Method, scaling: type[TemperatureScaling] | type[VectorScaling]) -> tuple[Posterior, Any]:
    q, trace = infer(method, CLASSES.joint(), CLASSES.data(), seed=3, progress=False)
    return Calibrated.fit(q, CLASSES.data(shift=4), scaling), trace


ADDED = [
    Case("map", REGRESSION, MAP(8, 6, Adam())),
    Case("map_lbfgs", KNOWN, MAP(12)),
    Case("map_chosen", CHOSEN, MAP(8, 6, Adam()), refit=False),
    Case("map_incomplete", INCOMPLETE, MAP(8, 6, Adam())),
    Case("map_own_likelihood", OWN, MAP(8, 6, Adam()), given={"likelihood": OWN.likelihood}),
    Case("laplace_full", CLASSES, Laplace(tuning=None, structure=Full()), ProbitIntegral()),
    Case("laplace_kronecker", CLASSES, KRONECKER, ProbitIntegral()),
    Case("laplace_last_layer", CLASSES, Laplace(tuning=None, subset=LastLayer()), ProbitIntegral()),
    Case("laplace_chosen", CHOSEN, Laplace(structure=Full()), Exact(), refit=False),
    Case("laplace_chosen_classes", CHOSEN_CLASSES, Laplace(structure=Kronecker()), MonteCarlo(16), refit=False),
    Case("laplace_probit", LABELS.but(architecture=network), Laplace(tuning=None), Exact()),
    Case("laplace_column_limit", CLASSES, Laplace(GaussNewton(column_limit=2), Kronecker(), tuning=None), Exact()),
    Case("laplace_incomplete", INCOMPLETE, Laplace(tuning=None, batch_size=6), Exact()),
    Case("continued_last_layer", KNOWN, None, Exact(), by=partial(next_problem, Full(), subset=LastLayer())),
    Case("conjugate_chosen", LINEAR.but(**LEFT_OUT), Conjugate(), Exact(), refit=False),
    Case("online_laplace", CHOSEN, OnlineLaplace(MAP(8, 6, Adam()), rounds=2), Exact(), refit=False),
    Case("mean_field", REGRESSION, MeanField(8, 6, Adam())),
    Case("mean_field_paired", REGRESSION, MeanField(8, 6, Adam(), estimator=PairedSampling())),
    Case("mean_field_chosen", CHOSEN, MeanField(8), refit=False),
    Case("swag", CHOSEN, SWAG(MAP(12, 6, SGD(0.05)), every=2, rank=3, warmup=1), refit=False),
    Case("swag_from_checkpoints", CLASSES, None, by=of_checkpoints),
    Case("dropout_of", CLASSES.but(architecture=dropping), None, by=of_dropout),
    Case("mixture_of", CLASSES, None, by=of_modules),
    Case("ensemble", CHOSEN, Ensemble(MAP(8, 6, Adam()), 3), refit=False),
    Case("ensemble_of_laplaces", CLASSES, Ensemble(KRONECKER, 2), ProbitIntegral()),
    Case(
        "calibrated_temperature", CLASSES, None, ProbitIntegral(), by=partial(calibrated, KRONECKER, TemperatureScaling)
    ),
    Case(
        "calibrated_vector",
        CLASSES,
        None,
        ProbitIntegral(),
        by=partial(calibrated, Ensemble(KRONECKER, 2), VectorScaling),
    ),
    Case("ep_probit", LABELS, ExpectationPropagation(sweeps=4), Exact()),
    Case("ep_chosen", COUNTS.but(prior=Normal()), ExpectationPropagation(), MonteCarlo(16), refit=False),
    Case("ep_counts", COUNTS, ExpectationPropagation(order="sequential"), MonteCarlo(16), refit=False),
    Case("pbp", RECTIFIED, ProbabilisticBackpropagation(passes=2), Exact()),
    Case("pbp_chosen", RECTIFIED.but(**LEFT_OUT), ProbabilisticBackpropagation(passes=2), Exact()),
    Case("nuts", CHOSEN, NUTS(**CHAINS, max_depth=3), refit=False),
    Case("chees", CLASSES, ChEES(**CHAINS), refit=False),
    Case("mams", KNOWN, MAMS(**CHAINS, max_steps=8), refit=False),
    Case("mclmc", CLASSES, MCLMC(**CHAINS), refit=False),
    Case("chees_density", Parameters(), ChEES(**CHAINS), refit=False),
    Case("sgld", CLASSES, SGLD(draws=4, warmup=3, chains=2, batch_size=6), refit=False),
]
ADDED_CASES = {case.name: case for case in ADDED}
STOPPED_ADDED = {
    name: Stopped(Case(name, problem, method, integrator), every, step)
    for name, problem, method, integrator, every, step in (
        ("map_lbfgs", KNOWN, MAP(12), None, 4, 6),
        ("map_incomplete", INCOMPLETE, MAP(12, 6, Adam()), None, 4, 6),
        ("swag", KNOWN, SWAG(MAP(12, 6, SGD(0.05)), every=2, rank=2, warmup=1), None, 4, 6),
        ("online_laplace", KNOWN, dataclasses.replace(ONLINE, tuning=None), Exact(), 3, 7),
        ("chees", CLASSES, ChEES(4, 4, 2, step_size=0.05), None, 3, 5),
    )
}

DAYS = ("2024-01-31", "2024-02-29", "2025-07-01", "2025-12-24")
ADDED_TABLE = "length,colour,day,price,weight\n" + "\n".join(
    f"{'' if row == 5 else a:.6},{('red', 'blue')[row % 3 % 2]},{DAYS[row // 3 % 4]},${c + 3:.2f},{b + a / 2:.4f}"
    for row, (a, b, c) in enumerate(numbers(40, 3, shift=8).tolist())
)
SMALL = ("--method", "laplace", "--steps", "20", "--hidden", "3")
GIVEN = (*SMALL, "--prior-scale", "1")
ADDED_COMMANDS = {
    "auto_numbers": ("table.csv", "--target", "weight", "--method", "auto", "--seconds", "1"),
    "auto_classes": ("table.csv", "--target", "colour", "--method", "auto", "--seconds", "1"),
    "laplace": ("table.csv", "--target", "weight", *SMALL),
    "folds": ("table.csv", "--target", "weight", *GIVEN, "--noise", "0.5", "--cv", "3", "--conformal", "cv+"),
    "classes": ("table.csv", "--target", "colour", *GIVEN, "--conformal", "split"),
}
CONFORMAL = {"folds": ("--data", "table.csv", "--conformal"), "classes": ("--conformal", "--level", "0.5")}

Estimator = BayesianRegressor | BayesianClassifier
FRAME, TARGET = frame()
ESTIMATORS: dict[str, tuple[Estimator, Any]] = {
    "conjugate": (BayesianRegressor("conjugate", conformal="cv+", random_state=1), TARGET),
    "auto": (BayesianRegressor("auto", seconds=1, random_state=1), 2.0 ** TARGET.clip(-2, 3)),
    "classes": (BayesianClassifier("map", conformal="split", random_state=1), TARGET > 1),
}
