"""UCI energy and kin8nm under their standard splits, standardised, with one hidden layer of 50 rectifiers."""

import copy
import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity as po
from benchmarks.laplace_parts import Batches
from benchmarks.mean_field_layers import without_init
from benchmarks.peers_quality_parts import (
    BATCH,
    BAYESIAN_TORCH_DRAWS,
    MEMBERS,
    OURS,
    Contender,
    adam,
    batches,
    bayesian_torch,
    bayesian_torch_loss,
    descend,
    ivon,
    ivon_outputs,
    repeated_outputs,
)
from posterity.datasets import uci_regression
from posterity.estimators import fit_automatic

HIDDEN, STEPS = 50, 6_000  # steps: 1,000 epochs of energy in batches of 128
RATE, EVIDENCE_STEPS, EVIDENCE_RATE = 1e-2, 1_000, 0.1
ENSEMBLE_RATE, ENSEMBLE_EPOCHS = 5e-3, 40
UCI_EPOCHS, UCI_ROWS = 60, 691  # of the recipe of ivon-experiments, and the rows of energy that it is for
Predict = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of inputs, targets (N, 1): log densities (N,), means (N,)


class Table(NamedTuple):
    """Standardised rows, and the scale of the targets."""

    train: tuple[Tensor, Tensor]  # (N, D), (N, 1)
    test: tuple[Tensor, Tensor]
    mean: float
    scale: float


def load(name: str, split: int) -> Table:
    """Return a standard split."""
    data = uci_regression(name, split)
    train, test = ((part.inputs.double(), part.targets.double().reshape(-1, 1)) for part in (data.train, data.test))
    mean, scale = train[0].mean(0), train[0].std(0, correction=0)
    scale[scale < 1e-12] = 1.0
    centre, width = float(train[1].mean()), float(train[1].std(correction=0))

    def standard(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return ((part[0] - mean) / scale).float(), ((part[1] - centre) / width).float()

    return Table(standard(train), standard(test), centre, width)


def fresh(data: Table, seed: int, outputs: int = 1) -> nn.Sequential:
    """The network at the first weights of a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(data.train[0].shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))


def point(data: Table, seed: int) -> nn.Module:
    """The point estimate that Laplace approximations begin at."""
    net = fresh(data, seed)
    adam(net, lambda x, y: F.mse_loss(net(x), y), batches(*data.train, BATCH, STEPS, seed), STEPS, lr=RATE)
    return net


def mixture(means: Tensor, scales: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log densities and means of equal mixtures of normals (S, N, 1)."""
    log_density = torch.distributions.Normal(means.double(), scales.double()).log_prob(targets.double())
    return (log_density.logsumexp(0) - math.log(len(means)))[:, 0], means.double().mean(0)[:, 0]


def two_headed(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and scale by softplus, from two outputs, as in the UCI recipe of ivon-experiments."""
    mean, raw = outputs.chunk(2, dim=-1)
    return mean, F.softplus(raw).clamp_min(1e-6)


def normal_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log density under mean and scale."""
    mean, scale = two_headed(outputs)
    return -torch.distributions.Normal(mean, scale).log_prob(targets).mean()


def plain(data: Table, module: nn.Module, seed: int) -> Predict:
    """The point, with the scale of its training residuals."""
    with torch.no_grad():
        scale = (data.train[1] - module(data.train[0])).square().mean().sqrt()

    @torch.no_grad()
    def predict(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mean = module(inputs).unsqueeze(0)
        return mixture(mean, scale.expand_as(mean), targets)

    return predict


def laplace_torch(data: Table, module: nn.Module, seed: int) -> Predict:
    """Its regression example: full Laplace, prior precision and noise by the evidence."""
    from laplace import Laplace  # type: ignore[import-not-found]

    la = Laplace(copy.deepcopy(module), "regression", subset_of_weights="all", hessian_structure="full")
    la.fit(Batches(*data.train, BATCH))
    log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=EVIDENCE_RATE)
    for _ in range(EVIDENCE_STEPS):
        optimizer.zero_grad()
        (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        optimizer.step()
    return laplace_torch_predict(la)


def laplace_torch_predict(la: Any) -> Predict:
    """Output variance and noise added, as its example does."""

    def predict(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        parts = [la(part) for part in inputs.split(16)]  # type: ignore[no-untyped-call]
        mean, variance = (torch.cat([part[index].detach().reshape(-1, 1) for part in parts]) for index in (0, 1))
        scale = (variance + la.sigma_noise.detach() ** 2).sqrt()
        return mixture(mean.unsqueeze(0), scale.unsqueeze(0), targets)

    return predict


def marglik_training(data: Table, module: nn.Module, seed: int) -> Predict:
    """Its online variant, at its default 300 epochs with the evidence after every tenth."""
    from laplace import marglik_training as online
    from laplace.curvature.backpack import BackPackGGN  # type: ignore[import-not-found]

    la, *_ = online(
        model=fresh(data, seed), train_loader=Shuffled(*data.train, seed=seed), likelihood="regression",
        hessian_structure="full", backend=BackPackGGN, optimizer_kwargs={"lr": RATE}, prior_structure="scalar",
        n_epochs=300, marglik_frequency=10,
    )  # fmt: skip
    return laplace_torch_predict(la)


class Shuffled(Batches):
    """Batches in a new order of the rows for each pass."""

    def __init__(self, inputs: Tensor, targets: Tensor, seed: int) -> None:
        super().__init__(inputs, targets, BATCH)
        self._rows, self._generator = (inputs, targets), torch.Generator().manual_seed(seed)

    def __iter__(self) -> Any:
        order = torch.randperm(len(self.dataset), generator=self._generator)
        return ((self._rows[0][index], self._rows[1][index]) for index in order.split(BATCH))  # type: ignore[no-untyped-call]


def ivon_opt(data: Table, module: nn.Module, seed: int, *, recipe: bool) -> Predict:
    """ivon-opt as in its README, or by the recipe of its authors for energy."""
    import ivon as library  # type: ignore[import-not-found, unused-ignore]

    net, rows = fresh(data, seed, 2), len(data.train[1])
    if recipe:
        size = 8 * max(1, round(rows / UCI_ROWS))  # as many steps for more rows
        steps = UCI_EPOCHS * -(-rows // size)
        settings = {"lr": 0.02, "hess_init": 0.5, "beta2": 0.999, "weight_decay": 0.005, "mc_samples": 5}
        optimizer = library.IVON(net.parameters(), ess=6000 * rows / UCI_ROWS, **settings)
    else:
        size, steps = BATCH, STEPS
        optimizer = library.IVON(net.parameters(), lr=0.1, ess=rows)
    ivon(optimizer, lambda x, y: normal_loss(net(x), y), batches(*data.train, size, steps, seed), optimizer.mc_samples)
    return lambda inputs, targets: mixture(*two_headed(ivon_outputs(optimizer, net, inputs)), targets)


def bayesian_layers(data: Table, module: nn.Module, seed: int) -> Predict:
    """bayesian-torch's layers with two outputs."""
    net = bayesian_torch(fresh(data, seed, 2))
    loss = bayesian_torch_loss(net, normal_loss, len(data.train[1]))
    adam(net, loss, batches(*data.train, BATCH, STEPS, seed), STEPS, lr=1e-3)
    return lambda x, y: mixture(*two_headed(repeated_outputs(net, x, BAYESIAN_TORCH_DRAWS)), y)


def deep_ensembles(data: Table, module: nn.Module, seed: int, *, longer: bool) -> Predict:
    """torch-uncertainty's ensemble of networks with a normal layer."""
    without_init("torch_uncertainty")
    from torch_uncertainty.layers.distributions import NormalLinear  # type: ignore[import-not-found]
    from torch_uncertainty.methods.deep_ensembles import deep_ensembles as wrapped  # type: ignore[import-not-found]

    steps = STEPS if longer else ENSEMBLE_EPOCHS * -(-len(data.train[1]) // BATCH)
    members = list[nn.Module]()
    for k in range(MEMBERS):
        torch.manual_seed(1000 * seed + k)
        hidden = nn.Linear(data.train[0].shape[1], HIDDEN)
        net = nn.Sequential(hidden, nn.ReLU(), NormalLinear(base_layer=nn.Linear, event_dim=1, in_features=HIDDEN))

        def loss(x: Tensor, y: Tensor, net: nn.Module = net) -> Tensor:  # its DistributionNLLLoss
            return -torch.distributions.Normal(**net(x)).log_prob(y).mean()

        optimizer = torch.optim.Adam(net.parameters(), lr=ENSEMBLE_RATE)
        descend(optimizer, loss, batches(*data.train, BATCH, steps, 1000 * seed + k))
        members.append(net)
    ensemble = wrapped(members, task="regression", probabilistic=True)

    @torch.no_grad()
    def predict(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found = {name: values.unflatten(0, (MEMBERS, -1)) for name, values in ensemble(inputs).items()}
        return mixture(found["loc"], found["scale"], targets)

    return predict


def by_posterior(q: Any) -> Predict:
    """Log densities and means of a posterior of ours."""

    def predict(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        pred = q.predict(inputs)
        return pred.log_prob(targets).double(), pred.mean[:, 0].double()

    return predict


def our_laplace(data: Table, module: nn.Module, seed: int) -> Predict:
    """`po.laplace` in one line."""
    return by_posterior(po.laplace(module, data.train, "regression", seed=seed, progress=False))


def our_fit(data: Table, module: nn.Module, seed: int, *, name: str, after: bool = True) -> Predict:
    """A method of `posterity.methods` without settings, after `MAP` without settings."""
    joint = po.Joint(fresh(data, seed), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=len(data.train[1]))
    start = po.infer(po.methods.MAP(), joint, data.train, seed=seed, progress=False)[0] if after else None
    method = getattr(po.methods, name)() if after else po.methods.Ensemble(po.methods.MAP(), size=MEMBERS)
    return by_posterior(po.infer(method, joint, data.train, start=start, seed=seed, progress=False)[0])


def our_ivon(data: Table, module: nn.Module, seed: int) -> Predict:
    """`optim.IVON` as docs/coming-from.md has it."""
    net, rows = fresh(data, seed, 2), len(data.train[1])
    joint = po.Joint(net, po.likelihoods.Heteroscedastic(), po.priors.Normal(1.0), num_data=rows)
    optimizer = po.optim.IVON(net.parameters(), lr=0.1, ess=rows, weight_decay=1 / rows)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    batched = batches(*data.train, BATCH, STEPS, seed)
    ivon(optimizer, lambda x, y: -joint.likelihood.log_prob(net(x), y).mean(), batched, schedule=schedule)
    return by_posterior(optimizer.posterior(joint, net))


def automatic(data: Table, module: nn.Module, seed: int) -> Predict:
    """The estimators' default, which chooses its models itself."""
    model = fit_automatic(
        data.train[0], data.train[1].double(), "regression", mean=(data.mean,), scale=(data.scale,), seed=seed,
        progress=False,
    )  # fmt: skip
    return by_posterior(model)


_LEFT_OUT = "all left out, after MAP with all left out"
CONTENDERS: dict[str, Contender] = {
    "point": Contender(
        OURS, "point", plain, f"torch.optim.Adam, step size {RATE} falling to 0 along a cosine, {STEPS} steps"
    ),
    "laplace-torch": Contender(
        "laplace-torch", "Laplace", laplace_torch,
        "its regression example: full Laplace, 1,000 steps of Adam on the evidence", True,
    ),
    "laplace-torch marglik_training": Contender(
        "laplace-torch", "Laplace", marglik_training,
        "its regression example (full, BackPackGGN, scalar prior), default epochs, evidence after every tenth",
    ),
    "po.laplace": Contender(OURS, "Laplace", our_laplace, "all left out", True),
    "Laplace": Contender(OURS, "Laplace", functools.partial(our_fit, name="Laplace"), _LEFT_OUT),
    "ivon-opt README": Contender(
        "ivon-opt", "IVON", functools.partial(ivon_opt, recipe=False), "its README: lr 0.1, ess the number of rows"
    ),
    "ivon-opt UCI": Contender(
        "ivon-opt", "IVON", functools.partial(ivon_opt, recipe=True),
        "run_uci.sh of ivon-experiments, written for energy; as many steps, and ess by rows, for kin8nm",
    ),
    "optim.IVON": Contender(OURS, "IVON", our_ivon, "docs/coming-from.md, without its beta2"),
    "NaturalGradient": Contender(OURS, "IVON", functools.partial(our_fit, name="NaturalGradient"), _LEFT_OUT),
    "bayesian-torch": Contender(
        "bayesian-torch", "mean field", bayesian_layers,
        "README: prior, start and Adam; the KL over the number of rows; it has no example of regression",
    ),
    "MeanField": Contender(OURS, "mean field", functools.partial(our_fit, name="MeanField"), _LEFT_OUT),
    "torch-uncertainty ensemble": Contender(
        "torch-uncertainty", "ensemble", functools.partial(deep_ensembles, longer=False),
        "its UCI experiments: 5 members, normal layer, Adam 5e-3, 40 epochs",
    ),
    "torch-uncertainty ensemble, longer": Contender(
        "torch-uncertainty", "ensemble", functools.partial(deep_ensembles, longer=True), f"the same with {STEPS} steps"
    ),
    "Ensemble": Contender(OURS, "ensemble", functools.partial(our_fit, name="", after=False), "all left out"),
    "auto": Contender(OURS, "auto", automatic, "all left out"),
}  # fmt: skip


def scores(predict: Predict, data: Table) -> dict[str, Any]:
    """Scores on the test rows in units of the target, and the CPU seconds that these took."""
    begin = time.process_time()
    log_density, mean = predict(*data.test)
    seconds = time.process_time() - begin
    log_density = log_density - math.log(data.scale)
    errors = data.scale * (mean - data.test[1][:, 0].double())
    return {
        "predict_seconds": seconds,
        "nll": -float(log_density.mean()),
        "error": float(errors.square().mean().sqrt()),
        "log_density": [round(float(value), 6) for value in log_density],
    }
