"""Inference over part of the weights: the rest frozen, or kept as trained points."""

import dataclasses

import pytest
import torch
from contracts.cases import classification, inputs, labels, linear_regression, numbers
from matrixcases import as_matrix
from torch import nn

import posterity as po
from posterity.curvature import Diagonal
from posterity.methods import MAP, AllWeights, Conjugate, Laplace, LargestVariance, LastLayer, Matching
from posterity.model.scales import random_log_prior
from posterity.numerics import Key

FLOAT64 = torch.float64
HEAD = {"2.weight", "2.bias"}


@pytest.fixture(scope="module")
def fitted():
    joint = classification(FLOAT64)
    q, _ = po.infer(MAP(steps=40, batch_size=None), joint, labels(FLOAT64))
    return joint, q


def named(q):
    return {**q.joint.network.frozen, **q.joint.network.layout.unflatten(q.point())}


@pytest.mark.parametrize(
    "method", [MAP(steps=5, batch_size=None), Laplace(tuning=None), Laplace(tuning=None, structure=Diagonal())], ids=str
)
def test_the_rest_is_frozen_at_the_values_of_the_start(fitted, method):
    joint, q = fitted
    head, _ = po.infer(method, joint.with_weights("2.*"), labels(FLOAT64), start=q)
    before, after = named(q), named(head)
    assert set(head.joint.network.layout.names) == HEAD
    assert before.keys() == after.keys()
    for name in before.keys() - HEAD:
        assert torch.equal(before[name], after[name])
    assert head.point().shape == (10,)
    moved = not torch.equal(after["2.weight"], before["2.weight"])
    assert moved == isinstance(method, MAP)


def test_laplace_of_a_part_is_a_block_of_the_whole(fitted):
    joint, q = fitted
    whole, _ = po.infer(Laplace(tuning=None), joint, labels(FLOAT64), start=q)
    for part in (joint.with_weights("2.*"), joint.with_weights(random="2.*")):
        head, _ = po.infer(Laplace(tuning=None), part, labels(FLOAT64), start=q)
        assert head.gaussian.precision.size == 10
        torch.testing.assert_close(
            as_matrix(head.gaussian.precision), as_matrix(whole.gaussian.precision)[-10:, -10:], rtol=1e-12, atol=1e-12
        )


def test_frozen_and_point_weights_predict_alike_and_have_one_evidence(fitted):
    joint, q = fitted
    frozen, _ = po.infer(Laplace(tuning=None), joint.with_weights("2.*"), labels(FLOAT64), start=q)
    points, _ = po.infer(Laplace(tuning=None), joint.with_weights(random="2.*"), labels(FLOAT64), start=q)
    x = inputs(FLOAT64, 5)
    torch.testing.assert_close(frozen.predict(x).probs, points.predict(x).probs, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(points.log_evidence, frozen.log_evidence, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    "subset", [AllWeights(), LastLayer(), Matching("*.bias"), LargestVariance(7)], ids=lambda subset: str(subset)
)
@pytest.mark.parametrize("way", ["normal", "by layer", "Student"])
def test_the_evidence_has_the_prior_of_the_subset_alone(fitted, subset, way):
    """For a normal prior log p(D | theta) - (log det Lambda - log det Lambda_0 + scatter) / 2, as in laplace-torch."""
    joint, q = fitted
    ordered = po.priors.Layerwise({"0.*": po.priors.Normal(0.5, 0.1), "*": po.priors.Normal(2.0, -0.3)})
    prior = {"normal": joint.prior, "by layer": ordered, "Student": po.priors.StudentT(30.0, 0.7)}[way]
    joint = dataclasses.replace(joint, prior=prior)
    part, _ = po.infer(Laplace(tuning=None, subset=subset), joint, labels(FLOAT64), start=q)
    theta, index = q.point(), part.joint.random_indices
    index = torch.arange(26) if index is None else index
    batch = joint.checked(po.model.as_data(labels(FLOAT64))).first()
    likelihood, matrix = joint.log_likelihood(theta, batch), as_matrix(part.gaussian.precision)
    if way == "Student":
        log_prior = torch.stack([joint.prior.log_prob(w.reshape(1)) for w in theta[index]]).sum()
        expected = likelihood + log_prior - 0.5 * torch.logdet(matrix / (2.0 * torch.pi))
    else:
        sides = ((0.5, 0.1), (2.0, -0.3)) if way == "by layer" else ((0.7, 0.0), (0.7, 0.0))
        scale, mean = torch.tensor([sides[0]] * 16 + [sides[1]] * 10, dtype=FLOAT64)[index].unbind(-1)
        scatter = ((theta[index] - mean) / scale).square().sum()
        expected = likelihood - 0.5 * (torch.logdet(matrix) + 2.0 * scale.log().sum() + scatter)
    torch.testing.assert_close(part.log_evidence, expected, rtol=1e-10, atol=0.0)


def test_points_that_a_prior_ties_to_random_weights_count_with_them(fitted):
    joint, q = fitted
    inner = po.priors.Layerwise({"0.*": po.priors.Normal(0.5), "*": po.priors.Normal(2.0)})
    joint = dataclasses.replace(joint, prior=po.priors.Hierarchical(inner, po.priors.LogNormal()))
    theta, bound = q.point(), joint.bound_prior
    head = random_log_prior(joint.with_weights(random="2.weight"), theta)
    rest = random_log_prior(joint.with_weights(random=("0.*", "2.bias")), theta)
    torch.testing.assert_close(head + rest, bound.log_prob(theta))
    single = dataclasses.replace(joint, random=torch.tensor([16, 18]))  # two of the eight of 2.weight
    torch.testing.assert_close(random_log_prior(single, theta), head)


@pytest.mark.parametrize("structure", [po.curvature.Full(), Diagonal()], ids=str)
def test_draws_move_the_random_weights_alone(fitted, structure):
    joint, q = fitted
    points, _ = po.infer(
        Laplace(tuning=None, structure=structure), joint.with_weights(random="2.*"), labels(FLOAT64), start=q
    )
    draws = points.sample(6, Key(0))
    assert draws.shape == (6, joint.num_weights)
    assert torch.equal(draws[:, :-10], q.point()[:-10].expand(6, -1))
    assert bool((draws[:, -10:].std(0) > 0).all())
    named_draws = points.draws(6)
    assert torch.equal(named_draws["0.weight"], q.joint.network.layout.unflatten(q.point())["0.weight"].expand(6, 4, 3))


def test_map_trains_the_points_too(fitted):
    joint, _ = fitted
    method = MAP(steps=3, batch_size=None)
    everything, _ = po.infer(method, joint, labels(FLOAT64))
    points, _ = po.infer(method, joint.with_weights(random="2.*"), labels(FLOAT64))
    assert torch.equal(everything.point(), points.point())


def test_random_weights_in_the_middle_of_theta():
    joint = classification(FLOAT64).with_weights(random="0.bias")
    points, _ = po.infer(Laplace(tuning=None), joint, labels(FLOAT64))
    whole, _ = po.infer(Laplace(tuning=None), classification(FLOAT64), labels(FLOAT64))
    index = slice(12, 16)
    torch.testing.assert_close(
        as_matrix(points.gaussian.precision), as_matrix(whole.gaussian.precision)[index, index], rtol=1e-12, atol=1e-12
    )
    changed = (points.sample(2, Key(0)) != points.point()).any(0).nonzero().squeeze(1)
    assert changed.tolist() == [12, 13, 14, 15]
    jacobian_covariance = points.output_moments(inputs(FLOAT64, 3))[1]
    assert jacobian_covariance.shape == (3, 2, 2)


def test_conjugate_solves_for_the_random_weights_given_the_points():
    joint = linear_regression(FLOAT64).with_weights(random="0.weight")
    x, y = numbers(FLOAT64)
    q, _ = po.infer(Conjugate(), joint, (x, y))
    bias = joint.initial()[-1]
    assert q.point()[-1] == bias
    precision = x.T @ x / 0.3**2 + torch.eye(3, dtype=FLOAT64) / 0.7**2
    mean = torch.linalg.solve(precision, x.T @ (y[:, 0] - bias) / 0.3**2)
    torch.testing.assert_close(as_matrix(q.gaussian.precision), precision, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.point()[:-1], mean, rtol=1e-12, atol=1e-12)


def test_start_from_a_part_brings_its_frozen_weights(fitted):
    joint, q = fitted
    head, _ = po.infer(MAP(steps=5, batch_size=None), joint.with_weights("2.*"), labels(FLOAT64), start=q)
    whole, _ = po.infer(Laplace(tuning=None), joint, labels(FLOAT64), start=head)
    expected = named(head)
    for name, value in named(whole).items():
        assert torch.equal(value, expected[name])


def test_several_members_cannot_be_frozen(fitted):
    joint, q = fitted
    members, _ = po.infer(MAP(steps=2, batch_size=None), joint, labels(FLOAT64), start=q.point().expand(2, -1))
    with pytest.raises(ValueError, match=r"frozen weights would differ by member. Start from q.member\(0\)"):
        po.infer(Laplace(tuning=None), joint.with_weights("2.*"), labels(FLOAT64), start=members)
    one, _ = po.infer(Laplace(tuning=None), joint.with_weights("2.*"), labels(FLOAT64), start=members.member(1))
    assert torch.equal(one.joint.network.frozen["0.bias"], members.theta[1, 12:16])


@pytest.mark.parametrize("random", ["*", "0.*", "*weight"])
@pytest.mark.parametrize("structure", [None, Diagonal()], ids=str)
def test_the_largest_variances_are_those_of_a_diagonal_laplace(fitted, random, structure):
    joint, q = fitted
    part = joint.with_weights(random=random)
    method = Laplace(tuning=None, subset=LargestVariance(5), structure=structure, batch_size=6)
    found, _ = po.infer(method, part, labels(FLOAT64), start=q)
    first, _ = po.infer(Laplace(tuning=None, structure=Diagonal()), part, labels(FLOAT64), start=q)
    places = torch.arange(26) if part.random_indices is None else part.random_indices
    wanted = places[first.gaussian.precision.variance().topk(5).indices].sort().values
    assert torch.equal(found.joint.random_indices, wanted)
    whole, _ = po.infer(Laplace(tuning=None), joint, labels(FLOAT64), start=q)
    block = as_matrix(whole.gaussian.precision)[wanted[:, None], wanted]
    block = block if structure is None else torch.diag(block.diagonal())
    torch.testing.assert_close(as_matrix(found.gaussian.precision), block, rtol=1e-10, atol=1e-12)
    changed = (found.sample(3, Key(0)) != found.point()).any(0).nonzero().squeeze(1)
    assert torch.equal(changed, wanted)


def test_the_last_layer_is_found_by_running_the_network(fitted):
    joint, q = fitted
    found, _ = po.infer(Laplace(tuning=None, subset=LastLayer()), joint, labels(FLOAT64), start=q)
    named_, _ = po.infer(Laplace(tuning=None), joint.with_weights(random="2.*"), labels(FLOAT64), start=q)
    by_pattern, _ = po.infer(Laplace(tuning=None, subset=Matching("2.*")), joint, labels(FLOAT64), start=q)
    for one in (found, by_pattern):
        matrices = as_matrix(one.gaussian.precision), as_matrix(named_.gaussian.precision)
        torch.testing.assert_close(*matrices, rtol=1e-12, atol=1e-12)
        assert torch.equal(one.joint.random_indices, named_.joint.random_indices)

    class Backwards(torch.nn.Module):
        """The layer that runs last is declared first."""

        def __init__(self):
            super().__init__()
            self.head, self.body = torch.nn.Linear(4, 2), torch.nn.Linear(3, 4)

        def forward(self, x):
            return self.head(self.body(x).tanh())

    backwards = po.Joint(Backwards().double(), joint.likelihood, joint.prior, num_data=20)
    last, _ = po.infer(Laplace(tuning=None, subset=LastLayer()), backwards, labels(FLOAT64))
    assert {part.name for part in last.joint.random_slices} == {"head.weight", "head.bias"}


def test_the_largest_variances_are_those_of_the_tempered_posterior() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(Key(31).fold(name).normal(tuple(parameter.shape), torch.float64))
    prior = po.priors.Layerwise({"0.*": po.priors.Normal(0.3), "2.*": po.priors.Normal(1.0)})
    x = Key(32).normal((9, 2), torch.float64)
    batch = po.model.Batch(x, torch.zeros(9, 1, dtype=torch.float64))
    chosen = {}
    for eta in (1.0, 100.0):
        joint = po.Joint(net, po.likelihoods.Gaussian(0.2), prior, 9, po.Tempering.tempered(eta))
        theta = joint.network.initial
        q, _ = po.infer(
            po.methods.Laplace(subset=po.methods.LargestVariance(5), tuning=None),
            joint,
            (x, batch.targets),
            start=theta,
        )
        curvature = po.curvature.GaussNewton().diagonal(joint, theta, batch, None)
        variance = 1.0 / (curvature / eta + joint.bound_prior.precision(theta))
        assert q.joint.random_indices.tolist() == sorted(variance.topk(5).indices.tolist())
        chosen[eta] = q.joint.random_indices.tolist()
    assert chosen[1.0] != chosen[100.0]  # so that the power matters here


class Recurrent(nn.Module):
    """A GRU with a linear layer at its end."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.cells, self.out = nn.GRU(4, units, batch_first=True), nn.Linear(units, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x)[0][:, -1])


class Bilinear(nn.Module):
    """A layer without Kronecker factors, with a linear layer at its end."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.pairs, self.out = nn.Bilinear(24, 24, units), nn.Linear(units, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.pairs(x.flatten(1), x.flatten(1)))


@pytest.mark.parametrize(
    ("network", "settings", "subset"),
    [
        (Bilinear(8), {}, LastLayer()),
        (Bilinear(2), {}, AllWeights()),  # the whole matrix is kept
        (Bilinear(8), {"structure": po.curvature.Kronecker()}, AllWeights()),
        (Bilinear(8), {"subset": AllWeights()}, AllWeights()),
        (Recurrent(32), {}, LastLayer()),  # uses in time count as independent: rough
        (nn.Sequential(nn.Flatten(), nn.Linear(24, 120), nn.Tanh(), nn.Linear(120, 3)), {}, AllWeights()),
    ],
    ids=["factors unknown", "few weights", "structure given", "subset given", "recurrent", "factors known"],
)
def test_weights_of_unknown_curvature_stay_points_by_default(network, settings, subset):
    joint = po.Joint(network, po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), 12)
    data = po.as_data((torch.zeros(12, 6, 4), torch.zeros(12, dtype=torch.int64)))
    assert po.methods.Laplace(**settings).settled(joint, data).subset == subset
