"""SWAG: moments against hand-computed ones, batch norm, members, resume, weights that never move, doors."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.cases import inputs, numbers, regression
from contracts.test_methods import same_bits
from drawn import normal
from killedruns import KillAfter, KilledError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.evidence import elbo
from posterity.inference import Callback, Checkpoint, Run
from posterity.inference.callbacks import Validation
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, SWAG, swag
from posterity.model import Batch, as_data
from posterity.numerics import Key
from posterity.optim import SGD, Cyclic
from posterity.posteriors.linearized import Linearized
from posterity.precisions import Dense, Diagonal
from posterity.priors import Normal
from posterity.storage import RunFolder

FLOAT64 = torch.float64
FIT = MAP(steps=40, batch_size=6, optimizer=SGD(0.05))


class Record(Callback):
    """theta after each step."""

    def __init__(self) -> None:
        self.thetas: list[Tensor] = []

    def after_step(self, run: Run) -> None:
        self.thetas.append(run.state.theta.double().clone())


def recorded(joint: po.Joint, rows: object, fit: MAP = FIT, seed: int = 3) -> Tensor:
    """The thetas (steps, T) of a plain run of the fit; like those of SWAG, its steps are not played as CUDA graphs."""
    record = Record()
    po.infer(fit, joint, rows, seed=seed, callbacks=[record], accelerate="off")
    return torch.stack(record.thetas)


def by_hand(thetas: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the paper, from all collected thetas (n, T)."""
    mean = thetas.mean(0)
    variance = thetas.square().mean(0) - mean.square()
    if not rank:
        return mean, torch.diag(variance)
    running = torch.stack([thetas[: i + 1].mean(0) for i in range(len(thetas))])
    deviations = (thetas - running)[-rank:].T  # (T, K)
    return mean, 0.5 * (torch.diag(variance) + deviations @ deviations.T / (rank - 1))


@pytest.mark.parametrize("rank", [0, 2, 5, 12])
@pytest.mark.parametrize("random", ["*", "2.*"])
def test_moments_are_those_of_a_recorded_run(rank: int, random: str) -> None:
    joint = regression(FLOAT64).with_weights(random=random)
    thetas = recorded(joint, numbers(FLOAT64))[4 + 2 :: 3]  # after steps 7, 10, ...
    mean, covariance = by_hand(thetas, rank)
    q, trace = po.infer(SWAG(FIT, every=3, rank=rank, warmup=4), joint, numbers(FLOAT64), seed=3)
    places = joint.random_indices
    chosen = torch.arange(joint.num_weights) if places is None else places
    torch.testing.assert_close(q.mean, mean[: joint.num_weights], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.precision.covariance(), covariance[chosen][:, chosen], rtol=1e-8, atol=1e-16)
    assert float(q.joint.likelihood.scale) == pytest.approx(float(joint.fitted(mean).likelihood.scale), rel=1e-12)
    assert len(trace["loss"]) == 40
    twice, _ = po.infer(SWAG(FIT, every=3, rank=rank, warmup=4, scale=2.0), joint, numbers(FLOAT64), seed=3)
    torch.testing.assert_close(twice.variance, 4.0 * q.variance, rtol=1e-12, atol=0.0)  # scale is that of deviations


def test_starts_where_the_start_is_and_collects_on_cycles() -> None:
    joint = regression(FLOAT64)
    start, _ = po.infer(MAP(steps=50), joint, numbers(FLOAT64))
    fit = MAP(steps=30, batch_size=6, optimizer=SGD(0.05), schedule=Cyclic(5))
    record = Record()
    po.infer(fit, joint, numbers(FLOAT64), start=start, callbacks=[record], accelerate="off")
    mean, covariance = by_hand(torch.stack(record.thetas)[4::5], 3)
    q, _ = po.infer(SWAG(fit, every=5, rank=3), joint, numbers(FLOAT64), start=start)
    torch.testing.assert_close(q.mean, mean[: joint.num_weights], rtol=1e-12, atol=1e-12)
    wanted = covariance[: joint.num_weights, : joint.num_weights]
    torch.testing.assert_close(q.precision.covariance(), wanted, rtol=1e-8, atol=1e-16)


@pytest.mark.parametrize("rank", [0, 4])
def test_samples_have_the_covariance_that_is_stated(rank: int) -> None:
    """Standard deviations, not variances: along a run the two differ by orders of magnitude."""
    joint = regression(FLOAT64)
    q, _ = po.infer(SWAG(FIT, every=2, rank=rank), joint, numbers(FLOAT64), seed=3)
    mean, wanted = by_hand(recorded(joint, numbers(FLOAT64))[1::2], rank)
    wanted = wanted[: joint.num_weights, : joint.num_weights]
    count = 20_000
    drawn = q.sample(count, Key(4)) - mean[: joint.num_weights]
    variances = wanted.diagonal()
    error = ((variances.unsqueeze(0) * variances.unsqueeze(1) + wanted.square()) / count).sqrt()
    assert bool(((drawn.T @ drawn / count - wanted).abs() < 5.0 * error).all())
    assert bool((drawn.mean(0).abs() < 5.0 * (variances / count).sqrt()).all())


@pytest.mark.parametrize("random", ["*", "2.*"])
def test_what_is_made_of_it_is_what_the_dense_matrix_makes(random: str) -> None:
    joint = regression(FLOAT64).with_weights(random=random)
    q, _ = po.infer(SWAG(FIT, every=2, rank=4), joint, numbers(FLOAT64))
    dense = dataclasses.replace(q, precision=Dense(torch.linalg.inv(q.precision.covariance())))
    x, drawn = inputs(FLOAT64, 5), q.sample(4, Key(0))
    close = {"rtol": 1e-7, "atol": 1e-12}
    torch.testing.assert_close(q.log_density(drawn), dense.log_density(drawn), **close)
    torch.testing.assert_close(q.entropy, dense.entropy, **close)
    torch.testing.assert_close(elbo(q, numbers(FLOAT64)).kl, elbo(dense, numbers(FLOAT64)).kl, **close)
    functions = [Linearized(each.joint, each) for each in (q, dense)]
    for name in ("output_moments", "joint_output_moments"):
        first, second = (getattr(function, name)(x)[1] for function in functions)
        torch.testing.assert_close(first, second, **close)
    next_problem = po.continued(regression(FLOAT64), q) if random == "*" else None
    if next_problem is not None:
        torch.testing.assert_close(next_problem.log_prior(drawn), dense.log_density(drawn), **close)


def test_weights_that_never_move_have_a_floor() -> None:
    """An input that is always zero, with a weight at the prior's mode."""
    x, y = numbers(FLOAT64)
    x[:, 1] = 0.0
    net = nn.Linear(3, 1).double()
    nn.init.zeros_(net.weight)
    joint = po.Joint(net, Gaussian(0.5), Normal(1.0), num_data=20)
    for rank in (0, 3):
        q, _ = po.infer(SWAG(FIT, every=2, rank=rank), joint, (x, y))
        assert 0.0 < float(q.variance[1]) <= 1e-30
        drawn = q.sample(5, Key(0))
        assert float(drawn[:, 1].abs().max()) < 1e-14
        assert bool(torch.isfinite(q.log_density(drawn)).all())


def test_single_precision_far_from_zero_does_not_cancel() -> None:
    """Weights near 300 that move by 0.01: in float32 the difference of moments would be noise, or negative."""
    net = nn.Linear(3, 1)
    with torch.no_grad():
        net.weight.fill_(300.0)
    x, y = numbers(torch.float32)
    joint = po.Joint(net, Gaussian(0.5), Normal(1.0, mean=300.0), num_data=20)
    rows = x, 300.0 * x.sum(-1, keepdim=True) + y
    thetas = recorded(joint, rows)[1::2]
    q, _ = po.infer(SWAG(FIT, every=2, rank=0), joint, rows, seed=3)
    torch.testing.assert_close(q.variance, thetas.var(0, correction=0), rtol=1e-9, atol=0.0)


def normed(**options: object) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Tanh(), nn.Linear(4, 1)
    return nn.Sequential(*layers).double()


def normed_joint(module: nn.Module | None = None) -> po.Joint:
    return po.Joint(module or normed(), Gaussian(0.3), Normal(1.0), num_data=20)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("batch_size", [6, None])
def test_batch_norm_statistics_are_those_at_the_mean(batch_size: int | None, momentum: float | None) -> None:
    """As torch's `update_bn` has them, from one pass; 20 rows in batches of 6 are three batches."""
    x, y = numbers(FLOAT64)
    method = SWAG(MAP(steps=20, batch_size=batch_size, optimizer=SGD(0.01)), every=2, rank=3)
    module = normed(momentum=momentum)
    joint = normed_joint(module)
    q, _ = po.infer(method, joint, (x, y), seed=1)
    feed = method.batches(po.as_data((x, y)), Key(1).fold("batches"))
    passed = [batch.inputs for batch in feed.from_step(20)]
    assert len(passed) == (1 if batch_size is None else 3)
    twin = copy.deepcopy(module)
    nn.utils.vector_to_parameters(q.mean, twin.parameters())
    torch.optim.swa_utils.update_bn(passed, twin)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(q.buffers[f"1.{name}"], getattr(twin[1], name), rtol=1e-10, atol=1e-12)
    assert module[1].momentum == momentum
    with torch.no_grad():
        torch.testing.assert_close(joint.outputs(q.mean, x, q.buffers), twin.eval()(x), rtol=1e-10, atol=1e-12)


def test_batch_statistics_leave_the_network_alone() -> None:
    network = normed_joint().network
    x = inputs(FLOAT64, 7)
    own = network.batch_statistics(network.initial, x)
    hidden = nn.functional.linear(x, *network.views(network.initial)[:2])
    torch.testing.assert_close(own["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(own["1.running_var"], hidden.var(0))
    assert own.keys() == {"1.running_mean", "1.running_var"}
    assert torch.equal(network.buffers["1.running_mean"], torch.zeros(4, dtype=FLOAT64))
    trained = network.run(network.views(network.initial), x, train=True)[1]
    torch.testing.assert_close(trained["1.running_mean"], 0.1 * own["1.running_mean"])
    assert regression(FLOAT64).network.batch_statistics(regression(FLOAT64).network.initial, x) == {}


def test_members_with_batch_norm_together_equal_members_one_by_one() -> None:
    start = normed_joint().initial() + 0.3 * normal(Key(5), 3, normed_joint().size)
    method = SWAG(FIT, every=4, rank=4)
    together, _ = po.infer(method, normed_joint(), numbers(FLOAT64), start=start)
    for index in range(3):
        alone, _ = po.infer(method, normed_joint(), numbers(FLOAT64), start=start[index])
        one = together.member(index)
        torch.testing.assert_close(one.mean, alone.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.precision.covariance(), alone.precision.covariance(), rtol=1e-8, atol=1e-14)
        for name, buffer in alone.buffers.items():
            torch.testing.assert_close(one.buffers[name], buffer, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("step", [5, 12, 13, 14, 15])
def test_a_run_with_batch_norm_resumes_within_the_last_pass_too(step: int, tmp_path: Path) -> None:
    method = SWAG(MAP(steps=12, batch_size=6, optimizer=SGD(0.05)), every=2, rank=4)
    whole, _ = po.infer(method, normed_joint(), numbers(FLOAT64))
    checkpoint = Checkpoint(tmp_path, steps=1)
    with pytest.raises(KilledError):
        po.infer(method, normed_joint(), numbers(FLOAT64), checkpoint=checkpoint, callbacks=[KillAfter(step)])
    resumed, _ = po.infer(method, normed_joint(), numbers(FLOAT64), checkpoint=checkpoint)
    assert same_bits(resumed, whole)


def test_a_resumed_run_compares_with_the_start_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    measured = swag.measured_width_cost

    def noted(*arguments: Any, start: Tensor | None, **options: Any) -> Any:
        compared.append(start)
        return measured(*arguments, start=start, **options)

    monkeypatch.setattr(swag, "measured_width_cost", noted)
    method = SWAG(MAP(steps=12, batch_size=6, optimizer=SGD(0.05)), every=2, rank=4)
    begin = normed_joint().initial() + 0.1
    _, whole = po.infer(method, normed_joint(), numbers(FLOAT64), start=begin)
    checkpoint = Checkpoint(tmp_path, steps=1)
    with pytest.raises(KilledError):
        po.infer(method, normed_joint(), numbers(FLOAT64), start=begin, checkpoint=checkpoint, callbacks=[KillAfter(7)])
    _, resumed = po.infer(method, normed_joint(), numbers(FLOAT64), start=begin, checkpoint=checkpoint)
    assert len(compared) == 2
    assert all(torch.equal(start, begin) for start in compared)
    assert torch.equal(whole["loss"], resumed["loss"])
    assert torch.equal(RunFolder(tmp_path).read("state").tensors["state.start"], begin.cpu())


@pytest.mark.cpu  # torch's sampler draws by a generator of the CPU
def test_takes_a_loader_that_drops_rows() -> None:
    rows = TensorDataset(*numbers(FLOAT64))
    loader = DataLoader(rows, batch_size=6, shuffle=True, drop_last=True)
    q, trace = po.infer(SWAG(FIT, every=4, rank=4), normed_joint(), loader)
    assert len(trace["loss"]) == 40
    assert not torch.equal(q.buffers["1.running_mean"], torch.zeros(4, dtype=FLOAT64))


def test_a_density_without_data() -> None:
    density = po.Density(lambda w: -0.5 * w.square().sum(), {"w": (2,)})
    fit = MAP(steps=6, optimizer=SGD(0.5, momentum=0.0))
    q, _ = po.infer(SWAG(fit, every=1, rank=2), density, None, start=torch.tensor([1.0, 2.0]))
    thetas = 0.5 ** torch.arange(1, 7, dtype=FLOAT64).unsqueeze(1) * torch.tensor([1.0, 2.0])
    mean, covariance = by_hand(thetas, 2)
    torch.testing.assert_close(q.mean.double(), mean)
    torch.testing.assert_close(q.precision.covariance(), covariance, rtol=1e-6, atol=1e-8)


def test_memory_is_told_and_grows_with_the_rank() -> None:
    joint, data = regression(FLOAT64), po.as_data(numbers(FLOAT64))
    small, large = (SWAG(FIT, every=1, rank=rank).footprint(joint, data).parts for rank in (0, 7))
    assert small["deviations"] == 0
    assert large["deviations"] == 7 * joint.num_weights * 8
    assert small.keys() > FIT.footprint(joint, data).parts.keys()
    assert "SWAG of rank 20 over" in SWAG().settled(joint, data).footprint(joint, data).words
    assert po.plan(SWAG(FIT, every=1, rank=7), joint, numbers(FLOAT64)).total > sum(
        FIT.footprint(joint, data).parts.values()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fit": MAP}, r"SWAG\.fit must be of kind MAP"),
        ({"fit": 3}, r"SWAG\.fit must be of kind MAP\. Got 3"),
        ({"every": 0}, r"SWAG\.every must be a positive whole number"),
        ({"rank": -1}, r"SWAG\.rank must be a whole number of at least 0\. Got -1"),
        ({"rank": 2.0}, r"SWAG\.rank must be a whole number of at least 0\. Got 2\.0"),
        ({"rank": 1}, r"SWAG\.rank must be 0, for a diagonal covariance, or at least 2"),
        ({"warmup": -2}, r"SWAG\.warmup must be a whole number of at least 0"),
        ({"scale": 0.0}, r"SWAG\.scale must be a positive number\. Got 0\.0"),
        ({"every": 3}, r"at least 20 thetas.*Got 13 from 40 steps, one every 3 after the first 0\. Use more steps"),
        ({"rank": 0, "every": 30}, r"at least 2 thetas.*Got 1 "),
        ({"warmup": 50, "every": 1}, r"Got 0 from 40 steps"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SWAG(**{"fit": FIT, **settings})


def test_no_posterior_before_there_is_one() -> None:
    with pytest.raises(ValueError, match=r"at least 2 collected thetas.*Got 0 after 1 steps.*after step 8"):
        po.infer(
            SWAG(FIT, every=5, rank=2, warmup=3),
            regression(FLOAT64),
            numbers(FLOAT64),
            validation=numbers(FLOAT64),
            callbacks=[Validation(1)],
        )


def test_a_state_of_any_length_makes_a_posterior() -> None:
    """Fewer thetas than the rank: those there are."""
    joint = regression(FLOAT64)
    method = SWAG(FIT, every=1, rank=20, warmup=0).settled(joint, as_data(numbers(FLOAT64)))
    state = method.init(joint, joint.initial(), Key(0))
    thetas = []
    for step in range(3):
        state, _ = method.step(joint, state, joint.check(Batch(*numbers(FLOAT64))), Key(step))
        thetas.append(state.fit.theta.clone())
    q = method.posterior(joint, [state])
    wanted = by_hand(torch.stack(thetas), 3)[1][: joint.num_weights, : joint.num_weights]
    torch.testing.assert_close(q.precision.covariance(), wanted, rtol=1e-8, atol=1e-16)
    assert not isinstance(q.precision, Diagonal)


def checkpointed(module: nn.Module, method: SWAG, rows: Any, **options: Any) -> tuple[Any, po.Joint, list[Any]]:
    """The posterior of a run, its problem, and the state dicts of the thetas that it collected."""
    joint = po.Joint(module, Gaussian(0.3), Normal(1.0), num_data=20, **options)
    states = []

    def store(run: Run) -> None:
        since = run.step - method.warmup
        if since > 0 and since % method.every == 0 and run.step <= method.fit.steps:
            weights = joint.network.layout.unflatten(run.state.fit.theta.clone())
            states.append({**weights, **{name: b.clone() for name, b in run.state.fit.buffers.items()}})

    q, _ = po.infer(method, joint, rows, seed=5, callbacks=[store])
    return q, joint, states


@pytest.mark.parametrize("options", [{}, {"random": "3.*"}], ids=["all weights", "the last layer"])
@pytest.mark.parametrize("rank", [0, 4])
def test_checkpoints_of_another_loop_give_the_posterior_of_a_run(rank: int, options: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    method = SWAG(FIT, every=5, rank=rank, warmup=5, scale=0.7)
    q, joint, states = checkpointed(module, method, numbers(FLOAT64), **options)
    own = SWAG(rank=rank, scale=0.7).from_checkpoints(joint, iter(states), numbers(FLOAT64), batch_size=6, seed=5)
    assert len(states) == 7
    assert same_bits(own, q)  # moments, statistics and all


def test_checkpoints_without_rows_keep_the_last_statistics_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    _, joint, states = checkpointed(module, SWAG(FIT, every=5, rank=2, warmup=0), numbers(FLOAT64))
    q = SWAG(rank=2).from_checkpoints(joint, states)
    assert "batch-norm statistics are those of the last checkpoint" in caplog.text
    assert torch.equal(q.buffers["1.running_mean"], states[-1]["1.running_mean"])
    with pytest.raises(ValueError, match=r"at least 20 checkpoints.*Got 8"):
        SWAG().from_checkpoints(joint, states)
    with pytest.raises(ValueError, match=r"at least 2 checkpoints.*Got 0"):
        SWAG(rank=0).from_checkpoints(joint, [])
    with pytest.raises(ValueError, match=r"with '0.weight' of shape \(4, 3\). Got none"):
        SWAG(rank=2).from_checkpoints(joint, [{f"module.{name}": t for name, t in states[0].items()}])
    noise = dataclasses.replace(joint, likelihood=Gaussian())
    with pytest.raises(ValueError, match=r"SWAG.from_checkpoints: the noise must be given"):
        SWAG(rank=2).from_checkpoints(noise, states)
