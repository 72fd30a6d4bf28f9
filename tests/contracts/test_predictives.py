"""One common suite for every Predictive: what a metric may rely on."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from counts import Counts
from torch import Tensor

from posterity.errors import BadData
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Heteroscedastic, Poisson, StudentT
from posterity.likelihoods import Probit as ProbitLink
from posterity.numerics.random import Key
from posterity.predictive import (
    AffinePredictive,
    ClassPredictive,
    Exact,
    ExponentialPredictive,
    GaussianPredictive,
    LaplaceBridge,
    MonteCarlo,
    NormalsPredictive,
    Predictive,
    Probit,
    ProbitPhi,
    from_outputs,
    mixed,
)

ROWS = 5
Build = Callable[[slice, torch.dtype], Predictive]


def normal(label: str, *shape: int) -> Tensor:
    return Key(11).fold(label).normal(shape, torch.float64, torch.get_default_device())


def covariances(label: str, size: int) -> Tensor:
    root = normal(label, ROWS, size, size)
    return root @ root.mT + 0.1 * torch.eye(size, dtype=torch.float64)


def gaussian(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, spread = normal("mean", ROWS, 1)[rows].to(dtype), normal("spread", ROWS, 1)[rows].to(dtype) ** 2
    return GaussianPredictive(mean, spread, torch.tensor(0.3, dtype=dtype))


def gaussian_without_event(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, spread = normal("mean", ROWS)[rows].to(dtype), normal("spread", ROWS)[rows].to(dtype) ** 2
    return GaussianPredictive(mean, spread, torch.tensor(0.3, dtype=dtype))


def gaussian_two_outputs(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, spread = normal("mean", ROWS, 2)[rows].to(dtype), normal("spread", ROWS, 2)[rows].to(dtype) ** 2
    return GaussianPredictive(mean, spread, torch.tensor([0.3, 0.6], dtype=dtype))


def gaussian_joint(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, covariance = normal("mean", ROWS, 2)[rows].to(dtype), covariances("joint", 2)[rows].to(dtype)
    return Exact()(Gaussian(scale=(0.7, 0.9)), mean, covariance, Key(0))


def draws(rows: slice, dtype: torch.dtype) -> Predictive:
    return from_outputs(Gaussian(scale=0.4), normal("draws", 6, ROWS, 1)[:, rows].to(dtype))


def draws_without_event(rows: slice, dtype: torch.dtype) -> Predictive:
    return from_outputs(Gaussian(scale=0.4), normal("draws", 6, ROWS)[:, rows].to(dtype))


def draws_two_outputs(rows: slice, dtype: torch.dtype) -> Predictive:
    return from_outputs(Gaussian(scale=(0.5, 0.9)), normal("draws", 3, ROWS, 2)[:, rows].to(dtype))


def draws_with_their_own_noise(rows: slice, dtype: torch.dtype) -> Predictive:
    raw = 0.3 * normal("raw", 6, 1).to(dtype)
    likelihood = Gaussian(scale=1.0, learn=True).fixed(raw)  # scale (6, 1, 1)
    return from_outputs(likelihood, normal("draws", 6, ROWS, 1)[:, rows].to(dtype))


def counts(rows: slice, dtype: torch.dtype) -> Predictive:
    return from_outputs(Counts(), normal("draws", 4, ROWS, 1)[:, rows].to(dtype))


def binary_draws(rows: slice, dtype: torch.dtype) -> Predictive:
    return from_outputs(Bernoulli(), normal("draws", 4, ROWS, 1)[:, rows].to(dtype))


def classes_draws(rows: slice, dtype: torch.dtype) -> Predictive:
    return from_outputs(Categorical(), normal("draws", 4, ROWS, 3)[:, rows].to(dtype))


def classes_with_a_zero(rows: slice, dtype: torch.dtype) -> Predictive:
    probs = torch.tensor([0.25, 0.0, 0.75, 0.0], dtype=dtype).expand(ROWS, 4)
    return ClassPredictive(probs[rows])


def classes_probit(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, covariance = normal("mean", ROWS, 3)[rows].to(dtype), covariances("classes", 3)[rows].to(dtype)
    return Probit()(Categorical(), mean, covariance, Key(0))


def binary_phi(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, covariance = normal("mean", ROWS, 1)[rows].to(dtype), covariances("binary", 1)[rows].to(dtype)
    return ProbitPhi()(Bernoulli(), mean, covariance, Key(0))


def binary_exact(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, covariance = normal("mean", ROWS)[rows].to(dtype), covariances("binary", 1)[rows].to(dtype)
    return Exact()(Bernoulli(), mean, covariance, Key(0))


def binary_quantiles(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, covariance = normal("mean", ROWS, 1)[rows].to(dtype), covariances("binary", 1)[rows].to(dtype)
    return Exact()(ProbitLink(), mean, covariance, Key(0))


def noise_of_the_network(rows: slice, dtype: torch.dtype) -> Predictive:
    outputs = normal("draws", 6, ROWS, 2) * torch.tensor([1.0, 0.3])
    return from_outputs(Heteroscedastic(), outputs[:, rows].to(dtype))


def long_tails(rows: slice, dtype: torch.dtype) -> Predictive:
    return from_outputs(StudentT(9.0, scale=(0.5, 0.9)), normal("draws", 6, ROWS, 2)[:, rows].to(dtype))


def long_tails_with_their_own_noise(rows: slice, dtype: torch.dtype) -> Predictive:
    likelihood = StudentT(9.0, learn=True).fixed(0.3 * normal("raw", 6, 1).to(dtype))
    return from_outputs(likelihood, normal("draws", 6, ROWS, 1)[:, rows].to(dtype))


def images(rows: slice, dtype: torch.dtype) -> Predictive:
    likelihood = Gaussian(scale=1.0, learn=True).fixed(0.3 * normal("raw", 4, 1).to(dtype))
    return from_outputs(likelihood, normal("draws", 4, ROWS, 2, 3)[:, rows].to(dtype))


def poisson(rows: slice, dtype: torch.dtype) -> Predictive:
    return from_outputs(Poisson(), normal("draws", 4, ROWS, 1)[:, rows].to(dtype))


def tokens(rows: slice, dtype: torch.dtype) -> Predictive:
    return from_outputs(Categorical(positions=1), normal("draws", 4, ROWS, 3, 2)[:, rows].to(dtype))


def many_labels(rows: slice, dtype: torch.dtype) -> Predictive:
    return from_outputs(Bernoulli(), normal("draws", 4, ROWS, 3)[:, rows].to(dtype))


def tokens_bridge(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, covariance = normal("mean", ROWS, 3, 2)[rows].to(dtype), covariances("tokens", 6)[rows].to(dtype)
    return LaplaceBridge(project=True)(Categorical(positions=1), mean, covariance, Key(0))


def many_labels_exact(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, covariance = normal("mean", ROWS, 2)[rows].to(dtype), covariances("joint", 2)[rows].to(dtype)
    return Exact()(Bernoulli(), mean, covariance, Key(0))


def classes_exact(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, covariance = normal("mean", ROWS, 3)[rows].to(dtype), covariances("classes", 3)[rows].to(dtype)
    return Exact()(Categorical(), mean, covariance, Key(0))


def classes_bridge(rows: slice, dtype: torch.dtype) -> Predictive:
    mean, covariance = normal("mean", ROWS, 3)[rows].to(dtype), covariances("classes", 3)[rows].to(dtype)
    return LaplaceBridge()(Categorical(), mean, covariance, Key(0))


def mixture(rows: slice, dtype: torch.dtype) -> Predictive:
    return mixed([gaussian(rows, dtype), draws_with_their_own_noise(rows, dtype)], torch.tensor([0.3, 0.7]))


def mixture_two_outputs(rows: slice, dtype: torch.dtype) -> Predictive:
    return mixed([gaussian_joint(rows, dtype), gaussian_two_outputs(rows, dtype)])


def mixture_of_counts(rows: slice, dtype: torch.dtype) -> Predictive:
    return mixed([poisson(rows, dtype), counts(rows, dtype)], torch.tensor([0.9, 0.1]))


def mixture_of_classes(rows: slice, dtype: torch.dtype) -> Predictive:
    more = from_outputs(Categorical(), normal("more", 7, ROWS, 3)[:, rows].to(dtype))
    return mixed([classes_draws(rows, dtype), more], torch.tensor([0.2, 0.8]))


def mixture_of_averaged_classes(rows: slice, dtype: torch.dtype) -> Predictive:
    return mixed([classes_draws(rows, dtype), classes_probit(rows, dtype)])


def normals(rows: slice, dtype: torch.dtype) -> Predictive:
    means, scales = (normal(label, 3, ROWS, 1)[:, rows].to(dtype) for label in ("means", "scales"))
    return NormalsPredictive(means, (0.3 * scales).exp(), torch.tensor([0.2, 0.3, 0.5]), 0.1 * scales[0].square())


def normals_two_outputs(rows: slice, dtype: torch.dtype) -> Predictive:
    means, scales = (normal(label, 3, ROWS, 2)[:, rows].to(dtype) for label in ("means", "scales"))
    return NormalsPredictive(means, (0.3 * scales).exp(), torch.tensor([0.2, 0.3, 0.5]), 0.1 * scales[0].square())


def exponential(rows: slice, dtype: torch.dtype) -> Predictive:
    return ExponentialPredictive(gaussian_two_outputs(rows, dtype), shift=0.5, scale=0.3)


def exponential_draws(rows: slice, dtype: torch.dtype) -> Predictive:
    return ExponentialPredictive(draws_with_their_own_noise(rows, dtype), shift=-1.0, scale=0.4)


def affine(rows: slice, dtype: torch.dtype) -> Predictive:
    return AffinePredictive(mixture(rows, dtype), shift=20.0, scale=3.0)


def affine_two_outputs(rows: slice, dtype: torch.dtype) -> Predictive:
    scale = torch.tensor([0.1, 30.0], dtype=torch.float64)
    return AffinePredictive(gaussian_joint(rows, dtype), torch.tensor([1.0, -50.0]), scale)


def affine_draws(rows: slice, dtype: torch.dtype) -> Predictive:
    return AffinePredictive(draws(rows, dtype), shift=-2.0, scale=0.5)


SCALAR: list[Build] = [
    affine,
    affine_draws,
    normals,
    mixture,
    gaussian,
    gaussian_without_event,
    draws,
    draws_without_event,
    draws_with_their_own_noise,
    noise_of_the_network,
]
PLANAR: list[Build] = [
    normals_two_outputs,
    mixture_two_outputs,
    affine_two_outputs,
    gaussian_two_outputs,
    gaussian_joint,
    draws_two_outputs,
]
EXPONENTIAL: list[Build] = [exponential, exponential_draws]
QUANTILES = [*SCALAR, *PLANAR, *EXPONENTIAL, long_tails, long_tails_with_their_own_noise, images]
COUNTS: list[Build] = [counts, poisson, mixture_of_counts]
REGRESSION = [*QUANTILES, *COUNTS]
SPLIT_CLASSES: list[Build] = [mixture_of_classes, binary_draws, classes_draws, tokens, many_labels]
AVERAGED_CLASSES: list[Build] = [
    mixture_of_averaged_classes,
    classes_with_a_zero,
    classes_probit,
    binary_phi,
    binary_exact,
    binary_quantiles,
    classes_exact,
    classes_bridge,
    tokens_bridge,
    many_labels_exact,
]
CLASSES = [*SPLIT_CLASSES, *AVERAGED_CLASSES]
POSITIONS: list[Build] = [tokens, many_labels, tokens_bridge, many_labels_exact]
DRAWN: list[Build] = [draws, draws_with_their_own_noise, images, long_tails, *COUNTS, *SPLIT_CLASSES]
EVERY = [*REGRESSION, *CLASSES]
ALL_ROWS = slice(None)


def whole(build: Build, dtype: torch.dtype = torch.float64) -> Predictive:
    return build(ALL_ROWS, dtype)


def some_targets(pred: Predictive) -> Tensor:
    return pred.sample(1, Key(5))[0]


@pytest.mark.parametrize("build", EVERY)
def test_shapes_and_length(build: Build) -> None:
    pred = whole(build)
    assert len(pred) == ROWS
    assert pred.mean.shape == pred.variance.shape == pred.std.shape
    assert pred.mean.shape[0] == ROWS
    target_shape = (ROWS, *pred.mean.shape[2:]) if pred.classifies else pred.mean.shape
    assert pred.sample(7, Key(0)).shape == (7, *target_shape)
    assert pred.log_prob(some_targets(pred)).shape == (ROWS,)
    assert type(pred).__name__ in repr(pred)


def densities(pred: Predictive, points: Tensor) -> Tensor:
    """Densities (G, N) of each row at targets (G, N, *event)."""
    everywhere = pred.rows(torch.arange(ROWS).repeat(len(points)))
    return everywhere.log_prob(points.flatten(0, 1)).exp().reshape(len(points), ROWS)


@pytest.mark.parametrize("build", SCALAR)
def test_density_integrates_to_one_and_quantiles_invert_it(build: Build) -> None:
    pred = whole(build)
    nodes, weights = (torch.tensor(part.tolist(), dtype=torch.float64) for part in np.polynomial.legendre.leggauss(160))

    def mass(lower: Tensor, upper: Tensor) -> Tensor:  # of each row, by Gauss-Legendre
        half = 0.5 * (upper - lower)
        points = torch.stack([lower + half * (1.0 + node) for node in nodes])
        return half.reshape(ROWS) * torch.einsum("gn,g->n", densities(pred, points), weights)

    ends = 12.0 * pred.std
    torch.testing.assert_close(mass(pred.mean - ends, pred.mean + ends), torch.ones(ROWS).double(), rtol=0, atol=1e-9)
    for p in (0.025, 0.5, 0.9):
        below = mass(pred.mean - ends, pred.quantile(p))
        torch.testing.assert_close(below, torch.full((ROWS,), p, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("build", PLANAR)
def test_joint_density_of_two_outputs_integrates_to_one(build: Build) -> None:
    pred = whole(build)
    steps = torch.linspace(-7.0, 7.0, 71, dtype=torch.float64)
    points = pred.mean + pred.std * torch.cartesian_prod(steps, steps).unsqueeze(1)  # (G, N, 2)
    mass = densities(pred, points).sum(0) * pred.std.prod(-1) * float(steps[1] - steps[0]) ** 2
    torch.testing.assert_close(mass, torch.ones(ROWS).double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("build", [build for build in CLASSES if build not in POSITIONS])
def test_class_probabilities_sum_to_one_and_are_what_log_prob_says(build: Build) -> None:
    pred = whole(build)
    assert pred.classifies
    count = pred.probs.shape[1]
    by_label = torch.stack([pred.log_prob(torch.full((ROWS,), label)).exp() for label in range(count)], dim=-1)
    torch.testing.assert_close(by_label.sum(-1), torch.ones(ROWS).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(by_label, pred.probs)
    torch.testing.assert_close(pred.mean, pred.probs)


@pytest.mark.parametrize("build", POSITIONS)
def test_positions_are_predicted_one_by_one(build: Build) -> None:
    pred = whole(build)
    y = some_targets(pred)
    assert y.shape == pred.entropy.shape == (ROWS, *pred.probs.shape[2:])
    torch.testing.assert_close(pred.probs.sum(1), torch.ones(y.shape).double())
    each = pred.probs.gather(1, y.unsqueeze(1)).log().squeeze(1)
    torch.testing.assert_close(pred.log_prob(y), each.flatten(1).sum(-1))


@pytest.mark.parametrize("build", COUNTS)
def test_count_probabilities_sum_to_one(build: Build) -> None:
    pred = whole(build)
    total = sum(pred.log_prob(torch.full((ROWS,), float(count))).exp() for count in range(120))
    torch.testing.assert_close(total, torch.ones(ROWS).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("build", EVERY)
def test_moments_agree_with_samples(build: Build) -> None:
    pred = whole(build)
    size = 20_000
    drawn = pred.sample(size, Key(3))
    if pred.classifies:
        drawn = torch.nn.functional.one_hot(drawn, pred.probs.shape[1]).movedim(-1, 2)
    drawn = drawn.double()
    error = (drawn.mean(0) - pred.mean).abs()
    assert bool((error <= 5.0 * pred.std / size**0.5 + 1e-12).all())
    squares = (drawn - pred.mean) ** 2
    standard_error = squares.std(0) / size**0.5
    assert bool(((squares.mean(0) - pred.variance).abs() <= 5.0 * standard_error + 1e-12).all())


@pytest.mark.parametrize("build", QUANTILES)
def test_central_interval_holds_its_share_of_samples(build: Build) -> None:
    pred = whole(build)
    size = 10_000
    lower, upper = pred.interval(0.8)
    drawn = pred.sample(size, Key(4))
    share = ((drawn > lower) & (drawn < upper)).double().mean(0)
    assert bool(((share - 0.8).abs() <= 5.0 * (0.8 * 0.2 / size) ** 0.5).all())
    below = (drawn <= lower).double().mean(0)
    assert bool(((below - 0.1).abs() <= 5.0 * (0.1 * 0.9 / size) ** 0.5).all())


@pytest.mark.parametrize("build", EVERY)
def test_draws_of_different_rows_and_passes_are_independent(build: Build) -> None:
    pred = whole(build)
    size = 4_000
    drawn = pred.sample(size, Key(9)).double().reshape(size, ROWS, -1)[..., 0]
    rows = torch.corrcoef(drawn[:, :2].T)[0, 1]
    passes = torch.corrcoef(torch.stack([drawn[:-1, 0], drawn[1:, 0]]))[0, 1]
    assert abs(float(rows)) < 5.0 / size**0.5
    assert abs(float(passes)) < 5.0 / size**0.5


@pytest.mark.parametrize("build", EVERY)
def test_same_key_same_draws(build: Build) -> None:
    pred = whole(build)
    assert torch.equal(pred.sample(50, Key(1)), pred.sample(50, Key(1)))
    assert not torch.equal(pred.sample(50, Key(1)), pred.sample(50, Key(2)))
    assert torch.equal(pred.sample(50), pred.sample(50, Key(0)))


@pytest.mark.parametrize("build", REGRESSION)
def test_variances_add_up(build: Build) -> None:
    pred = whole(build)
    torch.testing.assert_close(pred.aleatoric + pred.epistemic, pred.variance)
    torch.testing.assert_close(pred.std**2, pred.variance)
    assert bool((pred.epistemic > 0).all())


@pytest.mark.parametrize("build", [build for build in CLASSES if build is not classes_with_a_zero])
def test_entropies_add_up(build: Build) -> None:
    pred = whole(build)
    torch.testing.assert_close(pred.aleatoric + pred.epistemic, pred.entropy)
    assert bool((pred.epistemic > 0).all())


@pytest.mark.parametrize("build", EVERY)
def test_chunks_join_to_the_whole(build: Build) -> None:
    pred = whole(build)
    chunks = [build(rows, torch.float64) for rows in (slice(0, 2), slice(2, 3), slice(3, 5))]
    joined = Predictive.concatenate(chunks)
    assert type(joined) is type(pred)
    y = some_targets(pred)
    torch.testing.assert_close(joined.log_prob(y), pred.log_prob(y))
    torch.testing.assert_close(joined.mean, pred.mean)
    torch.testing.assert_close(joined.variance, pred.variance)
    assert torch.equal(joined.sample(3, Key(2)), pred.sample(3, Key(2)))
    if build is not classes_with_a_zero:
        torch.testing.assert_close(joined.aleatoric, pred.aleatoric)
        torch.testing.assert_close(joined.epistemic, pred.epistemic)


@pytest.mark.parametrize("build", EVERY)
def test_each_row_is_scored_by_its_own_target(build: Build) -> None:
    pred = whole(build)
    y = some_targets(pred)
    alone = [build(slice(row, row + 1), torch.float64).log_prob(y[row : row + 1]) for row in range(ROWS)]
    torch.testing.assert_close(pred.log_prob(y), torch.cat(alone))


@pytest.mark.parametrize("build", [*SCALAR, *COUNTS, binary_draws, binary_phi, binary_exact, binary_quantiles])
def test_a_column_and_a_vector_of_targets_mean_the_same(build: Build) -> None:
    pred = whole(build)
    y = some_targets(pred).reshape(ROWS)
    torch.testing.assert_close(pred.log_prob(y.unsqueeze(1)), pred.log_prob(y))
    assert pred.check(y.unsqueeze(1)).shape == pred.check(y).shape


@pytest.mark.parametrize("build", EVERY)
def test_targets_that_do_not_fit_are_refused(build: Build) -> None:
    pred = whole(build)
    y = some_targets(pred)
    for wrong in (y[:-1], torch.cat([y, y]), y[0], y.unsqueeze(0)):
        with pytest.raises(BadData, match=r"Got .*\. [A-Z]"):
            pred.log_prob(wrong)
    with pytest.raises(BadData, match="Got"):
        pred.log_prob(y.reshape(ROWS, -1).repeat(1, 2))


INDICES = [torch.tensor([3, 0, 3]), torch.tensor([True, False, False, True, True]), slice(1, 4), slice(0, 0)]


@pytest.mark.parametrize("index", INDICES, ids=["repeats", "mask", "slice", "none"])
@pytest.mark.parametrize("build", EVERY)
def test_rows_are_chosen(build: Build, index: Tensor | slice) -> None:
    pred = whole(build)
    some, y = pred.rows(index), some_targets(pred)
    assert type(some) is type(pred)
    assert len(some) == len(y[index])
    torch.testing.assert_close(some.log_prob(y[index]), pred.log_prob(y)[index])
    torch.testing.assert_close(some.variance, pred.variance[index])
    if build is not classes_with_a_zero:
        torch.testing.assert_close(some.epistemic, pred.epistemic[index])
    if build not in AVERAGED_CLASSES:
        torch.testing.assert_close(some.expected_log_prob(y[index]), pred.expected_log_prob(y)[index])


@pytest.mark.parametrize("build", [*REGRESSION, *SPLIT_CLASSES])
def test_the_average_of_the_log_is_below_the_log_of_the_average(build: Build) -> None:
    pred = whole(build)
    y = some_targets(pred)
    expected = pred.expected_log_prob(y)
    assert expected.shape == (ROWS,)
    assert bool((expected < pred.log_prob(y)).all())


@pytest.mark.parametrize("build", DRAWN)
def test_joint_density_of_rows(build: Build) -> None:
    pred = whole(build)
    y = some_targets(pred)
    joint, expected = pred.joint_log_prob(y), pred.expected_log_prob(y)
    assert joint.shape == ()
    assert bool(joint > expected.sum())  # Jensen
    first = pred.rows(slice(0, 1)).joint_log_prob(y[:1])
    if build not in POSITIONS:
        torch.testing.assert_close(first, pred.log_prob(y)[0].double())
    thrice = pred.rows(torch.zeros(3, dtype=torch.long)).joint_log_prob(y[:1].expand(3, *y.shape[1:]))
    assert bool(thrice > 3.0 * first)  # rows share the weights: the second answer tells of the third


@pytest.mark.parametrize("build", [gaussian, gaussian_joint, *AVERAGED_CLASSES])
def test_rows_without_what_ties_them_have_no_joint_density(build: Build) -> None:
    pred = whole(build)
    with pytest.raises(ValueError, match=r"joint_log_prob needs .* Got"):
        pred.joint_log_prob(some_targets(pred))


@pytest.mark.parametrize("build", REGRESSION)
def test_normal_components_are_the_distribution(build: Build) -> None:
    pred = whole(build)
    if pred.normals is None:
        weighted = (mixture, affine, normals, normals_two_outputs)
        assert build in (*COUNTS, *EXPONENTIAL, long_tails, long_tails_with_their_own_noise, *weighted)
        return
    means, scales = pred.normals
    torch.testing.assert_close(means.mean(0), pred.mean)
    torch.testing.assert_close(scales.square().mean(0) + means.var(0, correction=0), pred.variance)


@pytest.mark.parametrize("build", EVERY)
def test_float32_agrees_with_float64(build: Build) -> None:
    single, double = whole(build, torch.float32), whole(build)
    y = some_targets(double)
    torch.testing.assert_close(single.log_prob(y).double(), double.log_prob(y), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single.mean.double(), double.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(single.variance.double(), double.variance, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("build", REGRESSION)
def test_regression_has_no_class_probabilities(build: Build) -> None:
    pred = whole(build)
    assert not pred.classifies
    with pytest.raises(TypeError, match="Use mean"):
        _ = pred.probs
    with pytest.raises(TypeError, match="Use variance"):
        _ = pred.entropy


@pytest.mark.parametrize("build", CLASSES)
def test_classification_has_no_quantiles(build: Build) -> None:
    pred = whole(build)
    with pytest.raises(TypeError, match="Use probs"):
        pred.quantile(0.5)
    with pytest.raises(TypeError, match="Use probs"):
        pred.interval(0.9)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 1.5, float("nan"), True])
def test_levels_outside_zero_and_one_are_refused(level: float) -> None:
    pred = whole(gaussian)
    with pytest.raises(ValueError, match="between 0 and 1"):
        pred.interval(level)
    with pytest.raises(ValueError, match="between 0 and 1"):
        pred.quantile(level)
    with pytest.raises(ValueError, match="between 0 and 1"):
        whole(draws).quantile(level)


def test_only_chunks_of_one_kind_join() -> None:
    with pytest.raises(TypeError, match="DrawsPredictive, GaussianPredictive"):
        Predictive.concatenate([whole(gaussian), whole(draws)])
    with pytest.raises(ValueError, match="at least one"):
        Predictive.concatenate([])
    one = whole(gaussian)
    assert Predictive.concatenate([one]) is one


def test_monte_carlo_chunks_differ_in_noise_only_by_key() -> None:
    mean, covariance = normal("mean", ROWS, 3), covariances("classes", 3)
    first = MonteCarlo(50)(Categorical(), mean, covariance, Key(0))
    again = MonteCarlo(50)(Categorical(), mean, covariance, Key(0))
    other = MonteCarlo(50)(Categorical(), mean, covariance, Key(1))
    assert torch.equal(first.probs, again.probs)
    assert not torch.equal(first.probs, other.probs)
