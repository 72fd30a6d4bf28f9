"""The study as a whole, and its numbers as one document."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from posterity.numerics.random import Key
from posterity_studies.mixtures import clusters as five
from posterity_studies.mixtures import example, partly, prior
from posterity_studies.mixtures.bounds import Checks, Curve, checks, curves, one_mean
from posterity_studies.mixtures.clusters import Clusters, clusters
from posterity_studies.mixtures.example import Rounds, Sample, Values
from posterity_studies.mixtures.partly import Share, partly_labelled
from posterity_studies.mixtures.prior import Priors, priors


@dataclass(frozen=True, eq=False)
class Study:
    """All that the study found."""

    seed: int
    data: Sample
    complete: dict[str, Tensor]
    run: Rounds
    curves: tuple[Curve, ...]
    one_mean: tuple[Curve, ...]
    checks: Checks
    miniature: Checks
    shares: tuple[Share, ...]
    clusters: Clusters
    priors: Priors

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        return {
            "seed": self.seed,
            "example": {
                "points": len(self.data.points),
                "truth": _numbers(example.TRUTH),
                "with_labels": _numbers(self.complete),
                "start": _numbers(self.run.history[0]),
                "by_em": _numbers(self.run.end),
                "bound_after_e": self.run.after_e.tolist(),
                "bound_after_m": self.run.after_m.tolist(),
                "checks": asdict(self.checks),
            },
            "miniature": {"points": list(example.MINIATURE), "checks": asdict(self.miniature)},
            "labels": {
                "points": partly.COUNT,
                "truth": _numbers(partly.TRUTH),
                "data_sets": partly.REPLICATES,
                "shares": [asdict(one) for one in self.shares],
            },
            "clusters": {
                "rows": five.COUNT,
                "best_log_likelihood": self.clusters.best,
                "starts": [
                    {
                        "kind": one.kind,
                        "middle": one.middle,
                        "worst": one.worst,
                        "share_at_best": one.share_at(self.clusters.best),
                        "ends": list(one.ends),
                    }
                    for one in self.clusters.starts
                ],
                "components": [asdict(one) for one in self.clusters.components],
            },
            "priors": {
                "rows": prior.ROWS,
                "hidden": prior.HIDDEN,
                "noise": prior.NOISE,
                "data_sets": prior.DATA_SETS,
                "noise_alone_nll": prior.noise_alone(),
                "fixed": [
                    {"scale": scale, "test_nll": asdict(one)}
                    for scale, one in zip(prior.SCALES, self.priors.fixed, strict=True)
                ],
                "variational_em": [_listed(asdict(one)) for one in self.priors.chosen],
            },
        }


def mixtures(seed: int = 0, report: Callable[[str], None] = lambda line: None) -> Study:
    """Run the study; `seed` fixes everything random, and `report` is told what comes next."""
    key = Key(seed)
    report("EM in one dimension")
    data = example.sample(example.COUNT, example.TRUTH, key.fold("points"))
    hidden, small = example.unlabelled(data), example.miniature()
    run = example.expectation_maximization(hidden, example.START)
    small_run = example.expectation_maximization(small, example.MINIATURE_START)
    report(f"labels: {partly.REPLICATES} data sets")
    shares = tuple(partly_labelled(key.fold("labels")))
    report(f"clusters: {five.STARTS} starts of each kind, up to {five.MOST} components")
    groups = clusters(key.fold("clusters"))
    report(f"priors of a network: {prior.DATA_SETS} data sets")
    return Study(
        seed,
        data,
        example.complete(data),
        run,
        tuple(curves(hidden, run.history)),
        tuple(one_mean(hidden, example.START)),
        checks(hidden, run, key.fold("q")),
        checks(small, small_run, key.fold("q")),
        shares,
        groups,
        priors(key.fold("priors")),
    )


def _numbers(values: Values) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in values.items()}


def _listed(value: Any) -> Any:
    """The same with lists for tuples, as JSON gives them back."""
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (tuple, list)) else value
