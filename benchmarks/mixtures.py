"""Time and memory of an EM round for a Gaussian mixture with full covariances, against scikit-learn's.

A call runs five rounds, E-step and M-step, from the same start: the components of a rough guess, by the first two
coordinates alone. The limit is the arithmetic that remains if all else were free: scores and sums are linear in the
products x_i x_j, so that a round is two matrix products with them; here the products are made beforehand and kept, in
the number type of the rows. With `--device cuda` the larger mixture is fitted there, and by scikit-learn on the
processor of that machine.
"""

import argparse
import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from benchmarks.memory import MEBIBYTE, peak_bytes
from posterity.mixtures import Components, Full, Rows, passes, rows_of
from posterity.numerics.random import Key

ROUNDS = 5  # of EM, in one call
FLOOR = 1e-6  # added to variances, as scikit-learn does
LIMIT, OURS, PEER = "two matrix products", "posterity", "scikit-learn GaussianMixture"
EXACT_PEER = f"{PEER}, rows cast to float64"
KIND = Full()


class Case(NamedTuple):
    """The size of one problem."""

    components: int
    dimensions: int
    rows: int


CASES = {"small": Case(2, 1, 1_000_000), "large": Case(16, 16, 100_000)}
TYPES = {"float64": torch.float64, "float32": torch.float32}


class Fitted(NamedTuple):
    """A mixture in float64, in the coordinates of the rows, and the mean log density of a row in the last E-step."""

    weights: Tensor  # (K,)
    means: Tensor  # (K, D)
    covariances: Tensor  # (K, D, D)
    log_density: float


def problem(case: Case, dtype: torch.dtype, seed: int) -> tuple[Tensor, Fitted]:
    """Rows (N, D) around random means, and the mixture to start from."""
    key = Key(seed).fold("mixtures")
    means = 3.0 * key.fold("means").normal((case.components, case.dimensions), dtype=torch.float64, device="cpu")
    which = (key.fold("which").uniform((case.rows,), device="cpu") * case.components).long()
    noise = key.fold("noise").normal((case.rows, case.dimensions), dtype=torch.float64, device="cpu")
    points = (means[which] + noise).to(dtype)
    nearest = torch.cdist(points[:, :2].double(), means[:, :2]).argmin(1)
    groups = [points[nearest == component].double() for component in range(case.components)]
    covariances = torch.stack([torch.cov(group.T, correction=0).reshape(2 * [case.dimensions]) for group in groups])
    return points, Fitted(
        torch.tensor([len(group) / case.rows for group in groups], dtype=torch.float64),
        torch.stack([group.mean(0) for group in groups]),
        covariances + FLOOR * torch.eye(case.dimensions, dtype=torch.float64),
        math.nan,
    )


def posterity_rounds(rows: Rows, start: Fitted) -> Fitted:
    """EM by one pass over the rows a round, on the device of the rows."""
    weights, means, covariances = (each.to(rows.points.device)[None] for each in start[:3])
    _, count, dimensions = means.shape
    constant = -0.5 * dimensions * math.log(2.0 * math.pi)
    floor = FLOOR * torch.eye(dimensions, dtype=torch.float64, device=means.device)
    means = means - rows.centre
    found = torch.zeros(())
    for _ in range(ROUNDS):
        factors = KIND.factors(covariances)
        offsets = weights.log() + constant + KIND.half_log_det(factors, count, dimensions)
        sums = passes.statistics(rows, KIND, Components(offsets, means, factors))
        weights = sums.counts / len(rows.points)
        means = means + sums.shifts
        covariances = KIND.second_moments(sums) / sums.counts[..., None, None] + floor
        found = sums.log_likelihood[0]
    return Fitted(weights[0], (means + rows.centre)[0], covariances[0], float(found) / len(rows.points))


def peer_rounds(points: Tensor, start: Fitted) -> Callable[[], Fitted]:
    """The same rounds by scikit-learn's own E-step and M-step, on the processor."""
    from sklearn.mixture import GaussianMixture

    x = points.numpy()
    weights, means, covariances = (each.to(points.dtype).numpy() for each in start[:3])
    factors = KIND.factors(start.covariances[None])[0].to(points.dtype).numpy()

    def run() -> Fitted:
        model = GaussianMixture(len(weights), covariance_type="full", reg_covar=FLOOR)
        model.weights_, model.means_, model.covariances_ = weights, means, covariances
        model.precisions_cholesky_ = factors
        log_density = math.nan
        for _ in range(ROUNDS):
            log_density, log_shares = model._e_step(x)
            model._m_step(x, log_shares)
        found = (torch.as_tensor(each).double() for each in (model.weights_, model.means_, model.covariances_))
        return Fitted(*found, float(log_density))

    return run


def products(points: Tensor, components: int) -> Callable[[], None]:
    """Two products a round with x_i x_j, x_i and 1, kept for all rows."""
    first, second = torch.triu_indices(points.shape[1], points.shape[1], device=points.device)
    features = torch.cat([points[:, first] * points[:, second], points, torch.ones_like(points[:, :1])], 1)
    coefficients = points.new_ones(features.shape[1], components)
    shares = points.new_full((len(points), components), 1 / components)

    def run() -> None:
        for _ in range(ROUNDS):
            features @ coefficients
            shares.T @ features

    return run


def on_device(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The call, ending when the device has."""
    if device == "cpu":
        return call

    def finished() -> Any:
        result = call()
        torch.cuda.synchronize()
        return result

    return finished


def peak_mebibytes(call: Callable[[], Any], device: str) -> float:
    """The most memory that one call takes beside the rows and what it keeps: resident, or allocated on the GPU."""
    call()  # what a first call makes and keeps is not a round's
    if device == "cpu":
        return peak_bytes(call) / MEBIBYTE
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / MEBIBYTE


def difference(one: Fitted, other: Fitted) -> float:
    """The largest difference of weights, means and covariances, relative to the largest number of each."""
    pairs = zip(one[:3], other[:3], strict=True)
    return max(float((a.cpu() - b.cpu()).abs().max() / b.abs().max()) for a, b in pairs)


def measured(case: Case, dtype: str, given: argparse.Namespace) -> Comparison:
    """One table: the limit, ours and the peer, with memory and how far each is from the peer in float64.

    Rows in float32 are also given to the peer in float64, which is what ours computes in.
    """
    points, start = problem(case, TYPES[dtype], given.seed)
    rows = rows_of(points.to(given.device))
    peaks: dict[str, float] = {}
    results: dict[str, Fitted] = {}

    def noted(name: str, call: Callable[[], Any], device: str) -> Callable[[], Any]:
        call = on_device(call, device)
        if device == given.device:
            peaks[name] = peak_mebibytes(call, device)
        if name != LIMIT:
            results[name] = call()
        return call

    def build(name: str, given: Tensor) -> Callable[[], Fitted]:
        return noted(name, peer_rounds(given, start), "cpu")

    peers = {PEER: points}
    if points.dtype == torch.float32:  # ours computes in float64 whatever the rows are in
        peers[EXACT_PEER] = points.double()
    size = points.numel() * points.element_size() / MEBIBYTE
    found = compare(
        f"EM round, {case.components} components, {case.dimensions} dimensions, {case.rows:,} rows in {dtype} "
        f"({size:.3g} MiB), {given.device}",
        [
            Contender(LIMIT, lambda: noted(LIMIT, products(rows.points, case.components), given.device), ROUNDS),
            Contender(
                OURS,
                lambda: noted(OURS, lambda: posterity_rounds(rows, start), given.device),
                ROUNDS,
                lambda result: result.log_density,
            ),
            *(
                Contender(
                    name,
                    functools.partial(build, name, rows_given),
                    ROUNDS,
                    lambda result: result.log_density,
                    peer=True,
                )
                for name, rows_given in peers.items()
            ),
        ],
        limit=LIMIT,
        unit=f"round of EM; a call runs {ROUNDS}",
        rounds=given.rounds,
        tolerance=1e-4,
        checked_against=OURS,
    )
    columns: dict[str, dict[str, float]] = {"peak MiB": peaks}
    if PEER in results:
        columns["x posterity (by round)"] = {
            timing.name: statistics.median(
                theirs / ours for ours, theirs in zip(found[OURS].seconds, timing.seconds, strict=True)
            )
            for timing in found.timings
            if timing.name in peers
        }
        exact = peer_rounds(points.double(), start)()
        columns["off the peer in float64"] = {name: difference(result, exact) for name, result in results.items()}
    return dataclasses.replace(found, columns=columns)


def one_pool(threads: int) -> AbstractContextManager[Any]:
    """As many threads for scikit-learn's products as for ours."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:  # it comes with scikit-learn, which then has a row that says so
        return nullcontext()
    return threadpool_limits(threads)


def main() -> None:
    """Run the cases and write `mixtures.json` and `mixtures.md` (`mixtures_cuda` on a GPU)."""
    options = parser(__doc__ or "")
    options.set_defaults(rounds=7)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where ours runs (default cpu)")
    options.add_argument(
        "--case", choices=list(CASES), action="append", help="run this alone (default: all, large on CUDA)"
    )
    given = options.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda needs a CUDA device, and torch found none.")
    torch.set_num_threads(given.threads)
    names = given.case or (list(CASES) if given.device == "cpu" else ["large"])
    with one_pool(given.threads):
        comparisons = [measured(CASES[name], dtype, given) for name in names for dtype in TYPES]
    notes = [
        f"Peak MiB: growth of the process's resident set in one call of {ROUNDS} rounds, beside the rows (on CUDA what "
        "torch allocated there); the limit keeps its products beside that.",
        "Off the peer in float64: largest difference of weights, means and covariances after the rounds from those of "
        "scikit-learn on the same rows in float64, relative to the largest number of each.",
        "Checksum: mean log density of a row in the last E-step.",
    ]
    if given.device == "cuda":
        notes.append(f"On {torch.cuda.get_device_name()}; scikit-learn on the processor, {given.threads} thread(s).")
    topic = "mixtures" if given.device == "cpu" else "mixtures_cuda"
    write(topic, comparisons, context(given, ["scikit-learn", "numpy"]), {}, notes, given.results)


if __name__ == "__main__":
    main()
