"""One row for each method (and each way of running it that has code of its own): what the common suite runs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity import Joint
from posterity.curvature import (
    BlockDiagonal,
    CorrectedKronecker,
    Diagonal,
    EmpiricalFisher,
    Full,
    Hessian,
    Hutchinson,
    Kronecker,
    LowRank,
    MonteCarloFisher,
)
from posterity.evidence import Gamma, MacKay, NoiseScale, PerLayer, PriorScale
from posterity.inference import Method
from posterity.kernels import DenseMass
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Probit
from posterity.methods import (
    HMC,
    MALA,
    MAMS,
    MAP,
    MCLMC,
    NUTS,
    SGHMC,
    SGLD,
    SWAG,
    ChEES,
    Conjugate,
    Ensemble,
    ExpectationPropagation,
    FullRank,
    Langevin,
    Laplace,
    LowRankGaussian,
    MCDropout,
    MeanField,
    Metropolis,
    NaturalGradient,
    OnlineLaplace,
    ProbabilisticBackpropagation,
    RMSprop,
    VariationalEM,
)
from posterity.methods.parts.gradients import (
    Flipout,
    LocalReparameterisation,
    ScoreFunction,
    SecondOrder,
    StickTheLanding,
    WeightSampling,
)
from posterity.methods.parts.subset import LargestVariance, LastLayer, Matching
from posterity.networks import MLP, ConcreteDropout
from posterity.numerics import Key
from posterity.optim import SGD, Adam, Cosine, Cycles, Warmup
from posterity.priors import Laplace as LaplacePrior
from posterity.priors import Normal

ROWS, COLUMNS = 20, 3
Rows = tuple[Tensor, Tensor]


def inputs(dtype: torch.dtype, rows: int = ROWS) -> Tensor:
    return Key(1).normal((rows, COLUMNS), torch.float64, "cpu").to(torch.get_default_device(), dtype)


def numbers(dtype: torch.dtype) -> Rows:
    x = inputs(torch.float64)
    y = torch.sin(x.sum(-1, keepdim=True)) + 0.2 * Key(2).normal((ROWS, 1), torch.float64, "cpu").to(x)
    return x.to(dtype), y.to(dtype)


def labels(dtype: torch.dtype) -> Rows:
    x = inputs(torch.float64)
    return x.to(dtype), (x.square().sum(-1) > 2.5).long()


def network(sizes: list[int], dtype: torch.dtype, dropout: float = 0.0, activation: str = "tanh") -> MLP:
    """The same weights every time, whatever was drawn before."""
    net = MLP(sizes, activation=activation, dropout=dropout).to(dtype)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(0.5 * Key(3).fold(name).normal(tuple(parameter.shape), torch.float64, "cpu"))
    return net


def regression(dtype: torch.dtype) -> Joint:
    return Joint(network([COLUMNS, 4, 1], dtype), Gaussian(0.3, learn=True), Normal(0.7), ROWS)


def relu_regression(dtype: torch.dtype) -> Joint:
    return Joint(network([COLUMNS, 4, 1], dtype, activation="relu"), Gaussian(0.3), Normal(0.7), ROWS)


def unscaled_regression(dtype: torch.dtype) -> Joint:
    """Noise and prior scale are left to the method; tests of members give the prior."""
    return Joint(network([COLUMNS, 4, 1], dtype, activation="relu"), Gaussian(), Normal(), ROWS)


def noisy_regression(dtype: torch.dtype) -> Joint:
    """With a proper prior on the noise, as samplers need it."""
    likelihood = Gaussian(0.3, learn=True, log_scale_prior=(-1.0, 0.5))
    return Joint(network([COLUMNS, 4, 1], dtype), likelihood, Normal(0.7), ROWS)


def classification(dtype: torch.dtype) -> Joint:
    return Joint(network([COLUMNS, 4, 2], dtype), Categorical(), Normal(0.7), ROWS)


def sparse_regression(dtype: torch.dtype) -> Joint:
    """Under a prior with a kink."""
    return Joint(network([COLUMNS, 4, 1], dtype), Gaussian(0.3, learn=True), LaplacePrior(0.1), ROWS)


def linear_regression(dtype: torch.dtype) -> Joint:
    return Joint(network([COLUMNS, 1], dtype), Gaussian(0.3), Normal(0.7), ROWS)


def linear_labels(dtype: torch.dtype) -> Joint:
    return Joint(network([COLUMNS, 1], dtype), Bernoulli(), Normal(0.7), ROWS)


def linear_quantiles(dtype: torch.dtype) -> Joint:
    return Joint(network([COLUMNS, 1], dtype), Probit(), Normal(0.7), ROWS)


def tunable_regression(dtype: torch.dtype) -> Joint:
    """At weights so far from zero that the evidence has a maximum."""
    return Joint(network([COLUMNS, 4, 1], dtype), Gaussian(0.8), Normal(0.7), ROWS)


def narrow_regression(dtype: torch.dtype) -> Joint:
    """Noise so wide and a prior so narrow that the exact Hessian is positive definite wherever it is taken."""
    return Joint(network([COLUMNS, 4, 1], dtype), Gaussian(3.0), Normal(0.2), ROWS)


def dropping_regression(dtype: torch.dtype) -> Joint:
    return Joint(network([COLUMNS, 4, 1], dtype, dropout=0.3), Gaussian(0.3, learn=True), Normal(0.7), ROWS)


def learnt_dropping(dtype: torch.dtype) -> Joint:
    net = network([COLUMNS, 4, 2], dtype)
    layers = torch.nn.Sequential(net[0], net[1], ConcreteDropout(net[2], rate=0.3))
    return Joint(layers, Categorical(), Normal(0.7), ROWS)


@dataclass(frozen=True)
class Case:
    """A method, and factories of the problem and of the data that it is run on.

    `draws`: whether the seed matters. `every_row`: whether every step, or the run, sees every row once. `members`:
    whether it takes theta (M, P). `noise_of_device`: whether a GPU draws other numbers than the CPU.
    """

    name: str
    method: Method
    joint: Callable[[torch.dtype], Joint]
    data: Callable[[torch.dtype], Rows]
    draws: bool = False
    every_row: bool = True
    members: bool = True
    noise_of_device: bool = False


CASES = [
    Case("map", MAP(steps=11, batch_size=6), regression, numbers, draws=True, every_row=False),
    Case("map on all rows", MAP(steps=11, batch_size=None), classification, labels),
    Case(
        "map by sgd",
        MAP(steps=11, batch_size=6, optimizer=SGD(0.05), schedule=Cosine(warmup=0.2)),
        classification,
        labels,
        draws=True,
        every_row=False,
    ),
    Case("map by proximal steps", MAP(11, None, Adam(0.05), proximal=True), sparse_regression, numbers),
    Case(
        "map by proximal sgd",
        MAP(steps=11, batch_size=6, optimizer=SGD(0.05), schedule=Cosine(warmup=0.2), proximal=True),
        sparse_regression,
        numbers,
        draws=True,
        every_row=False,
    ),
    Case("laplace", Laplace(tuning=None, batch_size=6), classification, labels),
    Case("laplace, hessian", Laplace(tuning=None, curvature=Hessian(), batch_size=6), narrow_regression, numbers),
    Case("laplace, diagonal", Laplace(tuning=None, structure=Diagonal(), batch_size=6), regression, numbers),
    Case(
        "laplace, diagonal of the hessian",
        Laplace(tuning=None, curvature=Hessian(), structure=Diagonal(), batch_size=6),
        narrow_regression,
        numbers,
    ),
    Case(
        "online laplace",
        OnlineLaplace(MAP(steps=7, batch_size=6), Laplace(structure=Kronecker(), batch_size=6, tuning=None), rounds=3),
        regression,
        numbers,
        draws=True,
        every_row=False,
        members=False,
    ),
    Case("laplace, tuned", Laplace(batch_size=6), tunable_regression, numbers),
    Case("laplace, tuned, of classes", Laplace(structure=Full(), batch_size=6), classification, labels),
    Case(
        "laplace, kronecker, tuned by layer",
        Laplace(structure=Kronecker(), tuning=MacKay(groups=PerLayer()), batch_size=6),
        tunable_regression,
        numbers,
    ),
    Case("laplace, kronecker", Laplace(tuning=None, structure=Kronecker(), batch_size=6), classification, labels),
    Case(
        "laplace, kronecker, factored damping",
        Laplace(tuning=None, structure=Kronecker(factored_damping=True), batch_size=6),
        regression,
        numbers,
    ),
    Case(
        "laplace, corrected kronecker",
        Laplace(tuning=None, structure=CorrectedKronecker(), batch_size=6),
        classification,
        labels,
    ),
    Case("laplace, blocks", Laplace(tuning=None, structure=BlockDiagonal(), batch_size=6), classification, labels),
    Case(
        "laplace, blocks of the hessian",
        Laplace(tuning=None, curvature=Hessian(), structure=BlockDiagonal(), batch_size=6),
        narrow_regression,
        numbers,
    ),
    Case(
        "laplace, low rank",
        Laplace(tuning=None, structure=LowRank(rank=3, iterations=8), batch_size=6),
        classification,
        labels,
        draws=True,
    ),
    Case(
        "laplace, hutchinson",
        Laplace(tuning=None, curvature=Hessian(), structure=Hutchinson(probes=4), batch_size=6),
        narrow_regression,
        numbers,
        draws=True,
    ),
    Case(
        "laplace, drawn fisher",
        Laplace(tuning=None, curvature=MonteCarloFisher(2), structure=Kronecker(), batch_size=6),
        classification,
        labels,
        draws=True,
        every_row=False,
    ),
    Case(
        "laplace, empirical fisher",
        Laplace(tuning=None, curvature=EmpiricalFisher(), batch_size=6),
        classification,
        labels,
    ),
    Case("laplace, last layer", Laplace(tuning=None, subset=LastLayer(), batch_size=6), classification, labels),
    Case("laplace, a pattern", Laplace(tuning=None, subset=Matching("0.*"), batch_size=6), regression, numbers),
    Case(
        "laplace, largest variances",
        Laplace(tuning=None, subset=LargestVariance(7), batch_size=6),
        classification,
        labels,
        members=False,
    ),
    Case(
        "mean field",
        MeanField(steps=11, batch_size=6),
        regression,
        numbers,
        draws=True,
        every_row=False,
        noise_of_device=True,
    ),
    Case(
        "mean field, mirrored draws on all rows",
        MeanField(steps=11, batch_size=None, estimator=WeightSampling(3, antithetic=True), kl_schedule=Warmup(0.5)),
        classification,
        labels,
        draws=True,
        noise_of_device=True,
    ),
    *(
        Case(
            f"mean field by {type(estimator).__name__}",
            MeanField(steps=11, batch_size=6, estimator=estimator),
            regression,
            numbers,
            draws=True,
            every_row=False,
            noise_of_device=True,
        )
        for estimator in (LocalReparameterisation(), Flipout(draws=2), StickTheLanding(), ScoreFunction(4))
    ),
    Case(
        "full rank",
        FullRank(steps=11, batch_size=6, draws=2),
        regression,
        numbers,
        draws=True,
        every_row=False,
        noise_of_device=True,
    ),
    Case(
        "low rank gaussian",
        LowRankGaussian(rank=3, steps=11, batch_size=6, draws=2),
        regression,
        numbers,
        draws=True,
        every_row=False,
        noise_of_device=True,
    ),
    Case(
        "dropout",
        MCDropout(steps=11, batch_size=6),
        dropping_regression,
        numbers,
        draws=True,
        every_row=False,
        noise_of_device=True,
    ),
    Case(
        "natural gradient",
        NaturalGradient(steps=11, batch_size=6),
        regression,
        numbers,
        draws=True,
        every_row=False,
        noise_of_device=True,
    ),
    Case(
        "swag",
        SWAG(MAP(steps=11, batch_size=6, optimizer=SGD(0.05)), every=2, rank=3, warmup=1),
        regression,
        numbers,
        draws=True,
        every_row=False,
    ),
    Case("swag, diagonal", SWAG(MAP(steps=11, batch_size=None), every=3, rank=0), classification, labels),
    *(
        Case(
            f"natural gradient by {type(estimator).__name__}",
            NaturalGradient(steps=11, batch_size=None, estimator=estimator, beta2=0.9, schedule=Cosine()),
            classification,
            labels,
            draws=not isinstance(estimator, SecondOrder),
            noise_of_device=True,
        )
        for estimator in (WeightSampling(2, antithetic=True), StickTheLanding(), SecondOrder())
    ),
    Case(
        "dropout, one mask a batch on all rows, learnt rates",
        MCDropout(steps=11, batch_size=None, one_mask_a_batch=True),
        learnt_dropping,
        labels,
        draws=True,
        noise_of_device=True,
    ),
    *(
        Case(f"pbp{of}", ProbabilisticBackpropagation(passes=2), joint, numbers, draws=True, every_row=False)
        for of, joint in (("", relu_regression), (", scales left out", unscaled_regression))
    ),
    Case("conjugate", Conjugate(batch_size=6), linear_regression, numbers, members=False),
    Case("expectation propagation", ExpectationPropagation(tolerance=1e-4), linear_labels, labels, members=False),
    Case(
        "expectation propagation, sequential",
        ExpectationPropagation(order="sequential", tolerance=1e-8),
        linear_quantiles,
        labels,
        members=False,
    ),
    Case(
        "ensemble",
        Ensemble(MAP(steps=11, batch_size=6), size=3),
        regression,
        numbers,
        draws=True,
        every_row=False,
        members=False,
    ),
    Case(
        "ensemble of mean fields",
        Ensemble(MeanField(steps=11, batch_size=6), size=3),
        classification,
        labels,
        draws=True,
        every_row=False,
        members=False,
        noise_of_device=True,
    ),
    Case(
        "ensemble in turn",
        Ensemble(OnlineLaplace(MAP(steps=7, batch_size=6), Laplace(batch_size=6, tuning=None), rounds=2), size=2),
        tunable_regression,
        numbers,
        draws=True,
        every_row=False,
        members=False,
    ),
    *(
        Case(
            f"{kind.__name__.lower()}{of}",
            kind(draws=4, warmup=3, chains=chains, batch_size=6, thin=2, **settings),
            joint,
            data,
            draws=True,
            every_row=False,
            members=False,
            noise_of_device=True,
        )
        for kind in (SGLD, SGHMC)
        for of, chains, joint, data, settings in (
            ("", 3, regression, numbers, {"step_size": 1e-3}),
            (" by rmsprop", 3, regression, numbers, {"preconditioner": RMSprop(0.9)}),
            (", one chain in cycles", 1, classification, labels, {"schedule": Cycles(length=5, explore=0.5)}),
        )
    ),
    *(
        Case(
            f"{type(method).__name__.lower()}{of}", method, joint, data, draws=True, members=False, noise_of_device=True
        )
        for of, joint, data, method in (
            ("", noisy_regression, numbers, NUTS(draws=4, warmup=3, chains=3, thin=2, max_depth=3)),
            (", dense mass", classification, labels, NUTS(3, 20, 2, step_size=0.1, max_depth=2, mass=DenseMass())),
            ("", noisy_regression, numbers, HMC(draws=4, warmup=3, chains=3, thin=2, steps=3)),
            (", one chain", classification, labels, HMC(4, 3, 1, steps=3)),
            ("", noisy_regression, numbers, ChEES(draws=4, warmup=3, chains=3, thin=2, max_steps=4)),
            ("", classification, labels, MAMS(draws=4, warmup=20, chains=3, max_steps=3)),
            ("", noisy_regression, numbers, MCLMC(draws=4, warmup=3, chains=3, thin=2, steps=2)),
            ("", noisy_regression, numbers, MALA(draws=4, warmup=3, chains=3, thin=2)),
            ("", classification, labels, Metropolis(draws=8, warmup=15, chains=3, thin=2)),
            ("", classification, labels, Langevin(draws=4, warmup=3, chains=3, thin=2)),
        )
    ),
    Case(
        "sghmc on all rows",
        SGHMC(draws=4, warmup=3, chains=2, step_size=1e-2, batch_size=None, thin=2),
        classification,
        labels,
        draws=True,
        members=False,
        noise_of_device=True,
    ),
    *(
        Case(
            f"variational em of {of}",
            VariationalEM(method, (PriorScale(), *more), rounds=3, draws=4, fit=fit, batch_size=6),
            joint,
            data,
            draws=draws,
            every_row=not draws,
            members=False,
            noise_of_device=noisy,
        )
        for of, method, fit, more, joint, data, draws, noisy in (
            ("mean field", MeanField(7, 6), None, (NoiseScale(Gamma(2.0, 0.1)),), regression, numbers, True, True),
            ("conjugate", Conjugate(6), None, (NoiseScale(),), linear_regression, numbers, False, False),
            ("laplace", Laplace(batch_size=6, tuning=None), MAP(7, 6), (), tunable_regression, numbers, True, False),
            ("nuts", NUTS(6, 3, 3, max_depth=3), None, (), noisy_regression, numbers, True, True),
            ("sgld", SGLD(6, 3, 3, 1e-3, 6, thin=2), None, (NoiseScale(),), regression, numbers, True, True),
        )
    ),
    Case(
        "ensemble of variational ems",
        Ensemble(VariationalEM(MeanField(7, 6), (PriorScale(), NoiseScale()), rounds=2, draws=4), size=2),
        regression,
        numbers,
        draws=True,
        every_row=False,
        members=False,
        noise_of_device=True,
    ),
]
