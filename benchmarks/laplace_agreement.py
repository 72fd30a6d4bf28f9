"""Do posterity and laplace-torch agree on transformers, U-Nets, recurrent and language models?

    python -m benchmarks.laplace_agreement
    python -m benchmarks.laplace_agreement --only "LSTM;BERT"

The networks of `benchmarks.architectures` in float64, the U-Net on crops of 8 x 8 and 16 x 16 pixels, after a few steps
of Adam; full and diagonal Gauss-Newton matrix of all trainable weights under a N(0, 1/4) prior. Compared are the log
evidence, the covariance of the logits of each row (of each position) and the class probabilities by the probit formula,
with laplace-torch's (its default backend; README.md says how to install it) and with those of dense Jacobians by
`torch.func.jacrev`.

laplace-torch's log marginal likelihood is log p(D | theta) - (log det P - log det P_0 + theta^T P_0 theta) / 2, with
the precisions P of the posterior and P_0 of the prior. Ours is log p(D | theta) + log p(theta) + (R log 2 pi -
log det P) / 2, where the prior has its constants, (log det P_0 - R log 2 pi) / 2: the same number. laplace-torch knows
rows of logits (n, C), so its module is wrapped: positions become rows, and those whose label is -100 are left out of
the fit.
"""

import copy
import dataclasses
import itertools
import logging
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

import posterity as po
from benchmarks.architectures import ARCHITECTURES, Architecture
from benchmarks.harness import context, parser, write
from benchmarks.laplace_parts import PEER_PACKAGES
from benchmarks.networks import loss
from posterity.curvature import Diagonal, Full, GaussNewton, Structure
from posterity.methods import AllWeights, Laplace
from posterity.model.module import plain_attention

SCALE, STEPS, BATCH, TOLERANCE = 0.5, 30, 4, 1e-5
IGNORED = -100
STRUCTURES: dict[str, Structure] = {"full": Full(), "diag": Diagonal()}
MEASURES = ("evidence", "covariance", "probabilities")
HEAD = ["network", "weights", "matrix", "log evidence", *MEASURES, *(f"{measure}, dense" for measure in MEASURES)]


class Outcome(NamedTuple):
    """Log evidence, and of each row (n positions) the covariance of its logits (n, C, C) and probabilities (n, C)."""

    evidence: float
    covariance: Tensor
    probabilities: Tensor

    def away_from(self, other: "Outcome") -> dict[str, float]:
        """Return the largest differences: of the evidence, relative; of covariances, relative to the largest entry."""
        evidence = abs(self.evidence - other.evidence) / abs(other.evidence)
        covariance = float((self.covariance - other.covariance).abs().max() / other.covariance.abs().max())
        probability = float((self.probabilities - other.probabilities).abs().max())
        return dict(zip(MEASURES, (evidence, covariance, probability), strict=True))


def in_float64(value: Any) -> Any:
    """A row, or a batch, with its floating-point tensors in float64."""
    if isinstance(value, dict):
        return {name: in_float64(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(in_float64(part) for part in value)
    return value.double() if value.is_floating_point() else value


def cropped(case: Architecture, size: int) -> Architecture:
    """The U-Net on the first pixels of each image and of its labels."""

    def rows(generator: torch.Generator) -> list[Any]:
        return [(x[:, :size, :size], y[:size, :size]) for x, y in case.rows(generator)]

    return dataclasses.replace(case, name=f"U-Net {size} x {size}", rows=rows)


def cases() -> list[Architecture]:
    """All architectures, the U-Net in two small sizes."""
    each = [
        [cropped(case, 8), cropped(case, 16)] if case.name.startswith("U-Net") else [case] for case in ARCHITECTURES
    ]
    return list(itertools.chain(*each))


def trained(case: Architecture, seed: int) -> tuple[nn.Module, list[Any]]:
    """The network in float64 after a few steps, and its rows in batches."""
    module = case.module(seed).double().train()
    rows = [in_float64(row) for row in case.rows(torch.Generator().manual_seed(seed))]
    batches = [default_collate(rows[low : low + BATCH]) for low in range(0, len(rows), BATCH)]
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], 0.01)
    for batch in itertools.islice(itertools.cycle(batches), STEPS):
        optimizer.zero_grad()
        loss(case, module, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return module.eval(), batches


class Rows(nn.Module):
    """The network as laplace-torch takes it: a tensor or a dictionary in, logits (n, C) of labelled positions out."""

    def __init__(self, case: Architecture, module: nn.Module, *, plain: bool) -> None:
        super().__init__()
        self.module, self.outputs = module, case.outputs or (lambda returned: getattr(returned, "logits", returned))
        self.attention = plain_attention if plain else nullcontext

    def forward(self, batch: Any) -> Tensor:
        """Logits of a tensor, or of the tensors of a dictionary, at the positions that it keeps."""
        with self.attention():
            if isinstance(batch, Tensor):
                return by_position(self.outputs(self.module(batch)))
            inputs = {name: value for name, value in batch.items() if name not in ("labels", "kept", "single")}
            returned = self.module(batch["single"]) if "single" in batch else self.module(**inputs)
            return by_position(self.outputs(returned))[batch["kept"]]


def by_position(values: Tensor) -> Tensor:
    """Rows (N * positions, C) of values (N, C, *positions)."""
    return values.movedim(1, -1).flatten(0, -2)


def as_rows(batch: Any, *, all_positions: bool = False) -> tuple[Any, Tensor]:
    """A batch for `Rows`, and its labels, without the positions that are not labelled (or with them)."""
    inputs, labels = (batch, batch["labels"]) if isinstance(batch, dict) else batch
    labels = labels.flatten()
    kept = labels != IGNORED
    if isinstance(inputs, Tensor) and bool(kept.all()):
        return inputs, labels
    kept = torch.ones_like(kept) if all_positions else kept
    mapping = inputs if isinstance(inputs, dict) else {"single": inputs}
    return {**mapping, "kept": kept, "labels": labels[kept]}, labels[kept]


def ours(case: Architecture, module: nn.Module, batches: list[Any], structure: str) -> Outcome:
    """What posterity says, of rows as they come."""
    rows = [row for batch in batches for row in _single(batch)]
    network = po.Network(module, outputs=case.outputs)
    joint = po.Joint(network, case.likelihood, po.priors.Normal(scale=SCALE), num_data=len(rows))
    method = Laplace(GaussNewton(column_limit=None), STRUCTURES[structure], AllWeights(), tuning=None)
    q, _ = po.infer(method, joint, DataLoader(rows, batch_size=BATCH), progress=False)  # type: ignore[arg-type]
    assert isinstance(q, po.posteriors.Linearized)
    assert q.gaussian.log_evidence is not None
    covariances, probabilities = [], []
    for batch in batches:
        is_mapping = isinstance(batch, dict)
        inputs = {name: value for name, value in batch.items() if name != "labels"} if is_mapping else batch[0]
        mean, spread = q.output_moments(inputs)
        shape = (len(mean), mean.shape[1], -1, mean.shape[1], mean[0, 0].numel())
        covariances.append(spread.reshape(shape).diagonal(dim1=2, dim2=4).movedim(-1, 1).flatten(0, 1))
        probabilities.append(by_position(q.predict(inputs, integrator=po.predictive.Probit()).probs))
    return Outcome(float(q.gaussian.log_evidence), torch.cat(covariances), torch.cat(probabilities))


def _single(batch: Any) -> Iterator[Any]:
    """The rows of a batch."""
    if isinstance(batch, dict):
        return (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
    return zip(*batch, strict=True)


class Batches(list[Any]):
    """Batches as laplace-torch takes them; it asks the data set for its length."""

    @property
    def dataset(self) -> range:
        """Something as long as the labels are many."""
        return range(sum(len(batch["labels"] if isinstance(batch, dict) else batch[1]) for batch in self))


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make float64 the default inside `with`: laplace-torch rounds full matrices to the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def theirs(
    case: Architecture, module: nn.Module, batches: list[Any], structure: str, *, plain: bool, unlabelled: bool = False
) -> Outcome:
    """What laplace-torch says of the wrapped network, with attention as it comes or by plain operations.

    With `unlabelled` it is given positions whose label is -100, too.
    """
    from laplace import Laplace as Peer  # type: ignore[import-not-found]

    pairs = [as_rows(batch, all_positions=unlabelled) for batch in batches]
    loader = Batches(inputs if isinstance(inputs, dict) else (inputs, labels) for inputs, labels in pairs)
    key = {"dict_key_x": next(iter(loader[0]))} if isinstance(loader[0], dict) else {}
    with float64_by_default():
        fitted = Peer(
            Rows(case, copy.deepcopy(module), plain=plain),
            "classification",
            subset_of_weights="all",
            hessian_structure=structure,
            prior_precision=SCALE**-2,
            **key,
        )
        fitted.fit(loader)
        every = [as_rows(batch, all_positions=True)[0] for batch in batches]
        covariance = torch.cat([fitted._glm_predictive_distribution(inputs)[1] for inputs in every])
        probabilities = torch.cat([fitted(inputs, pred_type="glm", link_approx="probit") for inputs in every])
        return Outcome(float(fitted.log_marginal_likelihood()), covariance, probabilities)


def dense(case: Architecture, module: nn.Module, batches: list[Any]) -> dict[str, Outcome]:
    """What the formulas say of whole Jacobians, by structure."""
    rows = Rows(case, module, plain=True)
    weights = {name: p.detach() for name, p in rows.named_parameters() if p.requires_grad}
    theta = torch.cat([weight.flatten() for weight in weights.values()])
    matrix, log_likelihood = torch.zeros(len(theta), len(theta), dtype=theta.dtype), 0.0
    jacobians, logits = [], []
    for batch in batches:
        inputs, labels = as_rows(batch, all_positions=True)
        slopes, out = jacrev(lambda w, x=inputs: (functional_call(rows, w, (x,)),) * 2, has_aux=True)(weights)
        jacobians.append(torch.cat([slope.flatten(2) for slope in slopes.values()], 2))  # (n, C, P)
        logits.append(out.detach())
        kept = labels != IGNORED
        probs, known = logits[-1].softmax(1)[kept], jacobians[-1][kept]
        fisher = probs.diag_embed() - probs.unsqueeze(2) * probs.unsqueeze(1)
        matrix += (fisher @ known).flatten(0, 1).mT @ known.flatten(0, 1)
        log_likelihood -= float(F.cross_entropy(logits[-1], labels, reduction="sum", ignore_index=IGNORED))
    prior = SCALE**-2
    outcomes = {}
    for structure, curvature in (("full", matrix), ("diag", matrix.diag().diag())):
        root = torch.linalg.cholesky(curvature + prior * torch.eye(len(theta), dtype=theta.dtype))
        volume = 2.0 * root.diag().log().sum() - len(theta) * math.log(prior)
        spreads = []
        for jacobian in jacobians:
            half = torch.linalg.solve_triangular(root, jacobian.flatten(0, 1).mT, upper=False)  # (P, n C)
            half = half.mT.reshape(jacobian.shape)
            spreads.append(half @ half.mT)
        covariance, mean = torch.cat(spreads), torch.cat(logits)
        kappa = (1.0 + math.pi / 8.0 * covariance.diagonal(dim1=1, dim2=2)).rsqrt()
        evidence = log_likelihood - 0.5 * float(volume + prior * theta.square().sum())
        outcomes[structure] = Outcome(evidence, covariance, (kappa * mean).softmax(1))
    return outcomes


def compared(case: Architecture, seed: int) -> dict[str, Any]:
    """Differences of ours from both others by structure, with laplace-torch's errors."""
    module, batches = trained(case, seed)
    size = sum(p.numel() for p in module.parameters() if p.requires_grad)
    reference, results = dense(case, module, batches), dict[str, Any]()
    for structure in STRUCTURES:
        own = ours(case, module, batches, structure)
        result = results[structure] = {
            "weights": size,
            "log evidence": own.evidence,
            "dense": own.away_from(reference[structure]),
        }
        for plain in (False, True):
            try:
                peer = theirs(case, module, batches, structure, plain=plain)
            except Exception as error:  # a row that says why
                what = "with attention by plain operations" if plain else "as it comes"
                result[f"error {what}"] = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            else:
                result |= {"laplace-torch": own.away_from(peer), "plain attention": plain}
                result["laplace-torch from dense"] = peer.away_from(reference[structure])
                if any(bool((as_rows(batch, all_positions=True)[1] == IGNORED).any()) for batch in batches):
                    given = theirs(case, module, batches, structure, plain=plain, unlabelled=True)
                    result["labels of -100, laplace-torch from dense"] = given.away_from(reference[structure])
                break
        print(" | ".join(_cells(case.name, structure, result)), file=sys.stderr, flush=True)
    return results


def _cells(name: str, structure: str, result: dict[str, Any]) -> list[str]:
    """A row of the table."""
    peer = _numbers(result["laplace-torch"]) if "laplace-torch" in result else ["cannot run"] * len(MEASURES)
    evidence = f"{result['log evidence']:.6f}"
    return [name, f"{result['weights']:,}", structure, evidence, *peer, *_numbers(result["dense"])]


def _numbers(differences: dict[str, float]) -> list[str]:
    return [f"{value:.1e}" for value in differences.values()]


def main() -> None:
    """Compare every network, and write `laplace_agreement.json` and `laplace_agreement.md`."""
    words = parser(__doc__ or "")
    words.add_argument("--only", default="", help="names of networks, with semicolons")
    given = words.parse_args()
    torch.set_num_threads(given.threads)
    logging.getLogger("posterity").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    chosen = [case for case in cases() if not given.only or case.name in given.only.split(";")]
    facts = {case.name: compared(case, given.seed) for case in chosen}
    table, apart, unlabelled, errors = [HEAD], list[str](), list[str](), dict[str, list[str]]()
    notes = [
        "Differences of ours from laplace-torch's, then from those of dense Jacobians: of the log evidence, relative; "
        "of the covariances of logits, relative to the largest; of probit class probabilities."
    ]
    for name, results in facts.items():
        for structure, result in results.items():
            table.append(_cells(name, structure, result))
            differences = [*result.get("laplace-torch", {}).values(), *result["dense"].values()]
            if not all(value <= TOLERANCE for value in differences):  # also where one is not a number
                apart.append(f"{name}, {structure}")
            for word, why in result.items():
                if word.startswith("error"):
                    errors.setdefault(f"{word.removeprefix('error ')}, {why}", []).append(f"{name}, {structure}")
                if word.startswith("labels"):
                    off = ", ".join(_numbers(why))
                    unlabelled.append(f"{name}, {structure}: {off}")
    notes.append(f"Differences above {TOLERANCE:g}: {'; '.join(apart) or 'none'}.")
    if unlabelled:
        notes.append(
            f"Given positions with labels of {IGNORED}, which the table leaves out, laplace-torch is away from dense "
            f"Jacobians by: {'; '.join(unlabelled)}. Its full matrix is of the loss, which ignores them; its diagonal "
            "is of the logits of all positions."
        )
    notes += [f"laplace-torch's error, {why} ({'; '.join(where)})" for why, where in errors.items()]
    notes.append(
        "After such an error it runs with attention by plain operations. The default dtype is float64 while it runs, "
        "as it rounds full matrices of networks in float64 to the default one."
    )
    about = context(given, (*PEER_PACKAGES, "transformers", "peft"))
    write("laplace_agreement", [], about, facts, notes, given.results, table)


if __name__ == "__main__":
    main()
