"""MeanField: subsets, priors without closed forms, members, warm-up, doors."""

import dataclasses

import pytest
import torch
from divergences import divergence_of
from torch import Tensor, nn

import posterity as po
from posterity.inference import Method
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import MAP, Flipout, LocalReparameterisation, MeanField, WeightSampling
from posterity.methods.parts.gradients import DataTerm, Estimator, Factorised, Gradients
from posterity.model import Batch
from posterity.networks import MLP
from posterity.numerics import Key
from posterity.optim import Adam, Constant, Warmup
from posterity.priors import (
    Cauchy,
    FanIn,
    GroupLasso,
    HalfCauchy,
    Hierarchical,
    Horseshoe,
    Laplace,
    Layerwise,
    Logistic,
    Normal,
    Prior,
    StudentT,
)

FLOAT64 = torch.float64


def network() -> MLP:
    net = MLP([2, 3, 2], activation="tanh").to(FLOAT64)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(0.5 * Key(3).fold(name).normal(tuple(parameter.shape), FLOAT64))
    return net


def rows(count: int = 12) -> tuple[Tensor, Tensor]:
    x = Key(1).normal((count, 2), FLOAT64)
    return x, (x.sum(-1) > 0).long()


def problem(prior: Prior | None = None, **options: object) -> po.Joint:
    return po.Joint(network(), Categorical(), prior or Normal(0.7), num_data=12, **options)


def first_step(method: Method, joint: po.Joint) -> tuple[Tensor, dict[str, float]]:
    """How far the first step moves, and its info."""
    state = method.init(joint, joint.initial(), Key(0))
    before = state.parameters.clone()
    state, info = method.step(joint, state, joint.check(Batch(*rows())), Key(1))
    return state.parameters - before, {name: float(value) for name, value in info.items()}


PRIORS = [
    Normal(0.7, mean=0.2),
    Layerwise.of(FanIn()),
    Laplace(0.5),
    StudentT(4.0, 0.5),
    Cauchy(0.5),
    Logistic(0.4),
    Horseshoe(0.3),
    GroupLasso(1.5),
    Layerwise({"*.weight": Laplace(0.4), "*": Normal(1.0)}),
]


@pytest.mark.parametrize("prior", PRIORS, ids=lambda prior: type(prior).__name__)
@pytest.mark.parametrize("random", ["*", "2.*"])
def test_gradients_of_the_divergence(prior: Prior, random: str) -> None:
    """Against differences of the value, for random weights and for those that are points."""
    joint = problem(prior, random=random, tempering=po.Tempering(1.0, 0.6))
    places = joint.random_indices
    count = joint.num_weights if places is None else places.numel()
    mean, log_scale = joint.initial(), 0.3 * Key(5).normal((count,), FLOAT64) - 1.0
    found = divergence_of(joint, Factorised(mean, log_scale.exp(), places), Key(0))
    grads = {"mean": found.grad_mean.clone(), "scale": found.grad_scale.clone()}

    def value(mean: Tensor, scale: Tensor) -> float:
        there = divergence_of(joint, Factorised(mean, scale, places), Key(0))
        return float(there.tempered + scale.log().sum())  # the cross-entropy alone

    step = 1e-5
    for which, grad in grads.items():
        for index in (0, len(grad) // 2, len(grad) - 1):
            values = []
            for sign in (-1.0, 1.0):
                at = {"mean": mean.clone(), "scale": log_scale.exp()}
                at[which][index] += sign * step
                values.append(value(**at))
            assert abs((values[1] - values[0]) / (2 * step) - float(grad[index])) < 1e-5 * (1 + abs(float(grad[index])))


def test_points_count_by_their_density() -> None:
    joint = problem(random="2.*")
    places = joint.random_indices
    assert places is not None
    mean, log_scale = joint.initial(), torch.full((places.numel(),), -1.0, dtype=FLOAT64)
    found = divergence_of(joint, Factorised(mean, log_scale.exp(), places), Key(0))
    points = torch.ones(joint.num_weights, dtype=torch.bool)
    points[places] = False
    wanted = Normal(0.7).kl(mean[places], log_scale.exp()) - Normal(0.7).log_prob(mean[points])
    torch.testing.assert_close(found.kl, wanted)


def test_a_prior_without_cross_entropy_is_sampled() -> None:
    joint = problem(Hierarchical(Normal(1.0), HalfCauchy(1.0)))
    mean, log_scale = joint.initial(), torch.full((joint.num_weights,), -1.5, dtype=FLOAT64)
    q = Factorised(mean, log_scale.exp(), None)
    found = [divergence_of(joint, q, Key(0).fold(index)) for index in range(400)]
    draws = mean + log_scale.exp() * Key(9).normal((4000, len(mean)), FLOAT64)
    entropy = (log_scale + 0.5 * torch.log(torch.tensor(2 * torch.pi * torch.e, dtype=FLOAT64))).sum()
    wanted = -joint.log_prior(draws) - entropy
    kl = torch.stack([each.kl for each in found])
    error = (kl.var() / len(kl) + wanted.var() / len(wanted)).sqrt()
    assert abs(float(kl.mean() - wanted.mean())) < 5 * float(error)
    grads = torch.stack([each.grad_scale for each in found])  # sampled: new tensors
    leaf = log_scale.exp().requires_grad_()
    noise = Key(11).normal((4000, len(mean)), FLOAT64)
    (exact,) = torch.autograd.grad(-joint.log_prior(mean + leaf * noise).mean(), leaf)
    assert bool(((grads.mean(0) - exact).abs() < 7 * grads.std(0) / len(grads) ** 0.5).all())


def test_other_weights_are_trained_points() -> None:
    """With a subset of no width the run is MAP in all weights."""
    joint = problem(random="2.*", tempering=po.Tempering.cold(1e-12))
    settings = {"steps": 50, "batch_size": 4, "optimizer": Adam(0.02)}
    q, _ = po.infer(MeanField(**settings, initial_scales=FanIn(1e-9)), joint, rows())
    mode, _ = po.infer(MAP(**settings), joint, rows())
    torch.testing.assert_close(q.mean, mode.point(), rtol=1e-5, atol=1e-6)
    assert q.variance.shape == (8,)
    assert torch.equal(q.sample(5, Key(0))[:, :9], q.mean[:9].expand(5, -1))


def test_learnt_noise_is_a_point_and_comes_back_fitted() -> None:
    x = Key(1).normal((200, 2), FLOAT64)
    y = x @ torch.tensor([[1.0], [2.0]], dtype=FLOAT64) + 0.3 * Key(2).normal((200, 1), FLOAT64)
    net = torch.nn.Linear(2, 1).to(FLOAT64)
    joint = po.Joint(net, Gaussian(1.0, learn=True), Normal(2.0), num_data=200)
    method = MeanField(steps=600, batch_size=None, optimizer=Adam(0.02), estimator=WeightSampling(antithetic=True))
    q, _ = po.infer(method, joint, (x, y))
    assert q.joint.likelihood.num_free == 0
    assert abs(float(q.joint.likelihood.scale) - 0.3) < 0.05
    assert q.variance.shape == (3,)


def test_warm_up_weighs_the_kl() -> None:
    """In the first of 99 steps of a warm-up over all of them the KL counts a hundredth."""
    joint = problem()
    grads = {}
    for name, schedule in (("none", Constant()), ("warm", Warmup(1.0))):
        method = MeanField(steps=99, batch_size=None, optimizer=po.optim.SGD(1.0), kl_schedule=schedule)
        grads[name], info = first_step(method, joint)
        assert abs(info["elbo"] - info["data_fit"] + info["kl"]) < 1e-12
    state = MeanField(optimizer=Adam()).init(joint, joint.initial(), Key(0))
    mean, log_scale = state.parameters.split(joint.size)
    kl = divergence_of(joint, Factorised(mean, log_scale.exp(), None), Key(0))
    push = torch.cat([-kl.grad_mean, 1.0 - kl.grad_scale * log_scale.exp()]) / joint.num_data
    torch.testing.assert_close(grads["none"] - grads["warm"], 0.99 * push)


@pytest.mark.parametrize("optimizer", [po.optim.SGD(1.0), Adam(0.01), po.optim.ScaledAdam(0.01)])
def test_steps_of_scales_may_be_longer_than_those_of_means(optimizer: po.optim.Optimizer) -> None:
    joint = problem()
    method = MeanField(steps=99, batch_size=None, optimizer=optimizer, schedule=Constant(), initial_scales=FanIn(0.1))
    method = dataclasses.replace(method, estimator=WeightSampling())
    plain, _ = first_step(method, joint)
    longer, _ = first_step(dataclasses.replace(method, scale_step=7.0), joint)
    torch.testing.assert_close(longer[: joint.size], plain[: joint.size])
    torch.testing.assert_close(longer[joint.size :], 7.0 * plain[joint.size :])
    assert "scale_step" not in repr(method)
    assert repr(dataclasses.replace(method, scale_step=7.0)) == repr(method)[:-1] + ", scale_step=7.0)"


def test_mirrored_draws_continue_in_the_next_step() -> None:
    joint = problem()
    q = Factorised(joint.initial(), torch.full((joint.num_weights,), 0.3, dtype=FLOAT64), None)
    batch = joint.check(Batch(*rows()))
    estimator = WeightSampling(antithetic=True)
    first = estimator.data_term(joint, q, batch, {}, {}, Key(1))
    sums = first.value, first.grad_scale.clone()
    second = estimator.data_term(joint, q, batch, {}, first.memory, Key(2))
    assert second.memory == {}
    sums = sums[0] + second.value, sums[1] + second.grad_scale
    both = WeightSampling(draws=2, antithetic=True).data_term(joint, q, batch, {}, {}, Key(1))
    torch.testing.assert_close(sums[0] / 2, both.value)
    torch.testing.assert_close(sums[1] / 2, both.grad_scale)


@dataclasses.dataclass(frozen=True)
class HalfInPlace(Estimator):
    """An estimator of one's own that makes one of its gradients where it may, the other elsewhere."""

    of: str

    def data_term(self, joint, q, batch, buffers, memory, key, out=None):
        value, grad, buffers = joint.data_value_and_grad(q.mean, batch, buffers)
        there = Gradients(torch.empty_like(q.mean), torch.empty_like(q.scale)) if out is None else out
        mean = there.mean.copy_(grad) if self.of == "mean" else grad
        scale = there.scale.zero_() if self.of == "scale" else torch.zeros_like(q.scale)
        return DataTerm(value, mean, scale, buffers, {})


def test_an_estimator_may_make_either_gradient_in_place() -> None:
    joint = problem()
    moves = [
        first_step(MeanField(9, optimizer=po.optim.SGD(1.0), estimator=HalfInPlace(of)), joint)[0]
        for of in ("neither", "mean", "scale")
    ]
    assert torch.equal(moves[0], moves[1])
    assert torch.equal(moves[0], moves[2])


def test_members_are_drawn_alike_and_trained_apart() -> None:
    plain = problem()
    joint = dataclasses.replace(plain, tempering=po.Tempering.tempered(torch.tensor([0.1, 1.0, 10.0])))
    q, trace = po.infer(MeanField(steps=200, optimizer=Adam(0.02)), joint, rows())
    assert trace["kl"].shape == (200, 3)
    kl = [float(value) for value in trace["kl"][-1]]
    assert kl[0] > kl[1] > kl[2]
    assert q.num_members == 3


def test_scales_begin_at_the_rule() -> None:
    joint = problem()
    state = MeanField(optimizer=Adam(), initial_scales=FanIn(0.2)).init(joint, joint.initial(), Key(0))
    scales = state.parameters[joint.size :].exp()
    wanted = torch.cat([torch.full((count,), 0.2 / fan**0.5) for count, fan in ((6, 2), (3, 2), (6, 3), (2, 3))])
    torch.testing.assert_close(scales, wanted.to(FLOAT64))
    torch.testing.assert_close(state.parameters[: joint.size], joint.initial())


def test_a_density_without_data() -> None:
    """The factorised optimum of a correlated Gaussian: its mean, and the inverse diagonal of its precision.

    Its marginal scales are 2.3 times as large. The noise of the last steps leaves those of q some 5 in a hundred apart.
    """
    precision = torch.tensor([[2.0, 2.2], [2.2, 3.0]], dtype=FLOAT64)
    centre = torch.tensor([1.0, -1.0], dtype=FLOAT64)
    density = po.Density(lambda w: -0.5 * (w - centre) @ precision @ (w - centre), {"w": (2,)}, dtype=FLOAT64)
    method = MeanField(
        steps=1000, optimizer=Adam(0.02), schedule=po.optim.Cosine(), estimator=WeightSampling(4, antithetic=True)
    )
    q, _ = po.infer(method, density, None)
    torch.testing.assert_close(q.mean, centre, rtol=0.01, atol=0.0)
    torch.testing.assert_close(q.variance.sqrt(), precision.diagonal().rsqrt(), rtol=0.25, atol=0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "MeanField.steps must be"),
        ({"batch_size": 0}, "MeanField.batch_size must be"),
        ({"estimator": WeightSampling}, "MeanField.estimator must be of kind Estimator"),
        ({"kl_schedule": 0.1}, "MeanField.kl_schedule must be of kind Schedule"),
        ({"scale_step": 0.0}, "MeanField.scale_step must be a positive number"),
        ({"initial_scales": 0.1}, "MeanField.initial_scales must be of kind ScaleRule"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        MeanField(**settings)
    with pytest.raises(ValueError, match=r"WeightSampling\.draws must be"):
        WeightSampling(draws=0)
    with pytest.raises(ValueError, match=r"Warmup\.share must be"):
        Warmup(-0.1)


class Sequences(nn.Module):
    """Layers of every kind: an embedding, a linear one at positions, a norm, convolutions in groups, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.tied = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.mix(self.embedding(x))))
        hidden = torch.tanh(self.convolution(hidden.transpose(1, 2))).mean(-1)
        return self.head(torch.tanh(self.tied(torch.tanh(self.tied(hidden)))))


@pytest.mark.parametrize("estimator", [LocalReparameterisation(), LocalReparameterisation(approximate=True), Flipout()])
def test_what_is_drawn_once_is_said_once(estimator: Estimator, caplog: pytest.LogCaptureFixture) -> None:
    joint = po.Joint(Sequences().to(FLOAT64), Categorical(), Normal(1.0), num_data=6)
    x = torch.randint(0, 5, (6, 7), generator=Key(1).generator())
    with caplog.at_level("INFO", logger="posterity"):
        q, _ = po.infer(MeanField(steps=3, batch_size=3, estimator=estimator), joint, (x, x[:, 0] % 2))
    said = [text for text in caplog.messages if "is drawn once a batch" in text]
    names = {text.split("'")[1] for text in said}
    always = {"embedding.weight", "norm.weight", "norm.bias", "tied.weight"}
    exact = isinstance(estimator, LocalReparameterisation) and not estimator.approximate
    positions = {"mix.weight", "mix.bias", "convolution.weight", "convolution.bias"}
    assert names == (always | positions if exact else always)
    assert len(said) == len(names)
    assert any("tied.weight" in text and "more than once" in text for text in said)
    assert bool(torch.isfinite(q.variance).all())


@pytest.mark.parametrize(
    "estimator", [LocalReparameterisation(approximate=True), LocalReparameterisation(3, True), Flipout(2)], ids=repr
)
def test_layers_without_width_are_the_network(estimator: Estimator) -> None:
    """With scales of zero every estimator gives the log-likelihood at the mean, and its gradient."""
    joint = po.Joint(Sequences().to(FLOAT64), Categorical(), Normal(1.0), num_data=6)
    x = torch.randint(0, 5, (6, 7), generator=Key(1).generator())
    batch = joint.check(Batch(x, x[:, 0] % 2))
    theta = joint.initial()
    q = Factorised(theta, torch.zeros_like(theta), None)
    term = estimator.data_term(joint, q, batch, {}, {}, Key(0))
    value, grad, _ = joint.data_value_and_grad(theta, batch)
    torch.testing.assert_close(term.value, value)
    torch.testing.assert_close(term.grad_mean, grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("estimator", [LocalReparameterisation(), Flipout()], ids=repr)
def test_a_density_has_no_layers(estimator: Estimator) -> None:
    density = po.Density(lambda w: -w.square().sum(), {"w": (1,)})
    with pytest.raises(TypeError, match=r"needs a Joint.*Use WeightSampling"):
        po.infer(MeanField(steps=1, estimator=estimator), density, None)


class Draws(nn.Module):
    """Random numbers of its own, or rows that see each other."""

    def __init__(self, noise: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=FLOAT64)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        return outputs + torch.randn_like(outputs) if self.noise else outputs - outputs.mean(0)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (True, r"draws random numbers even in evaluation mode.*torch\.nn\.Dropout under MCDropout"),
        (False, "mixes the rows.*local reparameterisation and flipout need .*or MeanField with WeightSampling"),
    ],
)
@pytest.mark.parametrize("estimator", [LocalReparameterisation(), Flipout()], ids=repr)
def test_modules_that_have_no_rows_of_their_own_are_refused_in_words_that_fit(
    estimator: Estimator, noise: bool, message: str
) -> None:
    joint = po.Joint(Draws(noise), Categorical(), Normal(1.0), num_data=12)
    with torch.random.fork_rng(), pytest.raises(ValueError, match=message):
        po.infer(MeanField(steps=1, estimator=estimator), joint, rows())


class Scaled(nn.Module):
    """A layer, and a weight that acts in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=FLOAT64)
        self.factor = nn.Parameter(torch.ones(2, dtype=FLOAT64))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.layer(x)


def test_curvature_is_spoken_of_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """An estimator that looks at the network first says nothing of curvature; Laplace does afterwards, once."""
    joint = po.Joint(Scaled(), Categorical(), Normal(1.0), num_data=12)
    with caplog.at_level("INFO", logger="posterity"):
        po.infer(MeanField(steps=2, estimator=Flipout()), joint, rows())
        assert not [text for text in caplog.messages if "urvature" in text]
        for _ in range(2):
            po.infer(po.methods.Laplace(tuning=None), joint, rows())
    said = [text for text in caplog.messages if "curvature of" in text]
    assert said == ["curvature of 'factor' by whole Jacobians, because it goes through mul"]
