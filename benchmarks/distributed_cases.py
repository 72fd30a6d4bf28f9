"""The fits of `benchmarks.distributed`: each runs alone, or in processes that share it, and gives its numbers.

`python -m benchmarks.distributed_cases FILE [CASE ...]` writes them; under torchrun the processes share each fit.
`run FOLDER` is a longer run, for kills.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from posterity import curvature, scale
from posterity.evidence.stacking import stacked
from posterity.inference import Callback, Run
from posterity.methods.parts.gradients import Flipout, LocalReparameterisation
from posterity.mixtures import BayesianGaussianMixture, GaussianMixture
from posterity.posteriors import Linearized

Numbers = dict[str, Tensor]

ROWS = 203  # no multiple of the batches, nor of the processes
ALLOWED = {
    "laplace": 1e-12,
    "conjugate": 1e-12,
    "mixture": 1e-12,
    "nuts": 1e-8,
    "bf16": 0.02,
}  # by the first word of a case; 1e-9 of others
STEPS = 100
LONG = 1000  # steps of the run that is killed


def rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and weights of rows, of which some are 0."""
    key = po.Key(0).fold("distributed")
    inputs = key.normal((ROWS, 5), dtype, "cpu")
    weights = (key.fold("weights").uniform((ROWS,), device="cpu") * 4).floor().to(dtype)
    return inputs, (inputs[:, 0] - inputs[:, 1].square() > -0.5).long(), weights


def small() -> nn.Module:
    """A network with one hidden layer."""
    return po.networks.MLP([5, 12, 2])


def problem(make: Callable[[], nn.Module] = small, dtype: torch.dtype = torch.float64) -> po.Joint:
    """A classification, with the same weights in each process."""
    torch.manual_seed(0)
    return po.Joint(make().to(dtype), po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=ROWS)


def regression() -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    """A regression with a learnt noise."""
    inputs = rows()[0]
    torch.manual_seed(1)
    net = po.networks.MLP([5, 12, 1]).double()
    return po.Joint(net, po.likelihoods.Gaussian(0.5, learn=True), po.priors.Normal(scale=1.0), num_data=ROWS), (
        inputs,
        inputs[:, :1].sin(),
    )


def fit(method: Any, joint: po.Joint | None = None, data: Any = None, **options: Any) -> Numbers:
    """The weights, draws or precision of the posterior, and the loss."""
    joint = problem() if joint is None else joint
    data = rows() if data is None else data
    q, trace = po.infer(method, joint, data, seed=3, progress=False, **options)
    numbers = {f"posterior.{name}": tensor for name, tensor in q.parts()["posterior"].tensors.items()}
    return {**{name: t for name, t in numbers.items() if t.is_floating_point()}, **{n: trace[n] for n in trace}}


def adam(steps: int = STEPS) -> Any:
    """MAP by Adam on batches."""
    return po.methods.MAP(steps, 50, po.optim.Adam(0.01), po.optim.Constant())


def laplace(
    structure: Any, kind: Any = None, make: Callable[[], nn.Module] = small, shape: tuple[int, ...] = ()
) -> Numbers:
    """The precision, evidence and log-likelihood of a Laplace fit at the module's own weights."""
    joint, (inputs, labels, weights) = problem(make), rows()
    method = po.methods.Laplace(kind or curvature.GaussNewton(), structure, tuning=None, batch_size=64)
    method = replace(method, subset=po.methods.AllWeights())
    q, trace = po.infer(method, joint, (inputs.view(-1, *shape) if shape else inputs, labels, weights), progress=False)
    assert isinstance(q, Linearized)
    assert q.log_evidence is not None
    own: Any = q.gaussian.precision
    precision = own.diagonal() if hasattr(own, "diagonal") else q.gaussian.variance
    return {"precision": precision, "evidence": q.log_evidence, "log_likelihood": trace["log_likelihood"]}


def convolutions() -> nn.Module:
    """Convolutions over five positions."""
    return nn.Sequential(nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2))


def ivon(pieces: int = 1, samples: int = 1) -> Numbers:
    """IVON in a training loop over the rows, whose gradients DistributedDataParallel averages.

    Each of the samples of a step adds up the gradients of so many pieces of the rows; the last piece averages them.
    """
    import torch.distributed as dist

    torch.manual_seed(0)
    net = po.networks.MLP([5, 12, 2]).double()
    inputs, labels, _ = rows()
    count = 198 // (6 * pieces) * 6  # the mean over processes is that over rows where all have as many
    running = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    model = nn.parallel.DistributedDataParallel(net) if running else net
    optimizer = po.optim.IVON(model.parameters(), lr=0.1, ess=pieces * count, seed=3)
    for _ in range(STEPS):
        for _ in range(samples):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                for piece in range(pieces):
                    begin = piece * count
                    own = slice(begin + rank * count // size, begin + (rank + 1) * count // size)
                    later = isinstance(model, nn.parallel.DistributedDataParallel) and piece + 1 < pieces
                    with model.no_sync() if later else nullcontext():  # type: ignore[operator]
                        loss = nn.functional.cross_entropy(model(inputs[own]), labels[own]) / pieces
                        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {"weights": torch.cat([weight.detach().flatten() for weight in net.parameters()])}


def conjugate(batch_size: int | None, weights: int = 6) -> Numbers:
    """The exact posterior of a linear model with this many weights, two outputs and some targets missing."""
    key, (inputs, _, each) = po.Key(1), rows()
    inputs = torch.cat([inputs, inputs.sin(), inputs.cos()], 1)[:, : weights // 2 - 1]
    targets = torch.stack([inputs[:, 0], inputs.sum(1)], 1) + 0.3 * key.normal((ROWS, 2), torch.float64, "cpu")
    targets[::7, 0] = torch.nan
    torch.manual_seed(0)
    net = nn.Linear(inputs.shape[1], 2).double()
    joint = po.Joint(net, po.likelihoods.Gaussian(0.3), po.priors.Normal(scale=1.0), num_data=ROWS)
    return fit(po.methods.Conjugate(batch_size), joint, (inputs, targets, each))


def mixture(kind: Any, **settings: Any) -> Numbers:
    """A mixture by EM."""
    inputs, _, weights = rows()
    given = {"sample_weight": weights} if kind is GaussianMixture else {}
    made = kind(3, random_state=0, max_iter=12, tol=0.0, **settings).fit(inputs, **given)
    return {"means": made.means_, "covariances": made.covariances_, "bounds": torch.tensor(made.lower_bounds_)}


def scores() -> Numbers:
    """Validation during a run, scores of its predictions, and stacking weights of two fits."""
    inputs, labels, _ = rows()
    train, test = (inputs[:150], labels[:150]), (inputs[150:], labels[150:])
    joint = replace(problem(), num_data=150)
    methods = adam(40), po.methods.MeanField(40, 50)
    fits = [po.infer(method, joint, train, validation=test, seed=1, progress=False) for method in methods]
    predictions = [q.predict(test[0]) for q, _ in fits]
    weights = stacked(torch.stack([p.log_prob(test[1]) for p in predictions], 1)).weights
    names = ("accuracy", "negative_log_likelihood", "brier_score", "expected_calibration_error", "auroc")
    values = [float(getattr(po.metrics, name)(p, test[1])) for p in predictions for name in names]
    curves = {f"curve {index}": trace["validation_nll"] for index, (_, trace) in enumerate(fits)}
    return {"weights": weights, "scores": torch.tensor(values, dtype=torch.float64), **curves}


M = po.methods
FACTORS = M.Laplace(structure=curvature.Kronecker(), tuning=None)
CASES: dict[str, Callable[[], Numbers]] = {
    "map adam": lambda: fit(adam()),
    "map l-bfgs": lambda: fit(M.MAP(STEPS, None, po.optim.LBFGS()), *regression()),
    "map micro-batches": lambda: fit(adam(), micro_batch=7),
    "map members": lambda: fit(adam(), start=problem().initial() * torch.linspace(0.5, 1.5, 3).double()[:, None]),
    "mean-field": lambda: fit(M.MeanField(STEPS, 50)),
    "mean-field local": lambda: fit(M.MeanField(STEPS, 50, estimator=LocalReparameterisation())),
    "mean-field flipout": lambda: fit(M.MeanField(STEPS, 50, estimator=Flipout())),
    "full-rank": lambda: fit(M.FullRank(STEPS, 50)),
    "natural gradient": lambda: fit(M.NaturalGradient(STEPS, 50)),
    "ivon": ivon,
    "ivon in pieces": lambda: ivon(pieces=3, samples=2),
    "swag": lambda: fit(M.SWAG(adam(), every=4)),
    "sgld": lambda: fit(M.SGLD(draws=30, warmup=40, thin=2, batch_size=50, step_size=1e-3, chains=2)),
    "sghmc": lambda: fit(M.SGHMC(draws=30, warmup=40, thin=2, batch_size=50, step_size=1e-3, chains=2)),
    "hmc": lambda: fit(M.HMC(draws=20, warmup=0, chains=2, step_size=0.02, steps=5)),
    "nuts": lambda: fit(M.NUTS(draws=50, warmup=0, chains=2, step_size=0.12), problem(lambda: nn.Linear(5, 2))),
    "laplace full": lambda: laplace(curvature.Full()),
    "laplace rows": lambda: laplace(curvature.Full(), make=lambda: po.networks.MLP([5, 80, 2])),
    "laplace hessian": lambda: laplace(curvature.Full(), curvature.Hessian(), lambda: nn.Linear(5, 2)),
    "laplace blocks": lambda: laplace(curvature.BlockDiagonal()),
    "laplace diagonal": lambda: laplace(curvature.Diagonal()),
    "laplace hutchinson": lambda: laplace(curvature.Hutchinson()),
    "laplace low-rank": lambda: laplace(curvature.LowRank(5)),
    "laplace kronecker": lambda: laplace(curvature.Kronecker()),
    "laplace corrected": lambda: laplace(curvature.CorrectedKronecker()),
    "laplace convolutions": lambda: laplace(curvature.Kronecker(), make=convolutions, shape=(1, 5)),
    "conjugate": lambda: conjugate(64),
    "conjugate wide": lambda: conjugate(None, 32),
    "online laplace": lambda: fit(M.OnlineLaplace(adam(), FACTORS, rounds=3)),
    "variational em": lambda: fit(M.VariationalEM(M.MeanField(STEPS, 50), (po.evidence.PriorScale(),))),
    "mixture full": lambda: mixture(GaussianMixture),
    "mixture tied": lambda: mixture(GaussianMixture, covariance_type="tied"),
    "mixture diagonal": lambda: mixture(GaussianMixture, covariance_type="diag"),
    "mixture spherical": lambda: mixture(GaussianMixture, covariance_type="spherical"),
    "mixture bayesian": lambda: mixture(BayesianGaussianMixture),
    "scores": scores,
    "bf16": lambda: fit(adam(20), problem(dtype=torch.float32), rows(torch.float32), precision="bf16"),
}


def tolerance(case: str) -> float:
    """Return the relative difference that a case may have from one process without torchrun."""
    return ALLOWED.get(case.split()[0], 1e-9)


def digest(numbers: Numbers) -> str:
    """A hash of all bytes."""
    return hashlib.blake2b(b"".join(repr((n, t.tolist())).encode() for n, t in sorted(numbers.items()))).hexdigest()


class Told(Callback):
    """Tells in a folder which process this is, at which step it begins, and where it is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, os.environ["RANK"]

    def start(self, run: Run) -> None:
        """Write the number of this process, and the step."""
        (self.folder / f"process-{self.rank}").write_text(str(os.getpid()))
        if self.rank == "0":
            (self.folder / "resumed").write_text(str(run.step))

    def after_step(self, run: Run) -> None:
        """Write the step."""
        if self.rank == "0":
            (self.folder / "step").write_text(str(run.step))


def long_run(folder: Path) -> None:
    """A run with a checkpoint every 40 steps, to be killed and started again; writes its result."""
    checkpoint = po.Checkpoint(folder / "run", steps=40)
    numbers = fit(po.methods.MeanField(LONG, 50), checkpoint=checkpoint, callbacks=[Told(folder)])
    if os.environ["RANK"] == "0":
        torch.save(numbers, folder / "result")


def main(path: str, names: list[str]) -> None:
    """Write the numbers of these cases (or all) to the file, and stop where processes differ."""
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        torch.save({name: CASES[name]() for name in names or CASES}, path)
        return
    with scale.join() as processes:
        if path == "run":
            long_run(Path(names[0]))
            return
        found = {name: CASES[name]() for name in names or CASES}
        for name, numbers in found.items():
            processes.refuse_differing(name, digest(numbers))
        if processes.rank == 0:
            torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
