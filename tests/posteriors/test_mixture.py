import math

import pytest
import torch
from contracts.cases import ROWS, classification, inputs, labels, network, numbers
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.likelihoods import Categorical, Heteroscedastic
from posterity.likelihoods import Gaussian as Noise
from posterity.methods import MAP, Laplace, MeanField
from posterity.numerics import Key
from posterity.posteriors import Gaussian, Mixture, Point
from posterity.precisions import Dense
from posterity.predictive import MixturePredictive, MonteCarlo, Probit
from posterity.priors import Normal

pytestmark = pytest.mark.cpu
FLOAT64 = torch.float64
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=FLOAT64)


def problem(scale=0.3):
    return po.Joint(network([3, 4, 1], FLOAT64), Noise(scale), Normal(0.7), ROWS)


def points(joint, count=3):
    theta = joint.initial() + 0.5 * Key(4).normal((count, joint.size), FLOAT64)
    return [Point(joint, row) for row in theta]


def fits():
    joint, rows = problem(), numbers(FLOAT64)
    laplace = po.infer(Laplace(tuning=None), joint, rows)[0]
    field = po.infer(MeanField(steps=5, batch_size=None), joint, rows)[0]
    return [*points(joint, 1), laplace, field]


def test_points_make_the_weighted_plug_in_mixture():
    joint, x = problem(), inputs(FLOAT64, 5)
    parts = points(joint)
    pred = Mixture(parts, WEIGHTS).predict(x)
    means = torch.stack([joint.outputs(one.theta, x) for one in parts])
    mean = torch.einsum("k,k...->...", WEIGHTS, means)
    torch.testing.assert_close(pred.mean, mean)
    torch.testing.assert_close(pred.epistemic, torch.einsum("k,k...->...", WEIGHTS, (means - mean).square()))
    torch.testing.assert_close(pred.aleatoric, torch.full_like(mean, 0.09))
    y = mean + 0.1
    density = (torch.distributions.Normal(means, 0.3).log_prob(y).exp() * WEIGHTS[:, None, None]).sum(0).log()
    torch.testing.assert_close(pred.log_prob(y), density[:, 0])


def test_each_component_predicts_by_its_own_noise():
    x = inputs(FLOAT64, 5)
    wide, narrow = points(problem(1.0), 1)[0], points(problem(0.1), 1)[0]
    pred = Mixture([wide, narrow]).predict(x)
    torch.testing.assert_close(pred.aleatoric, torch.full_like(pred.mean, 0.5 * (1.0 + 0.01)))
    assert Mixture([wide, narrow]).joint.likelihood.scale.flatten().tolist() == pytest.approx([1.0, 0.1])


def test_closed_forms_stay_closed():
    x, (point, laplace, _) = inputs(FLOAT64, 5), fits()
    pred = Mixture([point, laplace]).predict(x, draws=1)
    apart = [point.predict(x), laplace.predict(x)]
    assert isinstance(pred, MixturePredictive)
    torch.testing.assert_close(pred.mean, 0.5 * (apart[0].mean + apart[1].mean))
    between = 0.25 * (apart[0].mean - apart[1].mean).square()
    torch.testing.assert_close(pred.epistemic, 0.5 * apart[1].epistemic + between)


def test_class_probabilities_are_averaged_and_split_where_known():
    joint, x = classification(FLOAT64), inputs(FLOAT64, 5)
    parts = points(joint)
    each = torch.stack([one.predict(x).probs for one in parts])
    pred = Mixture(parts, WEIGHTS).predict(x)
    torch.testing.assert_close(pred.probs, torch.einsum("k,k...->...", WEIGHTS, each))
    entropies = -(each * each.log()).sum(-1)
    torch.testing.assert_close(pred.aleatoric, torch.einsum("k,kn->n", WEIGHTS, entropies))
    torch.testing.assert_close(pred.aleatoric + pred.epistemic, pred.entropy)
    laplace = po.infer(Laplace(tuning=None), joint, labels(FLOAT64))[0]
    probit = Mixture([laplace, laplace]).predict(x, integrator=Probit())
    torch.testing.assert_close(probit.probs, laplace.predict(x, integrator=Probit()).probs)
    drawn = Mixture([laplace, laplace]).predict(x, integrator=MonteCarlo(20))
    assert drawn.draws.shape == (40, 5, 2)
    both = Mixture([laplace, parts[0]]).predict(x)
    wanted = 0.5 * (laplace.predict(x).aleatoric + parts[0].predict(x).aleatoric)
    torch.testing.assert_close(both.aleatoric, wanted)


def test_metrics_take_it():
    (x, y), parts = numbers(FLOAT64), fits()
    pred = Mixture(parts).predict(x)
    assert math.isfinite(po.metrics.negative_log_likelihood(pred, y))
    assert math.isfinite(po.metrics.crps(pred, y))
    lower, upper = pred.interval(0.9)
    inside = ((pred.sample(4000, Key(1)) > lower) & (pred.sample(4000, Key(1)) < upper)).double().mean()
    assert abs(float(inside) - 0.9) < 5 * math.sqrt(0.09 / 4000 / 20)


def test_density_is_that_of_the_mixture():
    density = po.Density(lambda w: -0.5 * w.square().sum(), {"w": (1,)}, dtype=FLOAT64)
    one = Gaussian(density, torch.tensor([-1.0], dtype=FLOAT64), Dense(torch.tensor([[4.0]], dtype=FLOAT64)))
    two = Gaussian(density, torch.tensor([2.0], dtype=FLOAT64), Dense(torch.tensor([[1.0]], dtype=FLOAT64)))
    q = Mixture([one, two], torch.tensor([0.25, 0.75]))
    grid = torch.linspace(-12, 12, 20001, dtype=FLOAT64)
    assert float(torch.trapezoid(q.log_density(grid.unsqueeze(1)).exp(), grid)) == pytest.approx(1.0, abs=1e-9)
    theta = q.sample(4000, Key(0)).flatten()
    mean, variance = 0.25 * -1 + 0.75 * 2, 0.25 * 0.25 + 0.75 * 1.0 + 0.25 * 0.75 * 9.0
    assert abs(float(theta.mean()) - mean) < 5 * math.sqrt(variance / 4000)
    assert abs(float(theta.var()) - variance) < 5 * math.sqrt(2.0 * variance**2 / 4000)
    first, second = theta[:2000].mean(), theta[2000:].mean()
    assert abs(float(first - second)) < 5 * math.sqrt(2 * variance / 2000)  # no component comes first


def test_a_point_has_no_density():
    with pytest.raises(TypeError, match="Point has no density"):
        Mixture(points(problem())).log_density(problem().initial().unsqueeze(0))


@pytest.mark.parametrize("draws", [1, 2, 7, 100])
def test_draws_are_shared_out(draws):
    q, x = Mixture(points(problem()), WEIGHTS), inputs(FLOAT64, 5)
    assert q.outputs(x, draws, Key(1)).shape == (draws, 5, 1)
    assert q.sample(draws, Key(1)).shape == (draws, q.point().shape[1])
    counts = torch.tensor([q._counts(draws, Key(seed)) for seed in range(400)], dtype=FLOAT64)
    assert bool((counts.sum(1) == draws).all())
    assert bool(((counts - draws * WEIGHTS).abs() <= 1.0).all())
    assert bool(((counts.mean(0) - draws * WEIGHTS).abs() < 5 * 0.5 / 20).all())


@pytest.mark.parametrize("marginal", [True, False])
def test_output_moments_are_those_of_the_mixture(marginal):
    point, laplace, field = fits()
    x = inputs(FLOAT64, 4)
    mean, spread = Mixture([point, laplace]).output_moments(x, marginal=marginal)
    pred = Mixture([point, laplace]).predict(x)
    torch.testing.assert_close(mean, pred.mean)
    torch.testing.assert_close(spread.reshape(4, 1), pred.epistemic)
    assert Mixture([point, field]).output_moments(x) is None


def test_mixtures_and_members_inside_are_opened():
    joint = problem()
    inner = Mixture(points(joint, 2), torch.tensor([0.25, 0.75]))
    members = Point(joint, joint.initial() + torch.zeros(2, 1, dtype=FLOAT64))
    q = Mixture([inner, members, points(joint, 1)[0]], torch.tensor([0.4, 0.4, 0.2]))
    torch.testing.assert_close(q.weights, torch.tensor([0.1, 0.3, 0.2, 0.2, 0.2], dtype=FLOAT64), rtol=1e-6, atol=0)
    assert all(one.num_members is None for one in q.posteriors)


def test_components_of_all_kinds_are_stored(tmp_path):
    q = Mixture(fits(), WEIGHTS)
    q.save(tmp_path / "run")
    loaded = po.load(tmp_path / "run", network([3, 4, 1], FLOAT64))
    x = inputs(FLOAT64, 5)
    assert [type(one) for one in loaded.posteriors] == [type(one) for one in q.posteriors]
    assert torch.equal(loaded.weights, q.weights)
    assert torch.equal(loaded.predict(x).mean, q.predict(x).mean)
    assert torch.equal(loaded.predict(x).variance, q.predict(x).variance)


def test_what_components_share_is_stored_once(tmp_path):
    joint = problem().with_weights("2.*")
    q = Mixture([Point(joint, joint.initial()), Point(joint, 2 * joint.initial())])
    names = q.parts()["posterior"].tensors
    assert "0.joint.frozen.0.weight" in names
    assert "1.joint.frozen.0.weight" not in names
    q.save(tmp_path)
    loaded = po.load(tmp_path, network([3, 4, 1], FLOAT64))
    x = inputs(FLOAT64, 5)
    assert torch.equal(loaded.predict(x).mean, q.predict(x).mean)


def test_predict_takes_loaders_and_chunks():
    q, x = Mixture(fits()), inputs(FLOAT64, 7)
    whole = q.predict(x)
    for other in (q.predict(x, batch_size=3), q.predict(DataLoader(TensorDataset(x), batch_size=2))):
        torch.testing.assert_close(other.mean, whole.mean)
        torch.testing.assert_close(other.variance, whole.variance)


def test_rows_are_tied_together_by_the_component():
    (_, laplace, _), (x, y) = fits(), numbers(FLOAT64)
    parts = points(problem(), 2)
    wanted = torch.stack([one.predict(x).joint_log_prob(y) for one in parts]).logsumexp(0) - math.log(2)
    torch.testing.assert_close(Mixture(parts).predict(x).joint_log_prob(y), wanted)
    pred = Mixture([laplace, laplace]).predict(x, joint=True)
    torch.testing.assert_close(pred.joint_log_prob(y), laplace.predict(x, joint=True).joint_log_prob(y))


def test_noise_of_the_network_can_be_mixed():
    joint = po.Joint(network([3, 4, 2], FLOAT64), Heteroscedastic(), Normal(), ROWS)
    pred = Mixture(points(joint)).predict(inputs(FLOAT64, 5))
    assert bool((pred.quantile(0.2) < pred.quantile(0.8)).all())
    assert pred.normals[0].shape[0] == 3


def test_a_start_is_that_of_each_component():
    joint, rows = classification(FLOAT64), labels(FLOAT64)
    q = Mixture(points(joint))
    after, _ = po.infer(MAP(steps=2, batch_size=None), joint, rows, start=q)
    assert after.num_members == 3
    one, _ = po.infer(MAP(steps=2, batch_size=None), joint, rows, start=q.posteriors[2])
    torch.testing.assert_close(after.member(2).theta, one.theta, rtol=1e-10, atol=1e-10)


def other_network():
    return Point(po.Joint(network([3, 5, 1], FLOAT64), Noise(0.3), Normal(), ROWS), torch.zeros(26, dtype=FLOAT64))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Mixture([]), ValueError, "at least one component"),
        (lambda: Mixture([problem()]), TypeError, "must be a list of posteriors"),
        (lambda: Mixture(points(problem()), torch.tensor([0.5, 0.5])), ValueError, "must be 3 positive numbers"),
        (lambda: Mixture(points(problem(), 2), torch.tensor([0.5, 0.6])), ValueError, "sum to 1"),
        (lambda: Mixture(points(problem(), 2), torch.tensor([1.0, 0.0])), ValueError, "weight 0"),
        (lambda: Mixture([*points(problem(), 1), other_network()]), ValueError, "same weights of the same problem"),
    ],
)
def test_what_is_no_mixture_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_the_categorical_joint_is_shared():
    joint = classification(FLOAT64)
    assert Mixture(points(joint)).joint is joint
    assert joint.likelihood == Categorical()
