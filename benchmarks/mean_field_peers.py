"""Mean-field variational inference by other libraries, each as its own documentation has it.

All start at the network's weights with one scale and are called with their documented objective. What that is worth is
measured: `kl_weight` is how often it counts the KL, which in minus the ELBO for each datum is 1.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.mean_field_layers import Peer, Problem, bayesian_torch, blitz, torch_uncertainty, torchbnn
from benchmarks.mean_field_parts import NUM_DATA, STEP_SIZE, closed_form_kl

PACKAGES = (
    *("bayesian-torch", "torchbnn", "blitz-bayesian-pytorch", "torch-uncertainty", "tyxe", "pyro-ppl"),
    *("posteriors", "torchopt"),
)
# Where nothing is left of the data's own change between the two, objectives and KLs are compared.
TWO_SCALES = (1e-5, 1e-4)


def tyxe(problem: Problem, noise: str = "weights") -> Peer:
    """Its README: `VariationalBNN` with closed-form KL; with noise in outputs by `local_reparameterization`."""
    import pyro  # type: ignore[import-not-found]
    import pyro.distributions as dist  # type: ignore[import-not-found]
    from pyro.infer import SVI, TraceMeanField_ELBO  # type: ignore[import-not-found]

    if not hasattr(pyro.util, "deep_getattr"):  # it calls this, which Pyro has no more
        pyro.util.deep_getattr = lambda owner, name: functools.reduce(getattr, name.split("."), owner)
    import tyxe as library  # type: ignore[import-not-found]

    module, name = copy.deepcopy(problem.module).train(), f"bnn{len(pyro.get_param_store())}"
    prior = library.priors.IIDPrior(
        dist.Normal(torch.tensor(0.0), torch.tensor(1.0)), hide_module_types=(nn.BatchNorm2d,)
    )
    guide = functools.partial(
        library.guides.AutoNormal,
        init_scale=problem.scale,
        init_loc_fn=library.guides.PretrainedInitializer.from_net(module, prefix=f"{name}.net"),
    )
    bnn = library.VariationalBNN(module, prior, library.likelihoods.Categorical(NUM_DATA), guide, name=name)
    context = library.poutine.local_reparameterization if noise == "outputs" else contextlib.nullcontext
    svi = SVI(bnn.model, bnn.guide, pyro.optim.Adam({"lr": STEP_SIZE}), TraceMeanField_ELBO(problem.draws))
    batch = ((problem.x,), problem.y)

    def objective() -> float:
        with context():
            return float(svi.evaluate_loss(*batch)) / NUM_DATA

    def step() -> None:
        with context():
            svi.step(*batch)

    def predict(rows: Tensor, draws: int) -> Tensor:
        with context():
            return bnn.predict(rows, num_predictions=draws).exp()  # type: ignore[no-any-return]

    objective()  # makes the guide's parameters
    sites = [site for site, _ in pyro.poutine.trace(bnn.net_guide).get_trace(problem.x).iter_stochastic_nodes()]
    size = [bnn.net_guide.get_loc(site).detach().flatten() for site in sites]
    means = torch.cat(size)
    return Peer(step, predict, objective, closed_form_kl(means, torch.full_like(means, problem.scale)))


def posteriors(problem: Problem) -> Peer:
    """Its documentation: log likelihood and log prior for each datum at a temperature of 1 / num_data."""
    import posteriors as library  # type: ignore[import-not-found]
    import torchopt  # type: ignore[import-not-found]

    module = copy.deepcopy(problem.module).train()
    buffers = dict(module.named_buffers())

    def log_posterior(parameters: Any, batch: Any) -> tuple[Tensor, Tensor]:
        own = {name: buffer.clone() for name, buffer in buffers.items()}  # batch norm writes into them
        outputs = torch.func.functional_call(module, (parameters, own), (batch[0],))
        prior = library.diag_normal_log_prob(parameters) / NUM_DATA
        return prior - F.cross_entropy(outputs, batch[1]), torch.tensor([])

    transform = library.vi.diag.build(
        log_posterior,
        torchopt.adam(lr=STEP_SIZE),
        temperature=1 / NUM_DATA,
        n_samples=problem.draws,
        init_log_sds=math.log(problem.scale),
    )
    start = transform.init(dict(module.named_parameters()))
    state, batch = start, (problem.x, problem.y)

    def step() -> None:
        nonlocal state
        state, _ = transform.update(state, batch)

    @torch.no_grad()
    def predict(rows: Tensor, draws: int) -> Tensor:
        module.eval()
        thetas = library.vi.diag.sample(state, (draws,))
        outputs = torch.vmap(lambda theta: torch.func.functional_call(module, (theta, buffers), (rows,)))(thetas)
        module.train()
        return outputs.softmax(-1).mean(0)

    means = torch.cat([p.detach().flatten() for p in module.parameters()])
    kl = closed_form_kl(means, torch.full_like(means, problem.scale))
    return Peer(step, predict, lambda: float(transform.update(start, batch)[0].nelbo), kl)


PEERS: dict[str, Callable[[Problem], Peer]] = {
    "bayesian-torch Reparameterization": lambda problem: bayesian_torch(problem, "Reparameterization"),
    "bayesian-torch Flipout": lambda problem: bayesian_torch(problem, "Flipout"),
    "torchbnn": torchbnn,
    "blitz": blitz,
    "torch-uncertainty": torch_uncertainty,
    "TyXe": tyxe,
    "TyXe local reparameterization": lambda problem: tyxe(problem, "outputs"),
    "posteriors vi.diag": posteriors,
}


def kl_weight(objectives: Callable[[float], tuple[float, float]]) -> float:
    """How often the objective counts the KL, from its values and exact KLs at the two scales of weights.

    Of the difference, since constants in an objective move nothing; the noise is the same at both.
    """
    values = []
    for scale in TWO_SCALES:
        torch.manual_seed(0)
        values.append(objectives(scale))
    (low, low_kl), (high, high_kl) = values
    return (high - low) * NUM_DATA / (high_kl - low_kl)


def peer_kl_weight(build: Callable[[Problem], Peer], module: nn.Module, x: Tensor, y: Tensor) -> float:
    """That of a peer."""

    def objectives(scale: float) -> tuple[float, float]:
        peer = build(Problem(module, x, y, scale=scale))
        return peer.objective(), peer.kl

    return kl_weight(objectives)
