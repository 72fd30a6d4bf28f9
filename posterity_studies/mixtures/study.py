"""The study: its run, its tables and its numbers as JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from posterity.cli.frame.output import table
from posterity.numerics.random import Key
from posterity_studies.frame import print_claims, remark, title
from posterity_studies.mixtures import bounds, example, factorised, partly, prior
from posterity_studies.mixtures import clusters as five
from posterity_studies.mixtures.bounds import Checks, Curve, Jensen, checks, curves, one_mean, one_point
from posterity_studies.mixtures.clusters import Clusters, clusters
from posterity_studies.mixtures.example import Rounds, Sample, Values
from posterity_studies.mixtures.factorised import Ascent, ascents
from posterity_studies.mixtures.partly import Share, partly_labelled
from posterity_studies.mixtures.prior import Priors, priors
from posterity_studies.options import Report, Settings, silent
from posterity_studies.rows import with_error


@dataclass(frozen=True, eq=False)
class Study:
    """The results of the study."""

    seed: int
    data: Sample
    complete: dict[str, Tensor]
    run: Rounds
    curves: tuple[Curve, ...]
    one_mean: tuple[Curve, ...]
    checks: Checks
    miniature: Checks
    jensen: Jensen
    ascents: dict[str, Ascent]
    shares: tuple[Share, ...]
    clusters: Clusters
    priors: Priors

    def claims(self) -> dict[str, bool]:
        """Claims of theory about EM and variational EM with a factorised q, and whether they hold here."""
        exact, product = self.ascents["EM"], self.ascents["variational EM"]
        small = 1e-9 * float(exact.log_likelihood.abs().max())
        return {
            "EM's bound equals the log-likelihood after every E-step": bool((exact.divergence.abs() <= small).all()),
            "neither bound ever falls": all(bool((run.bound.diff() >= -small).all()) for run in (exact, product)),
            "the log-likelihood is the bound plus KL(q || p(z | y))": max(exact.off, product.off) <= small,
            "with a factorised q a KL remains in the end": float(product.divergence[-1]) > small,
            "EM ends at a higher log-likelihood": bool(exact.log_likelihood[-1] > product.log_likelihood[-1] + small),
        }

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
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
            "jensen": {
                "point": bounds.POINT,
                "q": bounds.CHOSEN,
                "responsibility": self.jensen.responsibility,
                "log_of_the_mean": self.jensen.log_mean,
                "mean_of_the_logs": self.jensen.mean_log,
                "divergence": self.jensen.divergence,
                "bound_above_anywhere": float((self.jensen.bound - self.jensen.log_mean).max()),
            },
            "factorised": {
                "points": factorised.COUNT,
                "rounds": factorised.ROUNDS,
                "runs": [
                    {
                        "method": name,
                        "log_likelihood": ascent.log_likelihood.tolist(),
                        "bound": ascent.bound.tolist(),
                        "divergence": ascent.divergence.tolist(),
                        "gap_off_divergence": ascent.off,
                        "largest_fall_of_log_likelihood": ascent.largest_fall,
                        "mean_absolute_covariance": ascent.covariance,
                    }
                    for name, ascent in self.ascents.items()
                ],
                "claims": self.claims(),
            },
            "labels": {
                "points": partly.COUNT,
                "truth": _numbers(partly.TRUTH),
                "data_sets": partly.REPLICATES,
                "shares": [asdict(share) for share in self.shares],
            },
            "clusters": {
                "rows": five.COUNT,
                "best_log_likelihood": self.clusters.best,
                "starts": [
                    {
                        "kind": start.kind,
                        "middle": start.middle,
                        "worst": start.worst,
                        "share_at_best": start.share_at(self.clusters.best),
                        "ends": list(start.ends),
                    }
                    for start in self.clusters.starts
                ],
                "components": [asdict(component) for component in self.clusters.components],
            },
            "priors": {
                "rows": prior.ROWS,
                "hidden": prior.HIDDEN,
                "noise": prior.NOISE,
                "data_sets": prior.DATA_SETS,
                "noise_alone_nll": prior.noise_alone(),
                "fixed": [
                    {"scale": scale, "test_nll": asdict(mean)}
                    for scale, mean in zip(prior.SCALES, self.priors.fixed, strict=True)
                ],
                "variational_em": [_listed(asdict(choice)) for choice in self.priors.chosen],
            },
        }


PARTS = (0.1, 0.2, 2.3, 4.4, 5.1, 1.7)


def run(settings: Settings, folder: Path | None = None, report: Report = silent) -> Study:
    """Run the study; the seed determines all random numbers."""
    key = Key(settings.seed)
    report("EM in one dimension")
    data = example.sample(example.COUNT, example.TRUTH, key.fold("points"))
    hidden, small = example.unlabelled(data), example.miniature()
    run = example.expectation_maximization(hidden, example.START)
    small_run = example.expectation_maximization(small, example.MINIATURE_START)
    report("variational EM with a factorised q")
    products = ascents(key.fold("coins"))
    report(f"labels: {partly.REPLICATES} data sets")
    shares = tuple(partly_labelled(key.fold("labels")))
    report(f"clusters: {five.STARTS} starts of each kind, up to {five.MOST} components")
    groups = clusters(key.fold("clusters"))
    report(f"priors of a network: {prior.DATA_SETS} data sets")
    return Study(
        settings.seed,
        data,
        example.complete(data),
        run,
        tuple(curves(hidden, run.history)),
        tuple(one_mean(hidden, example.START)),
        checks(hidden, run, key.fold("q")),
        checks(small, small_run, key.fold("q")),
        one_point(),
        products,
        shares,
        groups,
        priors(key.fold("priors")),
    )


def _numbers(values: Values) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in values.items()}


def _listed(value: Any) -> Any:
    """Return the value with lists in place of tuples, as JSON reads it back."""
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (tuple, list)) else value


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    document = study.document()
    example, labels, clusters, priors = (document[name] for name in ("example", "labels", "clusters", "priors"))
    title(out, f"Two normal densities, {example['points']} points")
    rows = table("", "weight", "mean 1", "mean 2", "variance 1", "variance 2")
    for name in ("truth", "with_labels", "start", "by_em"):
        at = example[name]
        numbers = (at["weights"][0], *at["means"], *at["variances"])
        rows.add_row(name.replace("_", " ").replace("em", "EM"), *(f"{number:.4f}" for number in numbers))
    out.print(rows)
    title(out, "The bound of EM, in nats")
    both = [document[name]["checks"] for name in ("example", "miniature")]
    rows = table("", f"{document['example']['points']} points", f"{len(document['miniature']['points'])} points")
    for key, (name, form) in CHECKS.items():
        rows.add_row(name, *(format(checks[key], form) for checks in both))
    out.print(rows)
    remark(
        out,
        "The misprints are to be compared with the log-likelihood at the start: the first and the last are not "
        "tight, and the second is above it, so that it is no bound.",
    )
    out.print()
    title(out, f"Two hidden coins, {document['factorised']['points']} points: where q is a product")
    rows = table("after the last E-step", "log-likelihood", "bound", "KL(q || p(z | y))")
    for row in document["factorised"]["runs"]:
        keys = ("log_likelihood", "bound", "divergence")
        rows.add_row(row["method"], *(f"{round(row[key][-1], 4) + 0.0:.4f}" for key in keys))  # no minus zero
    out.print(rows)
    print_claims(out, document["factorised"]["claims"])
    out.print()
    title(out, f"Labels: error of the means, {labels['data_sets']} data sets of {labels['points']} points")
    rows = table("share of labels", "error")
    for row in labels["shares"]:
        rows.add_row(f"{100 * row['share']:g} %", with_error(row["error"], row["standard_error"]))
    out.print(rows)
    title(out, f"Five clusters in the plane, {clusters['rows']} rows: log-likelihood where EM ends")
    rows = table("start", "best", "median", "worst", "at the best")
    for row in clusters["starts"]:
        numbers = (max(row["ends"]), row["middle"], row["worst"])
        rows.add_row(row["kind"], *(f"{number:.2f}" for number in numbers), f"{100 * row['share_at_best']:.0f} %")
    out.print(rows)
    rows = table("components", "BIC", "ELBO", "alive")
    for row in clusters["components"]:
        rows.add_row(str(row["components"]), f"{row['bic']:.1f}", f"{row['elbo']:.2f}", str(row["alive"]))
    out.print(rows)
    title(out, f"Prior of a network, {priors['data_sets']} data sets of {priors['rows']} rows")
    rows = table("prior scale", "test NLL", "above best", "noise")
    for row in priors["fixed"]:
        rows.add_row(f"{row['scale']:g}", with_error(*row["test_nll"].values()), "", f"{priors['noise']:g}")
    for row in priors["variational_em"]:
        scales = ", ".join(dict.fromkeys(f"{scale:.2f}" for scale in row["scales"]))
        errors = (with_error(*row[key].values()) for key in ("test_nll", "above_best"))
        rows.add_row(f"variational EM: {scales}", *errors, f"{row['noise']:.3g}")
    out.print(rows)
    remark(out, "Above best: test NLL minus that of the fixed scale that is best on the same test rows.")


CHECKS = {
    "rounds": ("rounds of EM", "d"),
    "log_likelihood_start": ("log-likelihood at the start", ".6f"),
    "log_likelihood_end": ("log-likelihood at the end", ".6f"),
    "touching": ("bound off log-likelihood after E-steps", ".1e"),
    "highest_above": ("bound above it anywhere, at most", ".1e"),
    "decomposition": ("gap off the KL divergence", ".1e"),
    "two_forms": ("two forms of the bound apart", ".1e"),
    "smallest_step": ("smallest gain of a half-step", ".1e"),
    "fisher": ("gradient: Fisher's identity off autograd", ".1e"),
    "end_gradient": ("gradient at the end", ".1e"),
    "common_q": ("misprint: one q for all points, the best", ".6f"),
    "one_divergence": ("misprint: KL of the first point alone", ".6f"),
    "one_entropy": ("misprint: entropy of the first point alone", ".6f"),
}
