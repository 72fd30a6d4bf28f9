"""Draws, moments and predictions of the posteriors."""

import dataclasses
import math

import pytest
import torch
from contracts.cases import classification, inputs, labels, linear_regression, network, numbers, regression
from matrixcases import as_matrix
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.curvature import Diagonal, Full
from posterity.errors import BadData
from posterity.methods import MAP, Conjugate, Laplace
from posterity.numerics import Key
from posterity.posteriors import Gaussian, Linearized, Point
from posterity.precisions import Dense
from posterity.precisions import Diagonal as DiagonalPrecision
from posterity.predictive import Exact, MonteCarlo, Probit

FLOAT64 = torch.float64
DRAWS = 20_000


def spd(size, key):
    """A well-conditioned positive definite matrix."""
    root = Key(key).normal((size, size + 3), FLOAT64)
    return root @ root.T / size + torch.eye(size, dtype=FLOAT64)


def gaussian(structure, random="*", joint=None):
    joint = dataclasses.replace(joint or classification(FLOAT64), random=random)
    size = joint.num_weights if joint.random_indices is None else len(joint.random_indices)
    matrix = 4.0 * spd(size, 5)
    precision = Dense(matrix) if structure == "dense" else DiagonalPrecision(matrix.diagonal().clone())
    return Gaussian(joint, joint.initial()[: joint.num_weights], precision)


def laplace(joint, rows, **options):
    return po.infer(Laplace(tuning=None, **options), joint, rows)[0]


# Point


def test_a_point_is_one_function():
    joint = classification(FLOAT64)
    q, x = Point(joint, joint.initial()), inputs(FLOAT64, 5)
    assert torch.equal(q.sample(3, Key(0)), joint.initial().expand(3, -1))
    assert q.outputs(x, 7, Key(0)).shape == (1, 5, 2)
    assert torch.equal(q.outputs(x, 7, Key(0))[0], joint.outputs(joint.initial(), x))
    torch.testing.assert_close(q.predict(x).probs, q.outputs(x, 1, Key(0))[0].softmax(-1), rtol=1e-12, atol=0.0)
    assert q.output_moments(x) is None
    assert torch.equal(q.predict(x, seed=1).probs, q.predict(x, seed=2).probs)
    assert q.num_members is None
    assert q.member(0) is q


def test_a_point_has_the_noise_alone():
    joint = linear_regression(FLOAT64)
    pred = Point(joint, joint.initial()).predict(inputs(FLOAT64, 5))
    assert bool((pred.epistemic == 0).all())
    torch.testing.assert_close(pred.std, torch.full((5, 1), 0.3, dtype=FLOAT64))


# Gaussian


@pytest.mark.parametrize(
    ("random", "weights", "size"), [("*", 25, 26), ("*", 26, 25), ("0.*", 26, 26), ("*", 0, 26)], ids=str
)
def test_a_gaussian_has_the_weights_of_its_joint(random, weights, size):
    joint = dataclasses.replace(classification(FLOAT64), random=random)
    assert (joint.num_weights, joint.num_random) == (26, 26 if random == "*" else 16)
    mean = torch.zeros(weights, dtype=FLOAT64)
    with pytest.raises(ValueError, match=rf"mean must be \(26,\), .* Got \({weights},\) and {size}"):
        Gaussian(joint, mean, DiagonalPrecision(torch.ones(size, dtype=FLOAT64)))


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
@pytest.mark.parametrize("random", ["*", "2.*"])
def test_draws_have_the_covariance_of_the_matrix(structure, random):
    q = gaussian(structure, random)
    index = torch.arange(q.joint.num_weights) if random == "*" else q.joint.random_indices
    theta = q.sample(DRAWS, Key(1))
    deviation = theta - q.point()
    rest = torch.ones(q.joint.num_weights, dtype=torch.bool)
    rest[index] = False
    assert bool((deviation[:, rest] == 0).all())
    deviation = deviation[:, index]
    covariance = q.precision.covariance()
    mean_error = (covariance.diagonal() / DRAWS).sqrt()
    assert bool((deviation.mean(0).abs() <= 5 * mean_error).all())
    got = deviation.T @ deviation / DRAWS
    variance = covariance.diagonal()
    error = ((covariance.square() + variance[:, None] * variance) / DRAWS).sqrt()  # of a product of normals
    assert bool(((got - covariance).abs() <= 5 * error).all())
    torch.testing.assert_close(q.variance, variance)


def test_draws_are_keyed():
    q = gaussian("dense")
    assert torch.equal(q.sample(4, Key(1)), q.sample(4, Key(1)))
    assert not torch.equal(q.sample(4, Key(1)), q.sample(4, Key(2)))


def test_outputs_are_those_of_the_drawn_weights():
    q, x = gaussian("diagonal"), inputs(FLOAT64, 5)
    expected = torch.stack([q.joint.outputs(theta, x) for theta in q.sample(6, Key(3))])
    torch.testing.assert_close(q.outputs(x, 6, Key(3)), expected, rtol=1e-12, atol=1e-12)


def test_named_draws_have_the_shapes_of_the_weights():
    q = gaussian("dense")
    draws = q.draws(7, seed=2)
    assert {name: tuple(value.shape) for name, value in draws.items()} == {
        "0.weight": (7, 4, 3),
        "0.bias": (7, 4),
        "2.weight": (7, 2, 4),
        "2.bias": (7, 2),
    }
    assert torch.equal(q.joint.network.layout.flatten(draws), q.sample(7, Key(2)))
    with pytest.raises(ValueError, match="positive whole number"):
        q.draws(0)


def test_draws_of_a_density_are_constrained():
    density = po.Density(
        lambda rate: (2.0 * rate.log() - 3.0 * rate).sum(), {"rate": ()}, {"rate": po.model.Positive()}, dtype=FLOAT64
    )
    start, _ = po.infer(MAP(steps=200, optimizer=po.optim.SGD(0.1)), density, None)
    q, _ = po.infer(Laplace(tuning=None, curvature=po.curvature.Hessian()), density, None, start=start)
    draws = q.draws(1000)["rate"]
    assert draws.shape == (1000,)
    assert bool((draws > 0).all())
    # In u = log(rate) the density is 3 u - 3 exp(u): mode 0, curvature 3.
    assert abs(float(draws.log().mean())) < 5 / math.sqrt(3 * 1000)
    with pytest.raises(TypeError, match=r"no inputs to predict at\. Use draws\(n\)"):
        q.predict(torch.zeros(1))


# Linearized


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
@pytest.mark.parametrize("random", ["*", "2.*"])
def test_linearised_moments_are_those_of_the_jacobian(structure, random):
    inner, x = gaussian(structure, random), inputs(FLOAT64, 4)
    mean, covariance = Linearized(inner.joint, inner).output_moments(x)
    jacobian = torch.autograd.functional.jacobian(lambda w: inner.joint.outputs(w, x), inner.point())  # (4, 2, P)
    if random != "*":
        jacobian = jacobian[..., inner.joint.random_indices]
    expected = jacobian @ inner.precision.covariance() @ jacobian.mT
    torch.testing.assert_close(mean, inner.joint.outputs(inner.point(), x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(covariance, expected, rtol=1e-10, atol=1e-12)


def test_linearised_outputs_follow_their_moments():
    inner, x = gaussian("dense"), inputs(FLOAT64, 4)
    q = Linearized(inner.joint, inner)
    mean, covariance = q.output_moments(x)
    outputs = q.outputs(x, DRAWS, Key(4))
    assert outputs.shape == (DRAWS, 4, 2)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    assert bool(((outputs.mean(0) - mean).abs() <= 5 * (variance / DRAWS).sqrt()).all())
    centred = outputs - mean
    got = torch.einsum("snc,snd->ncd", centred, centred) / DRAWS
    error = ((covariance.square() + variance[:, :, None] * variance[:, None, :]) / DRAWS).sqrt()
    assert bool(((got - covariance).abs() <= 5 * error).all())
    # Rows are drawn jointly, from one draw of the weights.
    jacobian = torch.autograd.functional.jacobian(lambda w: inner.joint.outputs(w, x), inner.point())
    between = float(jacobian[0, 0] @ inner.precision.covariance() @ jacobian[1, 0])
    spread = math.sqrt((between**2 + float(variance[0, 0] * variance[1, 0])) / DRAWS)
    assert abs(float((centred[:, 0, 0] * centred[:, 1, 0]).mean()) - between) <= 5 * spread
    assert abs(between) > 10 * spread  # so that independent rows would fail


@pytest.mark.parametrize("structure", [Full(), Diagonal()], ids=str)
def test_linearised_is_exact_for_linear_networks(structure):
    joint = linear_regression(FLOAT64)
    q = laplace(joint, numbers(FLOAT64), structure=structure)
    x = inputs(FLOAT64, 4)
    torch.testing.assert_close(q.outputs(x, 9, Key(2)), q.gaussian.outputs(x, 9, Key(2)), rtol=1e-10, atol=1e-10)


def test_linearised_passes_on_what_its_gaussian_knows():
    q = laplace(classification(FLOAT64), labels(FLOAT64))
    assert torch.equal(q.point(), q.gaussian.mean)
    assert torch.equal(q.sample(3, Key(1)), q.gaussian.sample(3, Key(1)))
    assert q.log_evidence is q.gaussian.log_evidence
    assert q.num_members is None


def test_outputs_without_an_event_axis():
    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network([3, 4, 1], FLOAT64)

        def forward(self, x):
            return self.net(x).squeeze(-1)

    x, y = numbers(FLOAT64)
    flat_joint = po.Joint(Flat(), po.likelihoods.Gaussian(0.3), po.priors.Normal(0.5), num_data=20)
    joint = po.Joint(network([3, 4, 1], FLOAT64), po.likelihoods.Gaussian(0.3), po.priors.Normal(0.5), num_data=20)
    flat, usual = laplace(flat_joint, (x, y[:, 0])), laplace(joint, (x, y))
    torch.testing.assert_close(
        as_matrix(flat.gaussian.precision), as_matrix(usual.gaussian.precision), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(flat.log_evidence, usual.log_evidence, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(flat.predict(x).std, usual.predict(x).std[:, 0], rtol=1e-12, atol=0.0)
    assert flat.outputs(x, 3, Key(0)).shape == (3, 20)


def test_outputs_with_two_event_axes():
    class Image(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network([3, 6], FLOAT64)

        def forward(self, x):
            return self.net(x).unflatten(-1, (2, 3))

    x, _ = numbers(FLOAT64)
    y = Key(9).normal((20, 2, 3), FLOAT64)
    wide = po.Joint(network([3, 6], FLOAT64), po.likelihoods.Gaussian(0.3), po.priors.Normal(0.5), num_data=20)
    tall = po.Joint(Image(), po.likelihoods.Gaussian(0.3), po.priors.Normal(0.5), num_data=20)
    for method in (Laplace(tuning=None), Conjugate()):
        one, two = po.infer(method, wide, (x, y.flatten(1)))[0], po.infer(method, tall, (x, y))[0]
        torch.testing.assert_close(as_matrix(one.gaussian.precision), as_matrix(two.gaussian.precision))
        torch.testing.assert_close(one.log_evidence, two.log_evidence)
        torch.testing.assert_close(one.predict(x).mean.unflatten(-1, (2, 3)), two.predict(x).mean)
        assert two.output_moments(x)[1].shape == (20, 6, 6)


def test_every_posterior_uses_the_statistics_it_holds():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double()
    joint = po.Joint(module, po.likelihoods.Categorical(), po.priors.Normal(), num_data=20)
    theta, x = joint.initial(), inputs(FLOAT64, 4)
    carried = {**joint.network.buffers, "1.running_mean": torch.tensor([3.0, -2.0], dtype=FLOAT64)}
    inner = Gaussian(joint, theta, DiagonalPrecision(torch.full_like(theta, 1e12)), carried)
    expected = joint.outputs(theta, x, carried)
    assert not torch.allclose(expected, joint.outputs(theta, x))
    torch.testing.assert_close(Point(joint, theta, carried).outputs(x, 1, Key(0))[0], expected)
    torch.testing.assert_close(inner.outputs(x, 1, Key(0))[0], expected, rtol=0.0, atol=1e-4)
    torch.testing.assert_close(Linearized(joint, inner).outputs(x, 1, Key(0))[0], expected, rtol=0.0, atol=1e-4)
    torch.testing.assert_close(Linearized(joint, inner).output_moments(x)[0], expected)


# predict


def posteriors():
    joint = classification(FLOAT64)
    inner = gaussian("dense")
    return {
        "point": Point(joint, joint.initial()),
        "gaussian": inner,
        "linearized": Linearized(inner.joint, inner),
        "regression": laplace(regression(FLOAT64), numbers(FLOAT64)),
    }


@pytest.mark.parametrize("name", ["point", "gaussian", "linearized", "regression"])
@pytest.mark.parametrize("size", [1, 7, 20, 1000])
def test_chunks_and_loaders_predict_what_the_whole_predicts(name, size):
    q, x = posteriors()[name], inputs(FLOAT64)
    whole = q.predict(x, draws=9)
    loader = DataLoader(TensorDataset(x, torch.zeros(20)), batch_size=size)
    bare = DataLoader(x, batch_size=size)
    for pred in (
        q.predict(x, draws=9, batch_size=size),
        q.predict(loader, draws=9),
        q.predict(bare, draws=9, batch_size=3),
        q.predict(x.cpu().numpy(), draws=9),
    ):
        assert type(pred) is type(whole)
        assert len(pred) == 20
        torch.testing.assert_close(pred.mean, whole.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(pred.variance, whole.variance, rtol=1e-12, atol=1e-12)


def test_the_integrator_is_the_callers_choice():
    q, x = posteriors()["linearized"], inputs(FLOAT64)
    mean, covariance = q.output_moments(x)
    by_default, exact = q.predict(x).probs, q.predict(x, integrator=Exact()).probs
    assert torch.equal(by_default, exact)
    assert not torch.equal(by_default, q.predict(x, integrator=Probit()).probs)
    many = q.predict(x, integrator=MonteCarlo(4000)).probs
    expected = torch.distributions.MultivariateNormal(mean, covariance + 1e-12 * torch.eye(2, dtype=FLOAT64))
    torch.manual_seed(0)
    other = expected.sample((4000,)).softmax(-1)
    error = (2 * other.var(0) / 4000).sqrt()
    assert bool(((many - other.mean(0)).abs() <= 5 * error).all())
    with pytest.raises(TypeError, match="Gaussian has no closed-form output moments for Probit"):
        q.gaussian.predict(x, integrator=Probit())


def test_random_integrators_draw_anew_for_each_chunk():
    q, x = posteriors()["linearized"], inputs(FLOAT64, 1).expand(6, -1)
    probs = q.predict(x, integrator=MonteCarlo(50), batch_size=2).probs
    assert len({float(p) for p in probs[:, 0]}) == 6  # the same input, and six errors that can average out
    assert torch.equal(probs, q.predict(x, integrator=MonteCarlo(50), batch_size=2).probs)


def test_gaussian_prediction_is_the_average_over_its_draws():
    q, x = posteriors()["gaussian"], inputs(FLOAT64)
    expected = q.outputs(x, 9, Key(4)).softmax(-1).mean(0)
    torch.testing.assert_close(q.predict(x, draws=9, seed=4).probs, expected, rtol=1e-12, atol=0.0)


def test_the_noise_of_the_joint_is_in_the_prediction():
    q, _ = po.infer(Conjugate(), linear_regression(FLOAT64), numbers(FLOAT64))
    x = inputs(FLOAT64, 3)
    moments = q.output_moments(x)
    pred = q.predict(x)
    torch.testing.assert_close(pred.variance[:, 0], moments[1][:, 0, 0] + 0.3**2)
    torch.testing.assert_close(pred.aleatoric, torch.full((3, 1), 0.09, dtype=FLOAT64))


def test_predictions_are_untempered():
    """A cold posterior is narrower in its weights; the noise of a prediction stays what the likelihood says."""
    cold = dataclasses.replace(linear_regression(FLOAT64), tempering=po.Tempering.cold(0.25))
    q, _ = po.infer(Conjugate(), linear_regression(FLOAT64), numbers(FLOAT64))
    c, _ = po.infer(Conjugate(), cold, numbers(FLOAT64))
    x = inputs(FLOAT64, 3)
    torch.testing.assert_close(c.predict(x).epistemic, 0.25 * q.predict(x).epistemic)
    torch.testing.assert_close(c.predict(x).aleatoric, q.predict(x).aleatoric)


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda q: q.predict(torch.zeros(2, 3)), BadData, r"model's dtype float64\. Got float32"),
        (lambda q: q.predict(torch.full((2, 3), float("nan"), dtype=FLOAT64)), BadData, r"inputs must be finite"),
        (lambda q: q.predict(torch.zeros(0, 3, dtype=FLOAT64)), BadData, r"no rows\. Pass at least one"),
        (lambda q: q.predict(torch.zeros(2, 4, dtype=FLOAT64)), BadData, r"does not accept these inputs"),
        (lambda q: q.predict("x.csv"), BadData, r"inputs must be a tensor or an array"),
        (lambda q: q.predict(torch.zeros(2, 3, dtype=FLOAT64), draws=0), ValueError, r"predict: draws must be"),
        (lambda q: q.predict(torch.zeros(2, 3, dtype=FLOAT64), batch_size=0), ValueError, r"predict: batch_size"),
        (
            lambda q: q.predict(DataLoader(TensorDataset(inputs(FLOAT64)), batch_size=4, shuffle=True)),
            BadData,
            r"shuffles.*shuffle=False",
        ),
    ],
    ids=["dtype", "nan", "no rows", "shape", "text", "draws", "batch size", "shuffle"],
)
def test_predict_refuses(ask, error, message):
    with pytest.raises(error, match=message) as caught:
        ask(posteriors()["linearized"])
    assert "\n" not in str(caught.value)


# members


@pytest.fixture(scope="module")
def members():
    start = classification(FLOAT64).initial() + 0.2 * Key(6).normal((3, 26), FLOAT64)
    point, _ = po.infer(MAP(steps=2), classification(FLOAT64), labels(FLOAT64), start=start)
    laplaces, _ = po.infer(Laplace(tuning=None), classification(FLOAT64), labels(FLOAT64), start=point)
    return {"point": point, "gaussian": laplaces.gaussian, "linearized": laplaces}


@pytest.mark.parametrize("name", ["point", "gaussian", "linearized"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda q: q.predict(inputs(FLOAT64)),
        lambda q: q.draws(3),
        lambda q: q.sample(3, Key(0)),
        lambda q: q.outputs(inputs(FLOAT64), 3, Key(0)),
    ],
    ids=["predict", "draws", "sample", "outputs"],
)
def test_members_must_be_chosen_before_they_predict(members, name, ask):
    q = members[name]
    assert q.num_members == 3
    with pytest.raises(TypeError, match=r"3 separate posteriors .* Choose one: q\.member\(0\)"):
        ask(q)
    assert q.member(2).num_members is None
    ask(q.member(2))


def test_members_keep_what_is_theirs(members):
    for index in range(3):
        assert torch.equal(members["point"].member(index).theta, members["point"].theta[index])
        one = members["linearized"].member(index)
        assert torch.equal(one.gaussian.mean, members["gaussian"].mean[index])
        assert torch.equal(one.gaussian.precision.covariance(), members["gaussian"].precision.covariance()[index])
        assert one.log_evidence == members["gaussian"].log_evidence[index]


def test_a_posterior_without_members_says_so():
    class Mystery(po.posteriors.Posterior):
        def point(self): ...
        def sample(self, draws, key): ...
        def outputs(self, inputs, draws, key): ...

    with pytest.raises(TypeError, match=r"Mystery has no members\. Use it as it is"):
        Mystery().member(0)


class OwnWeight(torch.nn.Module):
    """Outputs that are its weight itself, seen from every row."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.weight.expand(len(x), 3)


@pytest.mark.parametrize("together", [1, 8, 100])
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("random", ["*", torch.tensor([0, 2])])
def test_draws_in_blocks_do_not_write_over_each_others_outputs(graph, random, together, monkeypatch):
    joint = po.Joint(OwnWeight(), po.likelihoods.Categorical(), po.priors.Normal(), num_data=1, random=random)
    size = 3 if isinstance(random, str) else 2
    q = Gaussian(joint, torch.arange(3.0), DiagonalPrecision(torch.ones(size)))
    monkeypatch.setitem(po.posteriors.gaussian.LARGE, q.mean.device.type, 2 * size)
    monkeypatch.setitem(po.posteriors.gaussian.AT_ONCE, q.mean.device.type, together)
    with torch.set_grad_enabled(graph):
        outputs = q.outputs(torch.zeros(4, 1), 5, Key(1))
    assert torch.equal(outputs, q.sample(5, Key(1)).unsqueeze(1).expand(5, 4, 3))
    assert len(torch.unique(outputs[:, 0, 0])) == 5


def test_draws_as_members_of_one_pass_are_those_of_single_passes(monkeypatch):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    )
    joint = po.Joint(net.double(), po.likelihoods.Categorical(), po.priors.Normal(), num_data=1)
    q = Gaussian(joint, joint.initial(), DiagonalPrecision(torch.full((joint.size,), 50.0, dtype=torch.float64)))
    x = torch.linspace(-1.0, 1.0, 7 * 16, dtype=torch.float64).reshape(7, 1, 4, 4)
    single = q.outputs(x, 5, Key(1))
    monkeypatch.setitem(po.posteriors.gaussian.AT_ONCE, x.device.type, 14)
    torch.testing.assert_close(q.outputs(x, 5, Key(1)), single, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("numbers", "calls"), [(1 << 25, 1), (2 * 7 * 16, 3), (1, 5)])
def test_large_rows_are_not_run_together(numbers, calls, monkeypatch):
    joint = po.Joint(torch.nn.Linear(16, 3), po.likelihoods.Categorical(), po.priors.Normal(), num_data=1)
    q = Gaussian(joint, joint.initial(), DiagonalPrecision(torch.ones(joint.size)))
    seen = []
    inner = po.Joint.outputs
    monkeypatch.setattr(po.Joint, "outputs", lambda *args: (seen.append(1), inner(*args))[1])
    monkeypatch.setitem(po.posteriors.gaussian.AT_ONCE, q.mean.device.type, 1 << 16)
    monkeypatch.setattr(po.posteriors.gaussian, "NUMBERS_AT_ONCE", numbers)
    assert q.outputs(torch.zeros(7, 16), 5, Key(1)).shape == (5, 7, 3)
    assert len(seen) == calls


def test_points_of_another_size_are_refused():
    joint = classification(FLOAT64)
    for theta in (torch.zeros(joint.size + 1), torch.zeros(2, 3), torch.zeros(1, 2, joint.size), torch.tensor(0.0)):
        with pytest.raises(ValueError, match=rf"Point.theta must be \({joint.size},\)"):
            Point(joint, theta.double())
    assert Point(joint, joint.initial().expand(3, -1)).num_members == 3
