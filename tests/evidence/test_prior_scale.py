"""The scale of a prior that fits a posterior: the maximum of the expected log prior, group by group."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

import posterity as po
from posterity.evidence import Gamma, Groups, PerLayer, PerTensor, PriorScale, Shared
from posterity.evidence.marginal import grouped, rescaled_prior
from posterity.inference.method import Method
from posterity.numerics import Key
from posterity.posteriors import Gaussian, Linearized, Mixture, Point, Posterior, Samples
from posterity.precisions import Dense, Diagonal
from posterity.priors import FanIn, GroupLasso, Horseshoe, Laplace, Layerwise, Normal, Prior, StudentT

KINDS: dict[str, Prior] = {
    "normal": Normal(0.7),
    "normal around": Normal(0.7, 0.3),
    "normal by weight": Normal(torch.linspace(0.5, 2.0, 27).reshape(1, 27), torch.linspace(-0.2, 0.2, 27)),
    "laplace": Laplace(0.7),
    "laplace around": Laplace(0.7, 0.2),
    "rows": GroupLasso(2.0),
    "columns": GroupLasso(2.0, "columns"),
    "fans": Layerwise.of(FanIn(gain=1.7)),
    "fans and normals": Layerwise({"*.weight": FanIn(), "*": Normal(0.3)}),
    "by layer": Layerwise({"0.*": Laplace(0.4), "2.*": GroupLasso(3.0)}),
}
GROUPS = [Shared(), PerLayer(), PerTensor()]
HYPER_PRIORS = [None, Gamma(3.0, 0.4)]
P = 27


def problem(prior: Prior, tempering: po.Tempering | None = None, random: str | Tensor = "*") -> po.Joint:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    tempering = po.Tempering.bayes() if tempering is None else tempering
    return po.Joint(net, po.likelihoods.Gaussian(0.5, learn=True), prior, 10, tempering, random)


def moments() -> tuple[Tensor, Tensor]:
    sizes = torch.linspace(0.2, 3.0, P, dtype=torch.float64)
    return sizes * Key(1).normal((P,), torch.float64), 0.1 + Key(2).uniform((P,), torch.float64)


def factorised(joint: po.Joint) -> Gaussian:
    mean, scale = moments()
    index = joint.random_indices
    return Gaussian(joint, mean, Diagonal((scale if index is None else scale[index]) ** -2))


def value(step: PriorScale, joint: po.Joint, q: Posterior) -> float:
    """E log p(w), and what the hyper-prior adds."""
    return -float(joint.bound_prior.cross_entropy(*moments())) + step.bound_terms(joint, q)


@pytest.mark.parametrize("hyper_prior", HYPER_PRIORS, ids=["", "gamma"])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_other_scale_of_a_group_is_better(kind: str, groups: Groups, hyper_prior: Gamma | None) -> None:
    joint, step = problem(KINDS[kind]), PriorScale(groups, hyper_prior)
    q = factorised(joint)
    after = step(joint, q)
    highest = value(step, after, q)
    assert highest >= value(step, joint, q)
    names, _ = grouped(joint, groups)
    nudge = 1e-4
    for index in range(len(names)):
        near = []
        for by in (nudge, -nudge, 0.3, -0.3):
            factors = torch.ones(len(names), dtype=torch.float64)
            factors[index] = math.exp(by)
            near.append(value(step, dataclasses.replace(after, prior=rescaled_prior(after, groups, factors)), q))
        assert max(near) < highest
        assert abs(near[0] - near[1]) < 1e-3 * (2.0 * highest - near[0] - near[1]) + 1e-9  # the slope is zero there
    # One more M-step finds the same, so that q(w) alone says what the scales are.
    torch.testing.assert_close(scales(step(after, q)), scales(after), rtol=1e-7, atol=0.0)


def scales(joint: po.Joint) -> Tensor:
    """Standard deviation of each weight under the prior."""
    return joint.bound_prior.variance(torch.zeros(P, dtype=torch.float64)).sqrt()


def test_the_formulas_of_the_three_priors() -> None:
    mean, scale = moments()
    joint = problem(Normal(0.7, 0.3))
    found = PriorScale(Shared())(joint, factorised(joint)).prior
    assert found.scale**-2 == pytest.approx(P / float(((mean - 0.3) ** 2 + scale**2).sum()), rel=1e-12)
    assert found.mean == 0.3
    joint = problem(Laplace(5.0))
    found = PriorScale(Shared())(joint, factorised(joint)).prior
    folded = stats.foldnorm((mean.abs() / scale).cpu().numpy(), scale=scale.cpu().numpy()).mean()
    assert isinstance(found, Laplace)
    assert found.scale == pytest.approx(float(folded.mean()), rel=1e-10)
    joint = problem(GroupLasso(2.0))
    q = Point(joint, mean)
    norms = [mean[:8].reshape(4, 2).norm(dim=1), mean[8:12].abs()]
    rules = PriorScale()(joint, q).prior.rules
    assert rules["0.weight"].rate == pytest.approx(12 / float(sum(n.sum() for n in norms)), rel=1e-12)
    assert rules["0.weight"] == rules["0.bias"] == GroupLasso(rules["0.weight"].rate)


@pytest.mark.parametrize("kind", ["normal", "laplace", "rows", "by layer"])
def test_the_terms_of_a_hyper_prior_make_the_bound_that_of_an_unknown_scale(kind: str) -> None:
    """E over q(tau) of E log p(w | tau) + log p(tau) / q(tau) by quadrature, for each group, at any scale of it."""
    joint, step = problem(KINDS[kind]), PriorScale(PerLayer(), Gamma(3.0, 0.4))
    q, bare = factorised(joint), PriorScale(PerLayer())
    degree = 2 if kind == "normal" else 1
    rate = {"normal": 0.7**-2, "laplace": 1.0 / 0.7, "rows": 2.0}
    taus = [rate[kind]] * 2 if kind in rate else [1.0 / 0.4, 3.0]
    total = here = value(bare, joint, q)
    for index, (tau, size) in enumerate(zip(taus, (12, 15), strict=True)):
        shape = 3.0 + size / degree
        of, before = stats.gamma(shape, scale=tau / shape), stats.gamma(3.0, scale=1.0 / 0.4)

        def gain(there: float, index: int = index, tau: float = tau) -> float:
            factors = torch.ones(2, dtype=torch.float64)
            factors[index] = (tau / there) ** (1.0 / degree)
            moved = dataclasses.replace(joint, prior=rescaled_prior(joint, PerLayer(), factors))
            return value(bare, moved, q) - here

        total += of.expect(lambda t: np.vectorize(gain)(t), epsrel=1e-6)
        total += of.expect(before.logpdf) + float(of.entropy())
    assert value(step, joint, q) == pytest.approx(total, rel=1e-6)
    assert bare.bound_terms(joint, q) == 0.0


def test_em_with_a_hyper_prior_climbs_to_a_bound_below_the_evidence_of_an_unknown_precision() -> None:
    x = Key(3).normal((12, 3), torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.5 * Key(4).normal((12, 1), torch.float64)
    net = nn.Linear(3, 1, bias=False).double()
    joint = po.Joint(net, po.likelihoods.Gaussian(0.5), Normal(5.0), num_data=12)
    step, last = PriorScale(Shared(), Gamma(2.0, 1.0)), -math.inf
    for _ in range(30):
        q, _ = po.infer(po.methods.Conjugate(), joint, (x, y), progress=False)
        for now in (joint, joint := step(joint, q)):
            bound = po.evidence.elbo(dataclasses.replace(q.gaussian, joint=now), (x, y)).elbo + step.bound_terms(now, q)
            assert bound >= last - 1e-10
            last = bound

    def density(alpha: float) -> float:
        spread = x @ x.T / alpha + 0.25 * torch.eye(12, dtype=torch.float64)
        of_data = stats.multivariate_normal(np.zeros(12), spread.cpu().numpy()).logpdf(y[:, 0].cpu().numpy())
        return math.exp(of_data + stats.gamma(2.0).logpdf(alpha))

    evidence = math.log(integrate.quad(density, 0.0, 40.0)[0])
    assert evidence - 0.1 < last < evidence


@pytest.mark.parametrize("kind", ["normal around", "laplace", "rows", "fans", "by layer"])
def test_draws_of_a_gaussian_say_what_it_says_within_their_error(kind: str) -> None:
    joint = problem(KINDS[kind])
    q, draws = factorised(joint), 4000
    theta = q.sample(draws, Key(5))
    raw = torch.full((draws, 1), -3.0, dtype=torch.float64)  # of the noise, behind the weights
    samples = Samples(joint, torch.cat([theta, raw], 1).reshape(4, 1000, P + 1))
    exact, found = scales(PriorScale()(joint, q)), scales(PriorScale()(joint, samples))
    each = [scales(PriorScale()(joint, Point(joint, one))) for one in theta[:200]]
    degree = 2.0 if kind in ("normal around", "fans") else 1.0
    powers = torch.stack(each) ** degree  # the mean over draws of s^k is the s^k of all
    error = powers.std(0) / math.sqrt(draws)
    assert bool(((found**degree - exact**degree).abs() < 5.0 * error).all())
    assert bool((error < 0.01 * exact**degree).all())  # five of them would show a mistake of some percent


def test_mixtures_points_and_linearised_posteriors() -> None:
    joint = problem(Laplace(0.7))
    mean, scale = moments()
    q, point = factorised(joint), Point(joint, -2.0 * mean)
    step = PriorScale(Shared())
    one, other = (step(joint, each).prior.scale for each in (q, point))
    mixed = step(joint, Mixture([Linearized(joint, q), point], torch.tensor([0.3, 0.7], dtype=torch.float64)))
    assert mixed.prior.scale == pytest.approx(0.3 * one + 0.7 * other, rel=1e-12)
    narrow = Gaussian(joint, mean, Diagonal(torch.full((P,), 1e16, dtype=torch.float64)))
    assert step(joint, narrow).prior.scale == pytest.approx(float(mean.abs().mean()), rel=1e-6)
    # Weights that depend on each other have the same marginals, of which a normal or Laplace prior knows alone.
    turn = torch.linalg.qr(Key(6).normal((P, P), torch.float64)).Q
    covariance = turn @ torch.diag(scale**2) @ turn.T
    full = Gaussian(joint, mean, Dense(covariance.inverse()))
    marginal = Gaussian(joint, mean, Diagonal(covariance.diagonal() ** -1))
    assert step(joint, full).prior.scale == pytest.approx(step(joint, marginal).prior.scale, rel=1e-9)
    with pytest.raises(TypeError, match="factorised Gaussian"):
        step(problem(GroupLasso()), full)


def test_points_keep_their_prior() -> None:
    joint = problem(Layerwise({"0.*": StudentT(5.0), "2.*": Laplace(0.4)}), random="2.*")
    after = PriorScale()(joint, factorised(joint))
    assert after.random == joint.random
    rules = after.prior.rules
    assert rules["0.weight"] == rules["0.bias"] == StudentT(5.0)
    alone = problem(Laplace(0.4)).with_weights("2.*")
    mean, scale = moments()
    same = PriorScale()(alone, Gaussian(alone, mean[12:], Diagonal(scale[12:] ** -2)))
    assert rules["2.weight"].scale == pytest.approx(same.prior.scale, rel=1e-12)
    # A posterior over fewer weights than the joint's, as Laplace(subset=LastLayer()) makes it.
    wide = dataclasses.replace(joint, random="*")
    assert PriorScale()(wide, factorised(joint)).prior == after.prior


def test_single_weights_of_a_tensor() -> None:
    places = torch.tensor([1, 2, 5, 9, 20])
    joint = problem(Normal(0.7), random=places)
    found = scales(PriorScale(Shared())(joint, factorised(joint)))
    mean, scale = moments()
    assert found[places].tolist() == pytest.approx(5 * [float((mean**2 + scale**2)[places].mean().sqrt())], rel=1e-12)
    others = torch.ones(P, dtype=torch.bool).index_fill(0, places, False)
    assert torch.equal(found[others], torch.full((P - 5,), 0.7, dtype=torch.float64))
    with pytest.raises(ValueError, match="only part of"):
        PriorScale()(problem(Laplace(), random=places), factorised(joint))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_patterns_inside_a_group_stay(groups: Groups) -> None:
    prior = Layerwise({"*.weight": FanIn(), "*": Normal(0.3, 0.1)})
    joint = problem(prior)
    after = PriorScale(groups)(joint, factorised(joint))
    ratio = scales(after) / scales(joint)
    names, index = grouped(joint, groups)
    for each in range(len(names)):
        torch.testing.assert_close(ratio[index == each], ratio[index == each][:1].expand((index == each).sum()))
    assert len(set(ratio.mul(1e9).round().tolist())) == len(names)
    if isinstance(groups, Shared):
        assert isinstance(after.prior.rules["*.weight"], FanIn)
        assert after.prior.rules["*.weight"].gain == pytest.approx(float(ratio[0]), rel=1e-12)
    assert after.bound_prior.mean[8:12].tolist() == [0.1] * 4


@pytest.mark.parametrize("kind", ["normal", "laplace", "rows"])
def test_weights_far_below_their_prior_keep_their_digits(kind: str) -> None:
    joint = problem(KINDS[kind])
    mean, scale = moments()
    small = Gaussian(joint, 1e-9 * mean, Diagonal((1e-9 * scale) ** -2))
    step = PriorScale()
    torch.testing.assert_close(
        scales(step(joint, small)), 1e-9 * scales(step(joint, factorised(joint))), rtol=1e-7, atol=0.0
    )


@pytest.mark.parametrize("hyper_prior", HYPER_PRIORS, ids=["", "gamma"])
@pytest.mark.parametrize("tempering", [po.Tempering.tempered(0.25), po.Tempering.cold(0.25)], ids=["tempered", "cold"])
def test_tempering_changes_no_scale(tempering: po.Tempering, hyper_prior: Gamma | None) -> None:
    plain, tempered, step = problem(Laplace()), problem(Laplace(), tempering), PriorScale(PerLayer(), hyper_prior)
    q = factorised(plain)
    assert step(tempered, factorised(tempered)).prior == step(plain, q).prior
    power = float(tempering.prior_power)
    assert step.bound_terms(tempered, q) == pytest.approx(power * step.bound_terms(plain, q), rel=1e-12)


def test_what_has_no_closed_form_is_refused() -> None:
    for prior in (StudentT(5.0), Horseshoe(1.0), Layerwise({"0.*": Normal(), "2.*": StudentT(3.0)})):
        joint = problem(prior)
        with pytest.raises(ValueError, match="Normal, Laplace or GroupLasso"):
            PriorScale()(joint, factorised(joint))
    joint = problem(Layerwise({"*.weight": GroupLasso(), "*": Normal()}))
    with pytest.raises(ValueError, match="groups=PerTensor"):
        PriorScale()(joint, factorised(joint))
    assert PriorScale(PerTensor())(joint, factorised(joint)).prior.rules["0.bias"] != Normal()
    joint = problem(Normal(torch.ones(2)))
    with pytest.raises(ValueError, match="2 members"):
        PriorScale()(joint, factorised(problem(Normal())))
    joint = problem(Normal())
    with pytest.raises(TypeError, match="3 separate posteriors"):
        PriorScale()(joint, Point(joint, torch.zeros(3, P, dtype=torch.float64)))
    net, rows = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1)), (torch.ones(4, 2), torch.ones(4, 1))
    dropping = po.Joint(net, po.likelihoods.Gaussian(), Normal(), 4)
    masked, _ = po.infer(po.methods.MCDropout(steps=1), dropping, rows, progress=False)
    with pytest.raises(TypeError, match="must be over weights"):
        PriorScale()(dropping, masked)
    with pytest.raises(ValueError, match="their scale would be zero"):
        PriorScale()(joint, Point(joint, torch.zeros(P, dtype=torch.float64)))
    known = PriorScale(Shared(), Gamma(2.0, 0.5))(joint, Point(joint, torch.zeros(P, dtype=torch.float64)))
    assert known.prior.scale**-2 == pytest.approx((2.0 + P / 2) / 0.5)
    other = po.Joint(nn.Linear(1, 1), po.likelihoods.Gaussian(), Normal(), 3)
    with pytest.raises(TypeError, match="one of the joint's weights"):
        PriorScale()(joint, Point(other, torch.zeros(2)))
    with pytest.raises(TypeError, match=r"PriorScale\.groups must be of kind Groups"):
        PriorScale(PerLayer)  # type: ignore[arg-type]


METHODS: dict[str, Method] = {
    "mean field": po.methods.MeanField(steps=20, batch_size=None),
    "full rank": po.methods.FullRank(steps=20, batch_size=None),
    "low rank": po.methods.LowRankGaussian(steps=20, batch_size=None),
    "natural gradient": po.methods.NaturalGradient(steps=20, batch_size=None),
    "laplace": po.methods.Laplace(tuning=None),
    "kronecker": po.methods.Laplace(structure=po.curvature.Kronecker(), tuning=None),
    "ensemble": po.methods.Ensemble(po.methods.MAP(steps=5, batch_size=None), size=3),
    "metropolis": po.methods.Metropolis(draws=20, warmup=20, chains=2),
}


@pytest.mark.parametrize("name", METHODS)
def test_posteriors_of_all_kinds_of_methods(name: str) -> None:
    """The variance of the prior is the mean square of the weights, as draws of the posterior have it."""
    joint = po.Joint(problem(Normal()).network, po.likelihoods.Gaussian(0.5), Normal(0.7), 10)
    x = Key(7).normal((10, 2), torch.float64)
    q, _ = po.infer(METHODS[name], joint, (x, torch.sin(x[:, [0, 1, 0]])), progress=False)
    draws = 40 if name == "metropolis" else 3000
    each = q.sample(draws, Key(8))[:, :P].square().mean(1)
    error = (
        0.0 if name in ("metropolis", "ensemble") else float(each.std()) / math.sqrt(draws)
    )  # those are all there are
    found = PriorScale(Shared())(joint, q).prior.scale ** 2
    assert abs(found - float(each.mean())) < 5.0 * error + 1e-9 * found
