"""Acquisition by a posterior: which rows of a pool tell most about the function, or about predictions elsewhere."""

from collections.abc import Iterator

import torch
from torch import Tensor

from posterity.acquisition.labels import CONFIGURATIONS, Chosen, batch_bald_of_probs, checked_probs, epig_of_probs
from posterity.acquisition.numbers import Normals, of_covariance, of_draws, reduced_variance, shared_information
from posterity.errors import positive_whole
from posterity.model.batch import Inputs, map_inputs, named_tensors
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.mixture import Mixture
from posterity.posteriors.point import Point
from posterity.posteriors.posterior import Posterior
from posterity.predictive import DrawsPredictive, GaussianPredictive

__all__ = ["Chosen", "bald", "batch_bald", "epig", "variance_reduction"]

TOGETHER = 256  # pool rows whose covariance with the targets is formed at a time


def bald(
    posterior: Posterior, pool: object, *, draws: int | None = None, seed: int = 0, batch_size: int = 1024
) -> Tensor:
    """Mutual information of each pool row's target and the function (N,), in nats: BALD.

    **Math**: I(y; f) = H(E p(y | f)) - E H(p(y | f)) for a label: the `epistemic` part of the predictive. For D normal
    targets log det(I + noise^-1 V) / 2, with V the covariance of the function there. Takes what `predict` takes as
    `pool`, `draws`, `seed` and `batch_size`.

    **Limit**: exact for Gaussian outputs under Gaussian noise; where the function is drawn, biased by O(1 / draws), and
    V is the covariance of the draws. Labels at positions count each by itself: their sum is at least the joint
    information of the row. Rows of high scores may tell the same: choose several by `batch_bald`.

    **Cost**: a prediction at the pool.

    **References**: Houlsby et al. (2011), Bayesian active learning for classification and preference learning; MacKay
    (1992), Information-based objective functions for active data selection.

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=20)
    >>> q, _ = po.infer(po.methods.Laplace(tuning=None), joint, (x, joint.network.module(x).detach()))
    >>> pool = torch.tensor([[0.0], [3.0]])
    >>> int(bald(q, pool).argmax())  # far from the data
    1
    """
    _check("bald", posterior, draws)
    pred = posterior.predict(pool, draws=draws, seed=seed, batch_size=batch_size)
    if pred.classifies:
        return pred.epistemic.double().flatten(1).sum(1) if pred.epistemic.dim() > 1 else pred.epistemic.double()
    noise = pred.aleatoric.double().reshape(len(pred), -1)
    if isinstance(pred, DrawsPredictive):
        return of_draws(pred.likelihood.mean(pred.outputs).double().flatten(2), noise)[0].information()
    within = pred.covariance if isinstance(pred, GaussianPredictive) else None
    if within is None:  # outputs count as independent
        within = torch.diag_embed(pred.epistemic.reshape(noise.shape))
    return Normals(within.double(), noise, lambda row: noise).information()


def batch_bald(
    posterior: Posterior,
    pool: object,
    size: int,
    *,
    draws: int | None = None,
    seed: int = 0,
    batch_size: int = 1024,
    configurations: int = CONFIGURATIONS,
) -> Chosen:
    """Choose `size` pool rows whose targets together tell most about the function: batch BALD.

    **Math**: greedily the row n of largest I(y_n; f | y_chosen), whose sum is the joint information I(y_1 .. y_B; f):
    at least 1 - 1/e of the best batch's, as the information is submodular. Labels: E H(y_n | y_chosen) - E H(y_n | f),
    the first average over the configurations of the chosen labels, all of them while they are at most
    `configurations`, then as many that are drawn. Normal targets: log det(I + noise^-1 V) / 2 of the chosen rows, by
    pivoted Cholesky, with V the covariance of the function between rows, in closed form, or of `draws` of it.

    **Limit**: exact for the draws, up to the configurations that are drawn, and for Gaussian outputs under Gaussian
    noise. Few draws tell apart few functions: the information is at most log(draws).

    **Cost**: size * configurations * draws * N * C for labels, in pieces of memory; (N D)^2 numbers in closed form for
    normal targets, draws * N * D numbers by draws.

    **References**: Kirsch, van Amersfoort and Gal (2019), BatchBALD.

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=20)
    >>> q, _ = po.infer(po.methods.Laplace(tuning=None), joint, (x, joint.network.module(x).detach()))
    >>> batch_bald(q, torch.tensor([[2.9], [3.0], [-3.0]]), 2).rows.tolist()  # one at either end
    [1, 2]
    """
    _check("batch_bald", posterior, draws)
    with torch.inference_mode(False), torch.no_grad():
        if _labels(posterior):
            probs = _probs("batch_bald", posterior, pool, draws, seed, batch_size)
            return batch_bald_of_probs(probs, size, key=Key(seed).fold("labels"), configurations=configurations)
        inputs = _whole(posterior, pool)
        noise = _noise(posterior, inputs, draws, seed, batch_size)
        moments = posterior.joint_output_moments(inputs) if draws is None else None
        if moments is not None:
            return of_covariance(moments[1].double(), noise).batch(size)
        means = _means(posterior, inputs, draws, seed, batch_size)
        return of_draws(means, noise)[0].batch(size)


def epig(
    posterior: Posterior,
    pool: object,
    targets: object,
    *,
    draws: int | None = None,
    seed: int = 0,
    batch_size: int = 1024,
) -> Tensor:
    """Expected information gain in predictions: what a pool row's target tells about targets elsewhere, (N,) nats.

    **Math**: mean over the target inputs x* of I(y; y*), y at the pool row. Labels: H(y) + H(y*) - H(y, y*) with
    p(y, y*) = E p(y | f) p(y* | f). Normal targets: -log det(I - W W^T) / 2 with W = L^-1 Cov(f, f*) L*^-T, and L L^T
    the covariance of y: -log(1 - correlation^2) / 2 for one output.

    **Limit**: as for `batch_bald`. Unlike `bald` it does not ask for what matters nowhere: give as `targets` inputs
    from where predictions will be wanted, a hundred or more.

    **Cost**: draws * N * T * C^2 for labels, in pieces of memory; N T numbers of derivatives or draws.

    **References**: Bickford Smith et al. (2023), Prediction-oriented Bayesian active learning.

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=20)
    >>> q, _ = po.infer(po.methods.Laplace(tuning=None), joint, (x, joint.network.module(x).detach()))
    >>> int(epig(q, torch.tensor([[-9.0], [9.0]]), torch.tensor([[3.0], [4.0]])).argmax())
    1
    """
    _check("epig", posterior, draws)
    with torch.inference_mode(False), torch.no_grad():
        if _labels(posterior):
            probs, theirs = (_probs("epig", posterior, each, draws, seed, batch_size) for each in (pool, targets))
            return epig_of_probs(probs, theirs)
        pieces = _pairs(posterior, pool, targets, draws, seed, batch_size)
        return torch.cat([shared_information(across, own, theirs) for across, own, theirs in pieces])


def variance_reduction(
    posterior: Posterior,
    pool: object,
    targets: object,
    *,
    draws: int | None = None,
    seed: int = 0,
    batch_size: int = 1024,
) -> Tensor:
    """Reduction of the function's variance at `targets` by the targets of each pool row, (N,); for regression.

    **Math**: mean over the target inputs x* of the trace of Cov(f*, f) (Cov(f) + noise)^-1 Cov(f, f*), in squared
    units of the targets.

    **Limit**: as for `epig`, whose logarithms compare relative to the variances at x*; here large ones count most.

    **Cost**: as for `epig`.

    **References**: Cohn, Ghahramani and Jordan (1996), Active learning with statistical models.

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=20)
    >>> q, _ = po.infer(po.methods.Laplace(tuning=None), joint, (x, joint.network.module(x).detach()))
    >>> reduction = variance_reduction(q, torch.tensor([[0.0], [3.0]]), x)
    >>> bool((reduction < q.predict(x).epistemic.mean()).all()), int(reduction.argmax())
    (True, 1)
    """
    _check("variance_reduction", posterior, draws)
    if _labels(posterior):
        raise TypeError("variance_reduction is for numbers. Got a likelihood of classes. Use epig.")
    with torch.inference_mode(False), torch.no_grad():
        pieces = _pairs(posterior, pool, targets, draws, seed, batch_size)
        return torch.cat([reduced_variance(across, own) for across, own, _ in pieces])


def _check(name: str, posterior: Posterior, draws: int | None) -> None:
    if not isinstance(posterior, Posterior) or not isinstance(posterior.joint, Joint):
        raise TypeError(f"{name} needs the posterior of a network. Got {type(posterior).__name__}.")
    if draws is not None:
        positive_whole(f"{name}: draws", draws)
    if posterior.prediction_draws(2) < 2 or (draws is not None and draws < 2):
        raise ValueError(
            f"{name} needs two or more functions that a target could tell apart. Got one. Use a posterior with "
            "uncertainty (Laplace, an Ensemble), and draws above 1."
        )
    likelihood = posterior.joint.likelihood
    if likelihood.link in (None, "identity") and not likelihood.normal_targets:
        raise TypeError(
            f"{name} needs labels, or numbers with normal noise. Got {type(likelihood).__name__}. Use the epistemic "
            "part of q.predict(pool)."
        )


def _labels(posterior: Posterior) -> bool:
    """Whether targets are labels."""
    assert isinstance(posterior.joint, Joint)
    return not posterior.joint.likelihood.normal_targets


def _outputs(posterior: Posterior, inputs: object, draws: int | None, seed: int, batch_size: int) -> Tensor:
    """Outputs (S, N, *event) of the same functions at all rows."""
    if not posterior.ties_rows:
        raise ValueError("Rows need draws of one function. Use one_mask_a_draw=True.")
    count = posterior.prediction_draws(draws)
    if draws is None and isinstance(posterior, Mixture) and all(isinstance(p, Point) for p in posterior.posteriors):
        shares = posterior.shares
        count = len(shares) if bool((shares == shares[0]).all()) else count  # each of the ensemble once
    chunks = posterior._chunks(inputs, batch_size)
    return torch.cat([posterior.outputs(chunk, count, Key(seed)) for chunk, _, _ in chunks], 1)


def _probs(name: str, posterior: Posterior, inputs: object, draws: int | None, seed: int, batch_size: int) -> Tensor:
    assert isinstance(posterior.joint, Joint)
    logs = posterior.joint.likelihood.class_log_probs(_outputs(posterior, inputs, draws, seed, batch_size))
    assert logs is not None
    return checked_probs(name, logs.exp())


def _means(posterior: Posterior, inputs: object, draws: int | None, seed: int, batch_size: int) -> Tensor:
    """Means (S, N, D) of the targets under draws of the function, in float64."""
    assert isinstance(posterior.joint, Joint)
    outputs = _outputs(posterior, inputs, draws, seed, batch_size)
    return posterior.joint.likelihood.mean(outputs).double().reshape(len(outputs), outputs.shape[1], -1)


def _noise(posterior: Posterior, inputs: object, draws: int | None, seed: int, batch_size: int) -> Tensor:
    """Variance (N, D) of the targets given the function."""
    noise = posterior.predict(inputs, draws=draws, seed=seed, batch_size=batch_size).aleatoric
    return noise.double().reshape(len(noise), -1)


def _whole(posterior: Posterior, inputs: object) -> Inputs:
    """All rows of the inputs on the device of the posterior."""
    chunks = [chunk for chunk, _, _ in posterior._chunks(inputs, 1 << 62)]
    parts = iter([torch.cat(tensors) for tensors in zip(*(named_tensors(c).values() for c in chunks), strict=True)])
    return map_inputs(lambda _: next(parts), chunks[0])


def _pairs(
    posterior: Posterior, pool: object, targets: object, draws: int | None, seed: int, batch_size: int
) -> Iterator[tuple[Tensor, Normals, Normals]]:
    """Yield covariances (n, D, T, D) of the function between some pool rows and all targets, with the rows of both."""
    rows, others = _whole(posterior, pool), _whole(posterior, targets)
    settings = (draws, seed, batch_size)
    noise, theirs = _noise(posterior, rows, *settings), _noise(posterior, others, *settings)
    first = map_inputs(lambda tensor: tensor[:1], others)
    if draws is not None or posterior.joint_output_moments(first) is None:
        means, (aimed, right) = (
            _means(posterior, rows, *settings),
            of_draws(_means(posterior, others, *settings), theirs),
        )
        for low in range(0, len(noise), TOGETHER):
            pooled, left = of_draws(means[:, low : low + TOGETHER], noise[low : low + TOGETHER])
            yield torch.einsum("snd,ste->ndte", left, right), pooled, aimed
        return
    for low in range(0, len(noise), TOGETHER):
        own, ends = noise[low : low + TOGETHER], iter(named_tensors(others).values())
        some = map_inputs(lambda tensor, low=low: tensor[low : low + TOGETHER], rows)  # type: ignore[misc]
        moments = posterior.joint_output_moments(
            map_inputs(lambda tensor, ends=ends: torch.cat([tensor, next(ends)]), some)  # type: ignore[misc]
        )
        assert moments is not None
        (count, outputs), total = own.shape, len(own) + len(theirs)
        blocks = moments[1].double().reshape(total, outputs, total, outputs)
        pooled = of_covariance(blocks[:count, :, :count].reshape(own.numel(), -1), own)
        yield (
            blocks[:count, :, count:],
            pooled,
            of_covariance(blocks[count:, :, count:].reshape(theirs.numel(), -1), theirs),
        )
