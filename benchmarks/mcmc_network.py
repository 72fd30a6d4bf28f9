"""Microcanonical Langevin ensembles beside long NUTS on a network with 50 units: test NLL, and seconds.

The network is the one of the UCI protocol, one hidden layer of 50 units, with learnt noise, on split 0. NUTS runs from
draws of the prior. The ensemble is eight MAP fits; then `MCLMC` starts one chain at each member, with unit mass, so
that each chain finds its own step size. Its length and energy variance, and the prior, are defaults or round numbers,
and no row chose them. CPU seconds are compared, which other load touches little.

References: Sommer et al. (2025), Microcanonical Langevin Ensembles.
"""

import json
import math
import time
from typing import Any

import torch

import posterity as po
from benchmarks.harness import context, parser, report
from posterity.kernels import UnitMass
from posterity.methods import MAP, MCLMC, NUTS, Ensemble
from posterity.posteriors import Samples
from posterity_studies.uci.protocol import standard_split

UNITS, MEMBERS, STEPS = 50, 8, 1000


def main() -> None:
    """Run and write `mcmc_network.json` and `mcmc_network.md`."""
    options = parser(__doc__ or "")
    options.add_argument("--data", default="bostonHousing", help="UCI set (default bostonHousing)")
    options.add_argument("--warmup", type=int, default=1000, help="transitions of adaptation of NUTS (default 1000)")
    options.add_argument("--draws", type=int, default=1000, help="draws of each of 4 chains of NUTS (default 1000)")
    options.add_argument("--depth", type=int, default=8, help="deepest tree of NUTS (default 8)")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    split = standard_split(given.data, 0)
    train, test = split.train, split.test
    likelihood = po.likelihoods.Gaussian(0.5, learn=True, log_scale_prior=(-1.0, 1.0))
    net = po.networks.MLP([train.inputs.shape[-1], UNITS, 1], activation="tanh")
    joint = po.Joint(net, likelihood, po.priors.Normal(1.0), num_data=len(train.inputs))
    rows = train.inputs, train.targets

    def clock() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def row(name: str, q: po.posteriors.Posterior, begin: tuple[float, float]) -> dict[str, Any]:
        wall, cpu = (now - then for now, then in zip(clock(), begin, strict=True))
        worst = math.nan
        if isinstance(q, Samples):
            worst = po.diagnostics.convergence(q, test.inputs)["outputs"].worst_rhat
        scores = split.scores(q.predict(test.inputs))
        found = {"name": name, "seconds": wall, "cpu": cpu, "rhat": worst, **scores}
        print(found, flush=True)
        return found

    begin = clock()
    fit = Ensemble(MAP(steps=STEPS, batch_size=64), size=MEMBERS)
    members, _ = po.infer(fit, joint, rows, seed=given.seed, progress=False)
    fitted = row(f"{MEMBERS} MAP members", members, begin)
    chains = MCLMC(draws=400, warmup=200, chains=MEMBERS, mass=UnitMass())
    langevin, _ = po.infer(chains, joint, rows, start=members, seed=given.seed, progress=False)
    ensemble = row("MCLMC from them, fits included", langevin, begin)
    begin = clock()
    nuts = NUTS(draws=given.draws, warmup=given.warmup, chains=4, max_depth=given.depth)
    long, _ = po.infer(nuts, joint, rows, seed=given.seed, progress=False)
    reference = row("NUTS, 4 chains", long, begin)
    away = ensemble["test_nll"] - reference["test_nll"]
    notes = [
        f"{given.data}, {UNITS} tanh units, {joint.size} parameters, split 0: MCLMC's NLL is {away:+.3f} from that "
        f"of NUTS, in {ensemble['cpu'] / reference['cpu']:.3f} of its CPU time. Wanted: 0.02 above at most, in 0.1.",
        f"NUTS: {given.warmup:,} and {given.draws:,} transitions, trees up to depth {given.depth}. R-hat is the "
        "largest of outputs at test rows. NLL and RMSE are in units of the target.",
    ]
    head = ("method", "s", "CPU s", "test NLL", "test RMSE", "max R-hat of outputs")
    names = ("seconds", "cpu", "test_nll", "test_rmse", "rhat")
    table = [
        head,
        *((each["name"], *(f"{each[name]:.4g}" for name in names)) for each in (fitted, ensemble, reference)),
    ]
    about = context(given)
    text = report([], about, notes, table)
    given.results.mkdir(parents=True, exist_ok=True)
    document = {"topic": "mcmc_network", **about, "notes": notes, "results": [fitted, ensemble, reference]}
    (given.results / "mcmc_network.json").write_text(json.dumps(document, indent=1) + "\n")
    (given.results / "mcmc_network.md").write_text(f"# mcmc network\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
