"""Batches with missing targets and weights of entries, through the joint, curvature, evidence and methods."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.curvature import (
    CorrectedKronecker,
    EmpiricalFisher,
    Full,
    GaussNewton,
    Hessian,
    Kronecker,
    MonteCarloFisher,
)
from posterity.errors import BadData
from posterity.evidence import residual_sums
from posterity.evidence.cavities import left_out_rows
from posterity.likelihoods import Bernoulli, Categorical, Custom, Gaussian, Likelihood, Poisson, Probit, StudentT
from posterity.methods import (
    MAP,
    NUTS,
    Conjugate,
    ExpectationPropagation,
    Laplace,
    MeanField,
    ProbabilisticBackpropagation,
    VariationalEM,
)
from posterity.model import Batch
from posterity.model.data import as_data, in_memory
from posterity.model.weights import entry_weights, row_weights
from posterity.numerics.random import Key

N, INPUTS, SIZE, CLASSES = 6, 3, 4, 3
NAN, MISSING = math.nan, -100


class Tokens(nn.Module):
    """Logits (N, C, T) of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(INPUTS, 5), nn.Linear(5, CLASSES * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x).tanh()).view(-1, CLASSES, SIZE)


def module(likelihood: Likelihood) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = isinstance(likelihood, Categorical)
        net = Tokens() if tokens else nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, SIZE))
        return net.double()


def rows(likelihood: Likelihood, count: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets with gaps (the whole of row 2 among them), and weights of single targets."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    x = torch.randn(count, INPUTS, dtype=torch.float64, generator=generator)
    y = torch.randn(count, SIZE, dtype=torch.float64, generator=generator)
    gaps = torch.rand(count, SIZE, generator=generator) < 0.4
    gaps[2] = True
    weights = torch.rand(count, SIZE, dtype=torch.float64, generator=generator) + 0.5
    if isinstance(likelihood, Categorical):
        return x, ((y > 0).long() + (y > 1).long()).masked_fill(gaps, MISSING), weights
    y = (y > 0).double() if isinstance(likelihood, (Bernoulli, Probit)) else y
    y = y.abs().floor() if isinstance(likelihood, Poisson) else y
    return x, y.masked_fill(gaps, NAN), weights


LIKELIHOODS = {
    "gaussian": Gaussian(0.5),
    "learnt": Gaussian(0.5, learn=True),
    "student": StudentT(4.0, 0.7),
    "bernoulli": Bernoulli(),
    "probit": Probit(),
    "poisson": Poisson(),
    "tokens": Categorical(positions=1),
}
each = pytest.mark.parametrize("name", list(LIKELIHOODS))
weighted = pytest.mark.parametrize("weigh", [None, "rows", "entries"])


def joint_of(likelihood: Likelihood, count: int = N, prior: float = 1.0) -> po.Joint:
    return po.Joint(module(likelihood), likelihood, po.priors.Normal(prior), count)


def problem(name: str, weigh: str | None) -> tuple[po.Joint, Batch]:
    x, y, w = rows(LIKELIHOODS[name])
    weights = {None: None, "rows": w[:, 0], "entries": w}[weigh]
    return joint_of(LIKELIHOODS[name]), Batch(x, y, weights)


def by_entry(joint: po.Joint, theta: Tensor, batch: Batch) -> Tensor:
    """The log-likelihood of the batch, one observed entry at a time."""
    weights, raw = joint.split(theta)
    likelihood, outputs = joint.likelihood.with_free(raw), joint.network.outputs(weights, batch.inputs)
    total = theta.new_zeros(())
    for row in range(batch.size):
        for entry in range(SIZE):
            y = batch.targets[row, entry]
            if (y.isnan() if y.is_floating_point() else y == MISSING).item():
                continue
            w = (
                1.0
                if batch.weights is None
                else batch.weights.reshape(batch.size, -1)[row, min(entry, batch.weights[0].numel() - 1)]
            )
            if isinstance(likelihood, Categorical):
                total = total + w * outputs[row, :, entry].log_softmax(0)[y]
            else:
                total = total + w * likelihood.log_prob(outputs[row, entry].view(1, 1), y.view(1, 1)).squeeze()
    return total


@each
@weighted
@pytest.mark.parametrize("checked", [False, True])
def test_values_and_gradients(name: str, weigh: str | None, checked: bool) -> None:
    joint, batch = problem(name, weigh)
    theta = joint.initial() + 0.1
    leaf = theta.clone().requires_grad_()
    wanted = by_entry(joint, leaf, batch) + joint.log_prior(leaf)
    (slope,) = torch.autograd.grad(wanted, leaf)
    batch = joint.check(batch) if checked else batch
    assert not batch.complete
    value, grad, _ = joint.value_and_grad(theta, batch)
    torch.testing.assert_close(value, wanted.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, slope, rtol=0, atol=1e-12)
    torch.testing.assert_close(joint.log_density(theta, batch), wanted.detach(), rtol=0, atol=1e-12)
    members = torch.stack([theta, theta - 0.3])
    for rows_of in (batch, per_member(batch)):
        both, slopes, _ = joint.value_and_grad(members, rows_of)
        torch.testing.assert_close(both[0], wanted.detach(), rtol=0, atol=1e-11)
        torch.testing.assert_close(slopes[0], slope, rtol=0, atol=1e-11)


def per_member(batch: Batch) -> Batch:
    return batch.map(lambda tensor: torch.stack([tensor, tensor]))._replace(per_member=True)


@each
def test_a_batch_without_any_target_has_the_prior_alone(name: str) -> None:
    joint, batch = problem(name, None)
    nothing = batch._replace(targets=torch.full_like(batch.targets, MISSING if name == "tokens" else NAN))
    theta = joint.initial()
    for rows_of in (nothing, joint.check(nothing), joint.check(per_member(nothing))):
        at = theta.repeat(2, 1) if rows_of.per_member else theta
        value, grad, _ = joint.value_and_grad(at, rows_of)
        prior, slope = joint._prior_value_and_grad(*joint.split(at), False)
        assert torch.equal(value, prior.expand(value.shape))
        assert torch.equal(grad, slope)
    assert GaussNewton().matrix(joint, theta, joint.check(nothing), None).abs().max() == 0


@each
def test_batches_estimate_the_whole_without_bias(name: str) -> None:
    joint, batch = problem(name, None)
    theta, batch = joint.initial(), joint.check(batch)
    whole = joint.log_likelihood(theta, batch)
    parts = [joint.log_likelihood(theta, batch.map(lambda t, i=i: t[i : i + 2])) for i in range(0, N, 2)]
    torch.testing.assert_close(sum(parts) / len(parts), whole, rtol=0, atol=1e-11)


def scores(joint: po.Joint, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Jacobians (n, D, P) of the outputs, and the root of weights of each output (n, D)."""
    weights = entry_weights(joint.likelihood, batch, torch.float64)
    outputs = joint.outputs(theta, batch.inputs)
    jacobian = torch.func.jacrev(lambda t: joint.network.outputs(t, batch.inputs))(theta[: joint.num_weights])
    root = joint.likelihood.over_outputs(weights).expand(outputs.shape).reshape(N, -1).sqrt()
    return jacobian.reshape(N, -1, joint.num_weights), root


@pytest.mark.parametrize("name", [name for name in LIKELIHOODS if name != "learnt"])
@pytest.mark.parametrize("weigh", [None, "entries"])
def test_curvatures_against_dense_autodiff(name: str, weigh: str | None) -> None:
    joint, batch = problem(name, weigh)
    theta, batch = joint.initial(), joint.check(batch)
    jacobian, root = scores(joint, theta, batch)
    fisher = joint.likelihood.output_fisher(
        joint.outputs(theta, batch.inputs), joint.outputs(theta, batch.inputs).dim() - 1
    )
    middle = root.unsqueeze(-1) * fisher * root.unsqueeze(-2)
    wanted = torch.einsum("nap,nab,nbq->pq", jacobian, middle, jacobian)
    matrix = GaussNewton().matrix(joint, theta, batch, None)
    torch.testing.assert_close(matrix, wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(GaussNewton().diagonal(joint, theta, batch, None), wanted.diagonal(), rtol=0, atol=1e-9)
    hessian = torch.autograd.functional.hessian(lambda t: -by_entry(joint, t, batch), theta)
    torch.testing.assert_close(Hessian().matrix(joint, theta, batch, None), hessian, rtol=0, atol=1e-9)
    drawn = MonteCarloFisher(samples=3).matrix(joint, theta, batch, None)
    empirical = EmpiricalFisher().matrix(joint, theta, batch, None)
    without = batch.map(lambda t: t[[0, 1, 3, 4, 5]])  # row 2 has no target
    torch.testing.assert_close(EmpiricalFisher().matrix(joint, theta, without, None), empirical, rtol=0, atol=1e-11)
    assert bool(torch.isfinite(drawn).all())
    torch.testing.assert_close(GaussNewton().matrix(joint, theta, without, None), matrix, rtol=0, atol=1e-11)


@pytest.mark.parametrize("structure", [Full(), Kronecker(), CorrectedKronecker()])
@pytest.mark.parametrize("name", ["gaussian", "tokens"])
def test_rows_without_targets_leave_posterior_and_evidence_alone(name: str, structure) -> None:
    x, y, _ = rows(LIKELIHOODS[name])
    some = torch.tensor([0, 1, 3, 4, 5])
    fits = []
    for index in (torch.arange(N), some):
        joint = joint_of(LIKELIHOODS[name], len(index), prior=0.5)
        fits.append(po.infer(Laplace(structure=structure, tuning=None), joint, (x[index], y[index]), progress=False)[0])
    torch.testing.assert_close(fits[0].gaussian.variance, fits[1].gaussian.variance, rtol=1e-9, atol=0)
    torch.testing.assert_close(fits[0].gaussian.log_evidence, fits[1].gaussian.log_evidence, rtol=0, atol=1e-9)


def test_kronecker_takes_rows_by_the_share_of_their_targets() -> None:
    joint, batch = problem("gaussian", None)
    batch = joint.check(batch)
    share = row_weights(joint.likelihood, batch, torch.float64)
    assert torch.equal(share, (~batch.targets.isnan()).double().mean(1))


def linear(likelihood: Likelihood, outputs: int, count: int) -> po.Joint:
    net = nn.Linear(2, outputs, bias=False).double()
    return po.Joint(net, likelihood, po.priors.Normal(2.0), count)


def test_conjugate_evidence_of_incomplete_targets_is_exact() -> None:
    x, y, w = rows(Gaussian())
    x = x[:, :2]
    for weights in (None, w):
        q, _ = po.infer(Conjugate(), linear(Gaussian(0.5), SIZE, N), (x, y, weights), progress=False)
        total = torch.zeros((), dtype=torch.float64)
        for output in range(SIZE):
            seen = ~y[:, output].isnan()
            variance = 0.25 * torch.ones(N) if weights is None else 0.25 / weights[:, output]
            cover = 4.0 * x[seen] @ x[seen].T + torch.diag(variance[seen]).double()
            normal = torch.distributions.MultivariateNormal(torch.zeros(int(seen.sum())).double(), cover)
            total += normal.log_prob(y[seen, output])
            if weights is not None:  # N(y; f, s^2)^w against N(y; f, s^2 / w)
                own = weights[seen, output]
                total += (-0.5 * (own - 1.0) * math.log(2 * math.pi * 0.25) - 0.5 * own.log()).sum()
        torch.testing.assert_close(q.gaussian.log_evidence, total, rtol=0, atol=1e-10)
        laplace, _ = po.infer(
            Laplace(structure=Full(), tuning=None),
            linear(Gaussian(0.5), SIZE, N),
            (x, y, weights),
            start=q,
            progress=False,
        )
        torch.testing.assert_close(laplace.gaussian.log_evidence, total, rtol=0, atol=1e-9)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Categorical()])
def test_expectation_propagation_leaves_missing_labels_out(likelihood: Likelihood) -> None:
    x, y, _ = rows(Bernoulli())
    x, labels = x[:, :2], y[:, 0]
    some = ~labels.isnan()
    if isinstance(likelihood, Categorical):
        labels = labels.nan_to_num(MISSING).long()
    outputs = 2 if isinstance(likelihood, Categorical) else 1
    values = []
    net = nn.Linear(2, outputs, bias=False).double()
    for index in (torch.ones(N, dtype=torch.bool), some):
        joint = po.Joint(net, likelihood, po.priors.Normal(2.0), int(index.sum()))
        q, _ = po.infer(ExpectationPropagation(), joint, (x[index], labels[index]), progress=False)
        values.append(q.gaussian.log_evidence if hasattr(q, "gaussian") else q.log_evidence)
    torch.testing.assert_close(*values, rtol=0, atol=1e-9)


def test_probabilistic_backpropagation_leaves_missing_targets_out() -> None:
    x, y, _ = rows(Gaussian())
    joint = po.Joint(nn.Linear(INPUTS, 1).double(), Gaussian(0.5), po.priors.Normal(1.0), N)
    state = ProbabilisticBackpropagation().init(joint, joint.initial(), Key(0))
    batch = joint.check(Batch(x[2:3], y[2:3, :1]))
    after, _ = ProbabilisticBackpropagation().step(joint, state._replace(mean=state.mean.clone()), batch, Key(0))
    torch.testing.assert_close(after.mean, state.mean, rtol=0, atol=0)


def test_residuals_and_noise_count_observed_targets() -> None:
    joint, batch = problem("gaussian", None)
    outputs = joint.outputs(joint.initial(), batch.inputs)
    seen = ~batch.targets.isnan()
    squares = (batch.targets - outputs)[seen].square().sum()
    for rows_of in (batch, joint.check(batch)):
        wanted = torch.stack([squares, seen.sum().double()])
        torch.testing.assert_close(residual_sums(joint.likelihood, outputs, rows_of), wanted)
    x, y, _ = rows(Gaussian(), 40)
    y = y + 3.0 * x[:, :1]
    net = nn.Linear(INPUTS, SIZE).double()
    noise = po.evidence.NoiseScale()
    fits = []
    for keep in (slice(None), [i for i in range(40) if i != 2]):
        rows_of = (x[keep], y[keep])
        start = po.Joint(net, Gaussian(1.0), po.priors.Normal(3.0), len(rows_of[0]))
        q, _ = po.infer(VariationalEM(Conjugate(), [noise], rounds=20), start, rows_of, progress=False)
        fits.append(q.joint.likelihood.scale)
    assert fits[0] == pytest.approx(fits[1], rel=1e-9)
    squares, count = 0.0, 0
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    for output in range(SIZE):  # by least squares, since the prior is wide
        seen = ~y[:, output].isnan()
        fit = torch.linalg.lstsq(design[seen], y[seen, output, None]).solution
        squares += float((y[seen, output, None] - design[seen] @ fit).square().sum())
        count += int(seen.sum()) - design.shape[1]
    assert fits[0] == pytest.approx((squares / count) ** 0.5, rel=0.03)


@pytest.mark.parametrize("name", ["gaussian", "tokens"])
def test_left_out_rows_see_observed_targets(name: str) -> None:
    x, y, _ = rows(LIKELIHOODS[name])
    joint = joint_of(LIKELIHOODS[name], prior=0.3)
    q, _ = po.infer(Laplace(structure=Full(), tuning=None), joint, (x, y), progress=False)
    batch = joint.check(Batch(x, y))
    left = left_out_rows(q, batch)
    assert float(left.posterior[2]) == pytest.approx(0.0, abs=1e-12)
    assert float(left.plug_in[2]) == pytest.approx(0.0, abs=1e-12)
    mean, covariance = q.output_moments(x)
    if name == "gaussian":  # by the marginal of what is observed
        for row in range(N):
            seen = ~y[row].isnan()
            if not bool(seen.any()):
                continue
            cover = covariance[row][seen][:, seen]
            rest = torch.linalg.inv(torch.linalg.inv(cover) - torch.eye(len(cover)).double() / 0.25)
            shift = rest @ ((y[row] - mean[row])[seen] / 0.25)
            normal = torch.distributions.MultivariateNormal(
                mean[row][seen] - shift, rest + 0.25 * torch.eye(len(cover))
            )
            assert float(left.posterior[row]) == pytest.approx(float(normal.log_prob(y[row][seen])), abs=1e-8)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "tokens"])
def test_streams_and_tensors_agree(name: str) -> None:
    x, y, w = rows(LIKELIHOODS[name])
    complete = y.nan_to_num(0.0) if y.is_floating_point() else y.clamp_min(0)
    y = torch.cat([complete[:2], y[2:]])  # the first batch of the loader misses nothing
    joint = joint_of(LIKELIHOODS[name])
    for extra in ((), (w,)):
        loader = DataLoader(TensorDataset(x, y, *extra), batch_size=2)
        assert in_memory(as_data(loader)).first().size == N
        fits = [po.infer(Laplace(tuning=None), joint, data, progress=False)[0] for data in (loader, (x, y, *extra))]
        torch.testing.assert_close(fits[0].gaussian.log_evidence, fits[1].gaussian.log_evidence, rtol=0, atol=1e-9)
        _, trace = po.infer(MAP(steps=6), joint, loader, validation=loader if not extra else None, progress=False)
        assert bool(torch.isfinite(trace["loss"]).all())
    checked = [batch for batch in joint.checked(as_data(loader)).passes(None).from_step(0) if batch is not None]
    assert [batch.complete for batch in checked] == [True, False, False]
    whole = in_memory(joint.checked(as_data(loader)))
    assert not whole.first().complete
    assert not joint.checked(as_data(loader)).sample(N).complete
    draws, _ = po.infer(NUTS(draws=2, warmup=2, chains=1), joint, loader, progress=False)
    assert bool(torch.isfinite(draws.theta).all())


@pytest.mark.parametrize("method", [MeanField(steps=4), NUTS(draws=4, warmup=4, chains=2)])
@pytest.mark.parametrize("name", ["learnt", "tokens"])
def test_methods_run_on_incomplete_targets(name: str, method) -> None:
    x, y, w = rows(LIKELIHOODS[name])
    likelihood = Gaussian(0.5, learn=True, log_scale_prior=(0.0, 1.0)) if name == "learnt" else LIKELIHOODS[name]
    q, _ = po.infer(method, joint_of(likelihood), (x, y, w), progress=False)
    value = po.metrics.negative_log_likelihood(q.predict(x), y)
    assert math.isfinite(value)
    if isinstance(method, NUTS):
        logs = q.log_likelihoods((x, y, w))
        assert bool(torch.isfinite(logs).all())
        assert logs[..., 2].abs().max() == 0


def test_validation_counts_rows_with_targets() -> None:
    x, y, w = rows(Gaussian())
    joint = joint_of(Gaussian(0.5))
    q, trace = po.infer(MAP(steps=3, batch_size=None), joint, (x, y), validation=(x, y), progress=False)
    nll = po.metrics.negative_log_likelihood(q.predict(x), y)
    assert float(trace["validation_nll"][-1]) == pytest.approx(nll, rel=1e-9)
    with pytest.raises(BadData, match="scores whole rows"):
        po.infer(MAP(steps=1), joint, (x, y), validation=(x, y, w), progress=False)
    with pytest.raises(BadData, match="no row has a weight and a target"):
        po.infer(MAP(steps=1), joint, (x, y), validation=(x[2:3], y[2:3]), progress=False)
    loader = DataLoader(TensorDataset(x[2:3], y[2:3]))
    with pytest.raises(BadData, match="no row has a weight and a target"):
        po.infer(MAP(steps=1), joint, (x, y), validation=loader, progress=False)


def test_weights_of_entries_are_refused_where_there_are_none() -> None:
    custom = Custom(lambda f, y: -(f - y).square().sum(-1))
    joint = po.Joint(module(Gaussian()), custom, po.priors.Normal(1.0), N)
    x, y, w = rows(Gaussian())
    with pytest.raises(BadData, match=r"Custom has no log density for each entry .* Give weights \(6,\)"):
        joint.check(Batch(x, y.nan_to_num(), w))
    with pytest.raises(BadData, match="targets must be finite"):
        joint.check(Batch(x, y))
    with pytest.raises(BadData, match=r"or one for each target, \(6, 4\)"):
        as_data((x, y, w[:, :2]))


def test_missing_targets_are_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="posterity")
    x, y, _ = rows(Gaussian())
    joint_of(Gaussian()).checked(as_data((x, y)))
    assert f"{int(y.isnan().sum())} of 24 targets" in caplog.text


def test_data_without_any_target_are_refused() -> None:
    x, prior = torch.ones(5, 2), po.priors.Normal(scale=1.0)
    joint, none = po.Joint(nn.Linear(2, 3), Categorical(), prior, num_data=5), torch.full((5,), MISSING)
    with pytest.raises(BadData, match="Got 5 that are all missing"):
        po.infer(po.methods.MAP(2), joint, (x, none), progress=False)
    later = TensorDataset(x, torch.tensor([MISSING, MISSING, 0, 1, 2]))  # the first batch of a loader may miss all
    po.infer(po.methods.MAP(2), joint, DataLoader(later, batch_size=2), progress=False)
