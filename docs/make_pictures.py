"""Draws docs/pictures, one figure a method, all on the same 40 rows: python docs/make_pictures.py [METHOD ...].

Each shows the training rows, the mean and 95 % of the predictive distribution of a network with 30 tanh units (of a
linear model on 12 bumps, for methods that need one), and the part that comes from the weights. Noise and prior are
given and the same for all. Settings are the defaults, but for `draws` and chains that are as short as a picture allows.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import posterity as po
from posterity import methods
from posterity.inference import Method

FOLDER = Path(__file__).parent / "pictures"
NOISE, SEED = 0.2, 0
SHORT = {"draws": 500, "warmup": 500, "chains": 4}


class Bumps(nn.Module):
    """Twelve bell-shaped functions of x."""

    def forward(self, x: Tensor) -> Tensor:
        """Return their values (N, 12)."""
        return torch.exp(-0.5 * ((x - torch.linspace(-5.0, 5.0, 12)) / 0.8).square())


def network(dropout: float = 0.0) -> nn.Module:
    """Return a network with 30 tanh units, with dropout before its last layer where a rate is given."""
    torch.manual_seed(SEED)
    drop = (nn.Dropout(dropout),) if dropout else ()
    return nn.Sequential(nn.Linear(1, 30), nn.Tanh(), *drop, nn.Linear(30, 1))


def relu_network() -> nn.Module:
    """Return a network with 50 ReLU units."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1))


def linear_model() -> nn.Module:
    """Return a linear model on the bumps."""
    return nn.Sequential(Bumps(), nn.Linear(12, 1))


METHODS: dict[str, tuple[Method, Callable[[], nn.Module]]] = {
    "MAP": (methods.MAP(), network),
    "Laplace": (methods.Laplace(), network),
    "OnlineLaplace": (methods.OnlineLaplace(), network),
    "MeanField": (methods.MeanField(), network),
    "FullRank": (methods.FullRank(), network),
    "LowRankGaussian": (methods.LowRankGaussian(), network),
    "NaturalGradient": (methods.NaturalGradient(), network),
    "Conjugate": (methods.Conjugate(), linear_model),
    "ExpectationPropagation": (methods.ExpectationPropagation(), linear_model),
    "ProbabilisticBackpropagation": (methods.ProbabilisticBackpropagation(), relu_network),
    "VariationalEM": (methods.VariationalEM(methods.MeanField(), (po.evidence.PriorScale(),)), network),
    "Ensemble": (methods.Ensemble(methods.MAP()), network),
    "SWAG": (methods.SWAG(), network),
    "MCDropout": (methods.MCDropout(), lambda: network(0.1)),
    "SGLD": (methods.SGLD(), network),
    "SGHMC": (methods.SGHMC(), network),
    "NUTS": (methods.NUTS(**SHORT), network),
    "HMC": (methods.HMC(**SHORT), network),
    "ChEES": (methods.ChEES(**SHORT), network),
    "MAMS": (methods.MAMS(**SHORT), network),
    "MCLMC": (methods.MCLMC(**SHORT), network),
    "MALA": (methods.MALA(**SHORT), network),
    "Metropolis": (methods.Metropolis(draws=20_000, warmup=20_000, chains=4, thin=20), linear_model),
    "Langevin": (methods.Langevin(draws=2000, warmup=2000, chains=4, thin=4), linear_model),
}
STARTED = ("Laplace", "SWAG", "SGLD", "SGHMC", "NUTS", "HMC", "ChEES", "MAMS", "MCLMC", "MALA")  # from MAP


def posterior(name: str) -> po.posteriors.Posterior:
    """Return the posterior of a method on the rows."""
    method, module = METHODS[name]
    data = po.datasets.waves()
    joint = po.Joint(module(), po.likelihoods.Gaussian(scale=NOISE), po.priors.Normal(scale=1.0), num_data=40)
    start = None
    if name in STARTED:
        start, _ = po.infer(methods.MAP(), joint, data.train, seed=SEED, progress=False)
    return po.infer(method, joint, data.train, start=start, seed=SEED, progress=False)[0]


def draw(name: str) -> None:
    """Write the picture of a method."""
    from matplotlib.figure import Figure

    data, x = po.datasets.waves(), torch.linspace(-4.5, 4.5, 181).unsqueeze(1)
    predicted = posterior(name).predict(x)
    mean, std, weights = (
        part.squeeze(-1).double() for part in (predicted.mean, predicted.std, predicted.epistemic.sqrt())
    )
    grid = x.squeeze(-1)
    figure = Figure(figsize=(6.4, 2.7), dpi=110, layout="constrained")
    axes = figure.subplots()
    for spread, shade, label in ((std, "#d7e3f0", "95 % of targets"), (weights, "#9dbcdc", "from the weights")):
        axes.fill_between(grid, mean - 1.96 * spread, mean + 1.96 * spread, color=shade, lw=0, label=label)
    axes.plot(grid, (1.5 * grid).sin(), color="#8a8a8a", lw=1, ls=":", label="truth")
    axes.plot(grid, mean, color="#1f4e79", lw=1.6, label="mean")
    axes.plot(*(part.squeeze(-1) for part in data.train.pair), "o", ms=3, color="#c2552d", label="rows")
    axes.set(xlim=(-4.5, 4.5), ylim=(-3.2, 3.2), xlabel="x", ylabel="y")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.png", metadata={"Software": None})


if __name__ == "__main__":
    for chosen in sys.argv[1:] or METHODS:
        draw(chosen)
