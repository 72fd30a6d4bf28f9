"""What is recorded of a release: fits of every method, prior and likelihood, small enough to be kept as files."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posterity import Density, Joint, Tempering, continued, infer
from posterity.curvature import (
    BlockDiagonal,
    CorrectedKronecker,
    Diagonal,
    EmpiricalFisher,
    Full,
    GaussNewton,
    Hessian,
    Hutchinson,
    Kronecker,
    LowRank,
    MonteCarloFisher,
)
from posterity.evidence import (
    Evidence,
    Gamma,
    MacKay,
    MacKayUpdate,
    NoiseScale,
    PerLayer,
    PerTensor,
    PriorScale,
    Shared,
    ValidationGrid,
    retuned,
)
from posterity.inference import Callback, Checkpoint, EarlyStopping, Method, Task
from posterity.kernels import DenseMass, DiagonalMass, UnitMass
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood, Poisson, StudentT
from posterity.methods import (
    HMC,
    MALA,
    MAP,
    NUTS,
    SGHMC,
    SGLD,
    SWAG,
    AllWeights,
    Conjugate,
    Ensemble,
    ExpectationMaximization,
    Flipout,
    FullRank,
    Langevin,
    Laplace,
    LargestVariance,
    LastLayer,
    LocalReparameterisation,
    LowRankGaussian,
    Matching,
    MCDropout,
    MeanField,
    Metropolis,
    NaturalGradient,
    OnlineLaplace,
    Plain,
    RMSprop,
    ScoreFunction,
    SecondOrder,
    StickTheLanding,
    VariationalEM,
    WeightSampling,
)
from posterity.model import Interval, Ordered, Positive, Simplex
from posterity.networks import ConcreteDropout
from posterity.optim import IVON, SGD, Adam, Constant, Cosine, Cycles, Cyclic, Steps, Warmup
from posterity.posteriors import Mixture, Posterior
from posterity.predictive import Exact, Integrator, LaplaceBridge, MonteCarlo, Probit, ProbitPhi
from posterity.priors import (
    Cauchy,
    EdgeOfChaos,
    FanIn,
    Glorot,
    GroupLasso,
    HalfCauchy,
    He,
    Hierarchical,
    Horseshoe,
    Layerwise,
    Logistic,
    LogNormal,
    Normal,
    Prior,
    ScaleMixture,
    Tabulated,
    around,
)
from posterity.priors import Laplace as LaplacePrior
from posterity.priors import StudentT as StudentTPrior

ROWS, COLUMNS = 16, 3
FLOAT32, FLOAT64 = torch.float32, torch.float64
Rows = tuple[Tensor, Tensor]


def numbers(*shape: int, shift: int, dtype: torch.dtype = FLOAT64) -> Tensor:
    """Numbers between -2 and 2 that every machine makes alike, to the bit: whole ones over a power of 2."""
    index = torch.arange(prod(shape)) + 97 * shift
    return ((index * index * 40503 + index * 30011) % 4096 - 2048).to(dtype).reshape(shape) / 1024


def filled(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with the same weights every time."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, shift=index + 11) / 4)
    return module.to(dtype)


# ---- networks


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 3), nn.Tanh(), nn.Linear(3, outputs))


def linear(outputs: int) -> nn.Module:
    return nn.Linear(COLUMNS, outputs)


def normed(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, outputs))


def dropping(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 4), nn.Tanh(), nn.Dropout(0.25), nn.Linear(4, outputs))


def learnt_dropping(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 4), nn.Tanh(), ConcreteDropout(nn.Linear(4, outputs), rate=0.25))


def convolving(outputs: int) -> nn.Module:
    layers = nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, outputs)
    return nn.Sequential(nn.Unflatten(1, (1, 3, 3)), *layers)


# ---- targets


def real(x: Tensor) -> Tensor:
    return x[:, :1] / 2 - x[:, 1:2] * x[:, 2:3] / 4


def three_classes(x: Tensor) -> Tensor:
    total = x[:, 0] + x[:, 1]
    return (total > 0.5).long() + (total > -0.5).long()


def two_classes(x: Tensor) -> Tensor:
    return (x[:, 0] * x[:, 1] > 0).to(x.dtype).unsqueeze(-1)


def counts(x: Tensor) -> Tensor:
    return (x[:, :1] + x[:, 1:2] + 4).floor()


@dataclass(frozen=True)
class Problem:
    """A network, what it is to say, and rows to learn that from; the same every time it is asked for."""

    architecture: Callable[[int], nn.Module]
    outputs: int
    targets: Callable[[Tensor], Tensor]
    likelihood: Likelihood
    prior: Prior = dataclasses.field(default_factory=lambda: Normal(0.75))
    dtype: torch.dtype = FLOAT32
    tempering: Tempering = dataclasses.field(default_factory=Tempering.bayes)
    random: str | tuple[str, ...] = "*"
    trained: tuple[str, ...] = ()
    columns: int = COLUMNS

    def model(self) -> nn.Module:
        return filled(self.architecture(self.outputs), self.dtype)

    def joint(self) -> Joint:
        joint = Joint(self.model(), self.likelihood, self.prior, ROWS, self.tempering, self.random)
        return joint.with_weights(*self.trained) if self.trained else joint

    def data(self, shift: int = 0, rows: int = ROWS) -> Rows:
        x = numbers(rows, self.columns, shift=shift)
        y = self.targets(x)
        return x.to(self.dtype), y.to(self.dtype) if y.is_floating_point() else y

    def but(self, **changes: Any) -> "Problem":
        return dataclasses.replace(self, **changes)


REGRESSION = Problem(network, 1, real, Gaussian(0.25, learn=True))
KNOWN = REGRESSION.but(likelihood=Gaussian(0.5))
WIDE = REGRESSION.but(likelihood=Gaussian(3.0), prior=Normal(0.2))  # so that a Hessian is positive definite
SAMPLED = REGRESSION.but(likelihood=Gaussian(0.25, learn=True, log_scale_prior=(-1.0, 0.5)))
CLASSES = Problem(network, 3, three_classes, Categorical())
BINARY = Problem(network, 1, two_classes, Bernoulli())
LINEAR = KNOWN.but(architecture=linear)
NORMED = REGRESSION.but(architecture=normed)
DROPPING = REGRESSION.but(architecture=dropping)
IMAGES = CLASSES.but(architecture=convolving, columns=9)
DOUBLE = {"dtype": FLOAT64}


def log_density(rate: Tensor, share: Tensor, place: Tensor, angle: Tensor) -> Tensor:
    powers = torch.tensor([2.0, 3.0, 4.0], dtype=share.dtype)
    return (
        (2.0 * rate.log() - 3.0 * rate).sum()
        + (powers * share.log()).sum()
        - 0.5 * (place - 0.5).square().sum()
        - (angle - 0.25).square()
    )


@dataclass(frozen=True)
class Parameters:
    """A density of one's own, with a parameter under each constraint."""

    dtype: torch.dtype = FLOAT64

    def model(self) -> Density:
        shapes = {"rate": (2,), "share": (3,), "place": (2,), "angle": ()}
        constraints = {"rate": Positive(), "share": Simplex(), "place": Ordered(), "angle": Interval(-1.0, 2.0)}
        return Density(log_density, shapes, constraints, dtype=self.dtype)

    joint = model

    def data(self, shift: int = 0, rows: int = ROWS) -> None:
        return None


@dataclass(frozen=True)
class Counts:
    """A mixture of two Poisson distributions, for EM."""

    observed = (0.0, 1.0, 1.0, 2.0, 9.0, 11.0, 12.0)

    def log_joint(self, rates: Tensor) -> Tensor:
        y = torch.tensor(self.observed, dtype=FLOAT64).unsqueeze(-1)
        return torch.xlogy(y, rates) - rates - torch.lgamma(y + 1) - 0.6931471805599453

    def model(self) -> Density:
        return Density(
            lambda rates: self.log_joint(rates).logsumexp(-1).sum(),
            {"rates": (2,)},
            {"rates": Positive()},
            dtype=FLOAT64,
        )

    joint = model

    def data(self, shift: int = 0, rows: int = ROWS) -> None:
        return None

    def method(self) -> Method:
        def expectation(values: Any, latent: Any) -> dict[str, Tensor]:
            return {"q": self.log_joint(values["rates"]).softmax(-1)}

        def maximisation(values: Any, latent: Any) -> dict[str, Tensor]:
            y = torch.tensor(self.observed, dtype=FLOAT64).unsqueeze(-1)
            return {"rates": (latent["q"] * y).sum(0) / latent["q"].sum(0)}

        def bound(values: Any, latent: Any) -> Tensor:
            q: Tensor = latent["q"]
            return (q * self.log_joint(values["rates"]) - torch.xlogy(q, q)).sum()

        start = {"rates": torch.tensor([1.0, 5.0], dtype=FLOAT64)}
        return ExpectationMaximization(expectation, maximisation, bound, rounds=30, initial_values=lambda key: start)


Fit = Callable[[], tuple[Posterior, Any]]
LAPLACE = Laplace(tuning=None, batch_size=6)
ONLINE = OnlineLaplace(MAP(8, 6, Adam()), LAPLACE, Evidence(PerLayer()), rounds=2)


@dataclass(frozen=True)
class Case:
    """A fit under a name. `integrator` is given wherever outputs have moments, so that no default is recorded.

    `member` is the one that predicts, where the posterior holds several. Without `refit` the stored posterior alone is
    looked at: its fit is long, or multiplies the last bits. `given` is what `load` takes beside the network.
    """

    name: str
    problem: Any
    method: Method | None
    integrator: Integrator | None = None
    member: int | None = None
    by: Fit | None = None
    refit: bool = True
    given: dict[str, Any] = dataclasses.field(default_factory=dict)

    def fit(self, **settings: Any) -> tuple[Posterior, Any]:
        """The posterior and the trace; None for a trace where no run has left one."""
        if self.by is not None:
            return self.by()
        assert self.method is not None
        return infer(self.method, self.problem.joint(), self.problem.data(), seed=3, progress=False, **settings)


# ---- fits that are not one call of infer


def after_map(problem: Any, method: Method, steps: int = 20) -> tuple[Posterior, Any]:
    q, _ = infer(MAP(steps, 6, Adam()), problem.joint(), problem.data(), seed=5, progress=False)
    return infer(method, problem.joint(), problem.data(), start=q, seed=3, progress=False)


def next_problem(structure: Any, **of_first: Any) -> tuple[Posterior, Any]:
    first, _ = after_map(KNOWN, Laplace(tuning=None, structure=structure, **of_first))
    joint = continued(KNOWN.joint(), first)
    q, _ = infer(MAP(8, None, Adam()), joint, KNOWN.data(shift=2), start=first, seed=3, progress=False)
    return infer(
        Laplace(tuning=None, structure=structure), q.joint, KNOWN.data(shift=2), start=q, seed=3, progress=False
    )


def by_validation() -> tuple[Posterior, Any]:
    q, trace = after_map(CLASSES, Laplace(tuning=None))
    return retuned(q, ValidationGrid(0.01, 100.0, 5), validation=CLASSES.data(shift=4)), trace  # type: ignore[type-var]


def by_own_loop() -> tuple[Posterior, Any]:
    module, (x, y) = KNOWN.model(), KNOWN.data()
    then = {"hess_init": 1.0, "beta2": 0.99999}  # the defaults of 0.1.0
    optimizer = IVON(module.parameters(), lr=0.05, ess=ROWS, weight_decay=0.1, seed=3, **then)
    for _ in range(8):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (module(x) - y).square().mean().backward()
        optimizer.step()
    return optimizer.posterior(KNOWN.joint(), module), None


def of_two_kinds() -> tuple[Posterior, Any]:
    point, _ = infer(MAP(8, 6, Adam()), CLASSES.joint(), CLASSES.data(), seed=3, progress=False)
    wide, trace = infer(MeanField(8, 6, Adam()), CLASSES.joint(), CLASSES.data(), seed=3, progress=False)
    return Mixture([point, wide], torch.tensor([0.25, 0.75])), trace


def validated() -> tuple[Posterior, Any]:
    joint, rows, others = REGRESSION.joint(), REGRESSION.data(), REGRESSION.data(shift=4)
    return infer(MAP(12, 6, Adam()), joint, rows, validation=others, seed=3, progress=False)


MAPS = [
    Case("map", REGRESSION, MAP(8, 6, Adam())),
    Case("map_classes", CLASSES, MAP(8, None, Adam(0.05))),
    Case("map_double", REGRESSION.but(**DOUBLE), MAP(8, 6, Adam())),
    Case("map_constant", CLASSES, MAP(8, 6, SGD(0.05), Constant())),
    Case("map_cosine", CLASSES, MAP(8, 6, SGD(0.05), Cosine(warmup=0.25, final=0.125))),
    Case("map_steps", CLASSES, MAP(8, 6, SGD(0.05), Steps((0.5, 0.75), 0.25))),
    Case("map_warmup", CLASSES, MAP(8, 6, SGD(0.05), Warmup(0.5))),
    Case("map_cyclic", CLASSES, MAP(8, 6, SGD(0.05), Cyclic(3, 0.125))),
    Case("map_proximal", REGRESSION.but(prior=LaplacePrior(0.1)), MAP(8, None, Adam(0.05), proximal=True)),
    Case("map_validated", REGRESSION, None, by=validated),
    Case("map_normed", NORMED, MAP(8, 6, Adam())),
    Case("map_convolving", IMAGES, MAP(8, 6, Adam())),
    Case("map_frozen", REGRESSION.but(trained=("2.*",)), MAP(8, 6, Adam())),
    Case("map_cold", REGRESSION.but(tempering=Tempering.cold(0.25)), MAP(8, 6, Adam())),
    Case("map_members", CLASSES.but(prior=Normal(torch.tensor([0.25, 0.5, 1.0]))), MAP(8, 6, Adam()), member=1),
    Case(
        "map_tempered_members",
        KNOWN.but(tempering=Tempering.tempered(torch.tensor([0.5, 2.0]))),
        MAP(8, 6, Adam()),
        member=1,
    ),
    Case("map_density", Parameters(), MAP(8, None, Adam())),
]

LAPLACES = [
    Case("laplace", CLASSES, LAPLACE, Probit()),
    Case("laplace_bridge", CLASSES, LAPLACE, LaplaceBridge()),
    Case("laplace_monte_carlo", CLASSES, LAPLACE, MonteCarlo(16)),
    Case("laplace_double", KNOWN.but(**DOUBLE), LAPLACE, Exact()),
    *(
        Case(f"laplace_{name}", problem, Laplace(curvature, structure, tuning=None, batch_size=6), integrator)
        for name, problem, curvature, structure, integrator in (
            ("full", CLASSES, GaussNewton(), Full(), Probit()),
            ("diagonal", KNOWN, GaussNewton(), Diagonal(), Exact()),
            ("blocks", CLASSES, GaussNewton(), BlockDiagonal(), Probit()),
            ("kronecker", CLASSES, GaussNewton(), Kronecker(), Probit()),
            ("kronecker_damping", KNOWN, GaussNewton(), Kronecker(factored_damping=True), Exact()),
            ("corrected_kronecker", CLASSES, GaussNewton(), CorrectedKronecker(), Probit()),
            ("low_rank", CLASSES, GaussNewton(), LowRank(rank=3, iterations=8), Probit()),
            ("hutchinson", WIDE, Hessian(), Hutchinson(probes=4), Exact()),
            ("hessian", WIDE, Hessian(), Full(), Exact()),
            ("hessian_blocks", WIDE, Hessian(), BlockDiagonal(), Exact()),
            ("drawn_fisher", CLASSES, MonteCarloFisher(2), Kronecker(), Probit()),
            ("empirical_fisher", CLASSES, EmpiricalFisher(), Full(), Probit()),
            ("convolving", IMAGES, GaussNewton(), Kronecker(), Probit()),
            ("normed", NORMED, GaussNewton(), Kronecker(), Exact()),
        )
    ),
    *(
        Case(f"laplace_{name}", CLASSES, Laplace(tuning=None, subset=subset, batch_size=6), Probit())
        for name, subset in (
            ("all_weights", AllWeights()),
            ("last_layer", LastLayer()),
            ("matching", Matching("0.*")),
            ("largest_variance", LargestVariance(5)),
        )
    ),
    Case("laplace_some_random", CLASSES.but(random=("2.*",)), Laplace(tuning=None), Probit()),
    *(
        Case(
            f"laplace_{name}", KNOWN, None, Exact(), by=partial(after_map, KNOWN, Laplace(tuning=tuning, batch_size=6))
        )
        for name, tuning in (
            ("evidence", Evidence()),
            ("evidence_per_tensor", Evidence(PerTensor(), noise=False)),
            ("mackay", MacKay(Shared())),
            ("mackay_per_layer", MacKay(PerLayer())),
        )
    ),
    Case("laplace_validation_grid", CLASSES, None, Probit(), by=by_validation),
    Case("laplace_members", CLASSES.but(prior=Normal(torch.tensor([0.25, 0.5]))), Laplace(tuning=None), Probit(), 1),
    Case(
        "laplace_density", Parameters(), None, by=partial(after_map, Parameters(), Laplace(Hessian(), tuning=None), 200)
    ),
    Case("continued_full", KNOWN, None, Exact(), by=partial(next_problem, Full())),
    Case("continued_kronecker", KNOWN, None, Exact(), by=partial(next_problem, Kronecker())),
    Case("continued_diagonal", KNOWN, None, Exact(), by=partial(next_problem, Diagonal())),
    Case(
        "online_laplace",
        REGRESSION,
        dataclasses.replace(ONLINE, laplace=Laplace(structure=Kronecker(), batch_size=6, tuning=None), rounds=3),
        Exact(),
    ),
    Case("conjugate", LINEAR, Conjugate(batch_size=6), Exact()),
    Case("conjugate_double", LINEAR.but(**DOUBLE), Conjugate(), Exact()),
]

VARIATIONAL = [
    Case("mean_field", REGRESSION, MeanField(8, 6, Adam())),
    Case("mean_field_double", CLASSES.but(**DOUBLE), MeanField(8, 6, Adam())),
    Case("mean_field_normed", NORMED, MeanField(8, 6, Adam())),
    Case("mean_field_warmup", CLASSES, MeanField(8, None, Adam(), schedule=Cosine(), kl_schedule=Warmup(0.5))),
    Case("mean_field_members", CLASSES.but(prior=Normal(torch.tensor([0.25, 0.5]))), MeanField(8, 6, Adam()), member=1),
    Case("mean_field_density", Parameters(), MeanField(8, None, Adam())),
    *(
        Case(f"mean_field_{name}", REGRESSION, MeanField(8, 6, Adam(), estimator=estimator))
        for name, estimator in (
            ("weight_sampling", WeightSampling(2)),
            ("antithetic", WeightSampling(2, antithetic=True)),
            ("local", LocalReparameterisation()),
            ("flipout", Flipout(draws=2)),
            ("stick_the_landing", StickTheLanding()),
            ("score_function", ScoreFunction(4)),
            ("second_order", SecondOrder()),
        )
    ),
    Case("full_rank", REGRESSION, FullRank(8, 6, 2, Adam())),
    Case("low_rank_gaussian", REGRESSION, LowRankGaussian(2, 8, 6, 2, Adam())),
    Case("natural_gradient", REGRESSION, NaturalGradient(8, 6, optimizer=Adam())),
    Case(
        "natural_gradient_antithetic",
        CLASSES,
        NaturalGradient(8, None, optimizer=Adam(), estimator=WeightSampling(2, antithetic=True)),
    ),
    Case(
        "natural_gradient_second_order",
        CLASSES,
        NaturalGradient(8, None, optimizer=Adam(), schedule=Cosine(), estimator=SecondOrder()),
    ),
    Case("dropout", DROPPING, MCDropout(8, 6, Adam(), Constant())),
    Case("dropout_masks_of_rows", DROPPING, MCDropout(8, 6, Adam(), Constant(), one_mask_a_draw=False)),
    Case(
        "dropout_learnt",
        CLASSES.but(architecture=learnt_dropping),
        MCDropout(8, None, Adam(), Constant(), one_mask_a_batch=True, temperature=0.1),
    ),
    Case("swag", REGRESSION, SWAG(MAP(12, 6, SGD(0.05)), every=2, rank=3, warmup=1)),
    Case("swag_diagonal", CLASSES, SWAG(MAP(12, None, Adam()), every=3, rank=0)),
    Case("swag_normed", NORMED, SWAG(MAP(12, 6, SGD(0.05)), every=2, rank=2)),
    Case("ivon", KNOWN, None, by=by_own_loop),
]

MIXTURES = [
    Case("ensemble", REGRESSION, Ensemble(MAP(8, 6, Adam()), 3)),
    Case("ensemble_normed", NORMED, Ensemble(MAP(8, 6, Adam()), 2)),
    Case("ensemble_of_mean_fields", CLASSES, Ensemble(MeanField(8, 6, Adam()), 2)),
    Case("ensemble_in_turn", KNOWN, Ensemble(ONLINE, 2), Exact()),
    Case("mixture", CLASSES, None, by=of_two_kinds),
]

CHAINS = [
    Case("nuts", SAMPLED, NUTS(draws=4, warmup=4, chains=2, thin=2, max_depth=3)),
    Case("nuts_double", CLASSES.but(**DOUBLE), NUTS(draws=4, warmup=4, chains=2, max_depth=3)),
    Case("nuts_dense_mass", CLASSES, NUTS(3, 20, 2, step_size=0.1, max_depth=2, mass=DenseMass())),
    Case("nuts_diagonal_mass", CLASSES, NUTS(3, 20, 2, step_size=0.1, max_depth=2, mass=DiagonalMass())),
    Case("nuts_unit_mass", CLASSES, NUTS(3, 8, 2, step_size=0.1, max_depth=2, mass=UnitMass())),
    Case("nuts_density", Parameters(), NUTS(draws=6, warmup=8, chains=2, max_depth=3)),
    Case("hmc", SAMPLED, HMC(draws=4, warmup=4, chains=2, thin=2, steps=3)),
    Case("hmc_one_chain", CLASSES, HMC(4, 4, 1, steps=3)),
    Case("mala", SAMPLED, MALA(draws=4, warmup=4, chains=2, thin=2, step_size=2.0**-13)),
    Case("metropolis", CLASSES, Metropolis(draws=6, warmup=15, chains=2, thin=4, step_size=0.0625)),
    Case("langevin", CLASSES, Langevin(draws=4, warmup=4, chains=2, thin=2, step_size=1e-3)),
    *(
        Case(f"{kind.__name__.lower()}{of}", problem, kind(draws=4, warmup=3, thin=2, **settings))
        for kind in (SGLD, SGHMC)
        for of, problem, settings in (
            ("", REGRESSION, {"chains": 2, "batch_size": 6, "step_size": 1e-3, "preconditioner": Plain()}),
            ("_rmsprop", REGRESSION, {"chains": 2, "batch_size": 6, "preconditioner": RMSprop(0.9)}),
            ("_cycles", CLASSES, {"chains": 1, "batch_size": 6, "schedule": Cycles(length=5, explore=0.5)}),
            ("_normed", NORMED, {"chains": 2, "batch_size": 6, "step_size": 1e-3}),
            ("_all_rows", CLASSES, {"chains": 2, "batch_size": None, "step_size": 1e-2}),
        )
    ),
]

HYPER = [
    *(
        Case(
            f"variational_em_{of}",
            problem,
            VariationalEM(method, steps, rounds=3, draws=4, fit=fit, batch_size=6),
            integrator,
        )
        for of, problem, method, steps, fit, integrator in (
            (
                "mean_field",
                REGRESSION,
                MeanField(8, 6, Adam()),
                (PriorScale(), NoiseScale(Gamma(2.0, 0.1))),
                None,
                None,
            ),
            ("conjugate", LINEAR, Conjugate(6), (PriorScale(Shared()), NoiseScale()), None, Exact()),
            ("mackay", KNOWN, LAPLACE, (MacKayUpdate(),), MAP(8, 6, Adam()), Exact()),
            ("laplace", KNOWN, LAPLACE, (PriorScale(),), MAP(8, 6, Adam()), Exact()),
            ("nuts", SAMPLED, NUTS(6, 3, 2, max_depth=3), (PriorScale(),), None, None),
            ("sgld", REGRESSION, SGLD(6, 3, 2, 1e-3, 6, thin=2), (PriorScale(), NoiseScale()), None, None),
        )
    ),
    Case(
        "ensemble_of_variational_ems",
        REGRESSION,
        Ensemble(VariationalEM(MeanField(8, 6, Adam()), (PriorScale(), NoiseScale()), rounds=2, draws=4), 2),
    ),
    Case("expectation_maximization", Counts(), Counts().method()),
]

LIKELIHOODS = [
    Case(f"{of}_{name}", problem, method, integrator)
    for name, problem, marginal in (
        ("gaussian_known", KNOWN, Exact()),
        (
            "gaussian_of_outputs",
            KNOWN.but(outputs=2, likelihood=Gaussian((0.5, 0.75)), targets=lambda x: x[:, :2] / 2),
            Exact(),
        ),
        ("heteroscedastic", REGRESSION.but(outputs=2, likelihood=Heteroscedastic()), MonteCarlo(16)),
        ("categorical", CLASSES, Exact()),
        ("bernoulli", BINARY, ProbitPhi()),
        ("bernoulli_exact", BINARY, Exact()),
        ("poisson", REGRESSION.but(likelihood=Poisson(), targets=counts), MonteCarlo(16)),
        ("student_t", REGRESSION.but(likelihood=StudentT(4.0, 0.5)), MonteCarlo(16)),
        ("student_t_learnt", REGRESSION.but(likelihood=StudentT(6.0, 0.5, learn=True)), MonteCarlo(16)),
    )
    for of, method, integrator in (
        ("map", MAP(8, 6, Adam()), None),
        ("laplace", LAPLACE, marginal),
        ("mean_field", MeanField(8, 6, Adam()), None),
    )
]

PRIORS: dict[str, Prior] = {
    "normal_mean": Normal(0.75, 0.125),
    "normal_of_weights": Normal(0.5 + numbers(1, 16, shift=5, dtype=FLOAT32).abs()),
    "laplace": LaplacePrior(0.5),
    "student_t": StudentTPrior(5.0, 0.5),
    "cauchy": Cauchy(0.5),
    "logistic": Logistic(0.5),
    "horseshoe": Horseshoe(0.5),
    "scale_mixture": ScaleMixture((0.25, 0.75), (1.5, 0.25)),
    "group_lasso_rows": GroupLasso(2.0),
    "group_lasso_columns": GroupLasso(1.5, "columns"),
    "fan_in": Layerwise.of(FanIn(gain=1.5)),
    "layerwise": Layerwise({"0.weight": He(), "2.weight": Glorot(), "*": Normal(0.5, 0.125)}),
    "layerwise_of_kinds": Layerwise({"*.weight": GroupLasso(3.0), "*": LaplacePrior(0.5)}),
    "edge_of_chaos": Layerwise({"*.weight": EdgeOfChaos("tanh", bias_variance=0.05), "*": Normal(0.05**0.5)}),
    "hierarchical": Hierarchical(Normal(0.5), LogNormal(1.25, 0.25)),
    "hierarchical_half_cauchy": Hierarchical(LaplacePrior(0.5), HalfCauchy(0.75)),
    "around": around({"0.weight": numbers(3, 3, shift=5, dtype=FLOAT32)}, 0.5, others=Normal(1.0)),
    "tabulated": Tabulated.of(lambda x: -0.25 * x**4 + 0.125 * x, points=65),
    "tabulated_kink": Tabulated.of(lambda x: -0.25 * x**2 - 2.0 * x.abs(), kink=True, points=65),
}
OF_PRIORS = [
    Case(f"{of}_prior_{name}", KNOWN.but(prior=prior), method)
    for name, prior in PRIORS.items()
    for of, method in (
        ("map", MAP(8, 6, Adam())),
        ("mean_field", MeanField(8, 6, Adam())),
        ("hmc", HMC(3, 2, 2, steps=2, step_size=0.03125)),
    )
]

CASES = {
    case.name: case for case in (*MAPS, *LAPLACES, *VARIATIONAL, *MIXTURES, *CHAINS, *HYPER, *LIKELIHOODS, *OF_PRIORS)
}


@dataclass(frozen=True)
class Stopped:
    """A run that ended after `step`, when it was stored after each `every` steps."""

    case: Case
    every: int
    step: int
    watched: bool = False

    def fit(self, path: Path, *callbacks: Callback) -> tuple[Posterior, Any]:
        """The run that is kept in this folder: what was begun there goes on."""
        watching: dict[str, Any] = {"validation": self.case.problem.data(shift=4)} if self.watched else {}
        hooks = [EarlyStopping(patience=2), *callbacks] if self.watched else list(callbacks)
        where = Checkpoint(path, seconds=None, steps=self.every)
        return self.case.fit(checkpoint=where, callbacks=hooks, **watching)


STOPPED = {
    name: Stopped(Case(name, problem, method, integrator), every, step, name == "watched")
    for name, problem, method, integrator, every, step in (
        ("map", REGRESSION, MAP(12, 6, Adam()), None, 4, 6),
        *(
            (f"map_{type(schedule).__name__.lower()}", CLASSES, MAP(12, 6, SGD(0.05), schedule), None, 4, 6)
            for schedule in (Constant(), Cosine(0.25), Steps(), Warmup(0.5), Cyclic(3))
        ),
        ("map_normed", NORMED, MAP(12, 6, Adam()), None, 4, 6),
        ("watched", KNOWN, MAP(40, 6, Adam(0.05)), None, 4, 6),
        ("laplace", CLASSES, Laplace(tuning=None, batch_size=4), Probit(), 2, 3),
        ("online_laplace", KNOWN, ONLINE, Exact(), 3, 7),
        ("mean_field", REGRESSION, MeanField(12, 6, Adam()), None, 4, 6),
        ("mean_field_local", CLASSES, MeanField(12, 6, Adam(), estimator=LocalReparameterisation()), None, 4, 6),
        ("full_rank", REGRESSION, FullRank(12, 6, optimizer=Adam()), None, 4, 6),
        ("natural_gradient", REGRESSION, NaturalGradient(12, 6, optimizer=Adam()), None, 4, 6),
        ("dropout", DROPPING, MCDropout(12, 6, Adam(), Constant(), temperature=0.1), None, 4, 6),
        ("swag", NORMED, SWAG(MAP(12, 6, SGD(0.05)), every=2, rank=2), None, 4, 6),
        ("ensemble", REGRESSION, Ensemble(MAP(12, 6, Adam()), 3), None, 4, 6),
        ("ensemble_in_turn", KNOWN, Ensemble(ONLINE, 2), Exact(), 4, 9),
        ("nuts", SAMPLED, NUTS(draws=6, warmup=4, chains=2, max_depth=3), None, 3, 8),
        ("nuts_warming_up", CLASSES, NUTS(3, 20, 2, max_depth=2, mass=DenseMass()), None, 6, 13),
        ("nuts_density", Parameters(), NUTS(draws=6, warmup=4, chains=2, max_depth=3), None, 3, 8),
        ("hmc", SAMPLED, HMC(draws=6, warmup=4, chains=2, steps=2), None, 3, 8),
        ("sgld_cycles", CLASSES, SGLD(6, 3, 2, batch_size=6, thin=1, schedule=Cycles(5, explore=0.5)), None, 3, 7),
        ("sghmc", REGRESSION, SGHMC(4, 3, 2, step_size=1e-3, batch_size=6, thin=2), None, 4, 9),
        ("sghmc_rmsprop", NORMED, SGHMC(4, 3, 2, batch_size=6, thin=2, preconditioner=RMSprop(0.9)), None, 4, 9),
        ("variational_em", REGRESSION, VariationalEM(MeanField(8, 6, Adam()), (PriorScale(),), 3, draws=4), None, 4, 9),
        ("variational_em_nuts", SAMPLED, VariationalEM(NUTS(6, 3, 2, max_depth=3), (PriorScale(),), 3), None, 4, 10),
    )
}


def tasks() -> list[Task]:
    """Two fits for an executor; the second begins where the first ends."""
    first, validation = (
        Task("map, seed 1", MAP(8, 6, Adam()), REGRESSION.joint(), REGRESSION.data(), seed=1),
        KNOWN.data(shift=4),
    )
    q, _ = infer(MAP(8, 6, Adam()), KNOWN.joint(), KNOWN.data(), seed=2, progress=False)
    return [first, Task("laplace", Laplace(tuning=None), KNOWN.joint(), KNOWN.data(), q, validation, seed=2)]


TABLE = "\n".join(
    ["length,colour,weight"]
    + [f"{a:.4f},{('red', 'blue')[row % 2]},{b:.4f}" for row, (a, b) in enumerate(numbers(40, 2, shift=8).tolist())]
)
WITH_DEFAULTS = {
    "moons": ("two-moons", "--method", "laplace", "--steps", "50", "--hidden", "5"),
    "table": ("table.csv", "--target", "weight", "--method", "map", "--steps", "20", "--hidden", "3"),
}
DEFAULTS = ("--batch-size", "128", "--step-size", "0.01", "--prior-scale", "1")  # those of 0.1.0
SPELLED_OUT = {
    "moons_untuned": (*WITH_DEFAULTS["moons"], "--no-tune", *DEFAULTS),
    "table_known": (*WITH_DEFAULTS["table"], "--noise", "0.5", *DEFAULTS),
}
COMMANDS = {**WITH_DEFAULTS, **SPELLED_OUT}
FIT = ("--seed", "1", "--device", "cpu", "--checkpoint-steps", "7")
ASKED = {"predict": ("predict",), "evaluate": ("evaluate", "--json")}
