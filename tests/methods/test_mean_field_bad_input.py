"""MeanField under bad input: what is refused, what is named, what is kept."""

import dataclasses
from importlib import import_module
from pathlib import Path

import pytest
import torch
from contracts.cases import classification, labels, numbers, regression
from drawn import normal
from torch import Tensor, nn

import posterity as po
from posterity.errors import Diverged
from posterity.inference import Checkpoint
from posterity.likelihoods import Gaussian
from posterity.methods import Flipout, LocalReparameterisation, MeanField, WeightSampling
from posterity.methods.parts.gradients import Estimator, Factorised
from posterity.methods.parts.gradients.estimator import Gradients, divergence
from posterity.numerics import Key
from posterity.optim import SGD, Adam
from posterity.priors import Cauchy, FanIn, GroupLasso, Horseshoe, Laplace, Layerwise, Logistic, Normal, Prior, StudentT
from posterity.storage import RunFolder

FLOAT64 = torch.float64
WEIGHTS = {"0.weight", "0.bias", "2.weight", "2.bias"}


def problem(**options: object) -> po.Joint:
    return dataclasses.replace(regression(FLOAT64), likelihood=Gaussian(0.3), **options)


@dataclasses.dataclass(frozen=True)
class Positive(Prior):
    """Exponential: no density below zero."""

    def log_prob(self, theta: Tensor) -> Tensor:
        return torch.where(theta < 0, -torch.inf, -theta).sum(-1)

    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        return -key.uniform(shape, like.dtype, like.device).log()

    def variance(self, like: Tensor) -> Tensor:
        return torch.ones_like(like)

    def precision(self, theta: Tensor) -> Tensor:
        return torch.zeros_like(theta)

    @property
    def has_cross_entropy(self) -> bool:
        return False

    def cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        raise TypeError("infinite")


NO_DENSITY = r"at step 1 .*KL to the prior is not finite.*start=.*take a prior"


def test_a_prior_without_density_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=f"{NO_DENSITY}.*with checkpoint=") as caught:
        po.infer(MeanField(steps=5), problem(prior=Positive()), numbers(FLOAT64))
    assert (caught.value.step, caught.value.tensor, caught.value.stored) == (1, "the KL to the prior", None)
    far = problem().initial()
    far[:12] = 1e200  # whose squares overflow; the outputs saturate
    with pytest.raises(Diverged, match=f"{NO_DENSITY}.*No state is in '.*run' yet") as caught:
        po.infer(MeanField(steps=5), problem(), numbers(FLOAT64), start=far, checkpoint=tmp_path / "run")
    assert (caught.value.step, caught.value.stored) == (1, None)
    # a GPU is looked at after the last step, when the weights have moved by what is not finite
    seen_late = problem().device.type == "cuda"
    assert caught.value.tensor == ("0.weight" if seen_late else "optimizer.second of 0.weight")
    with pytest.raises(ValueError, match=r"must be finite. Got NaN or infinity in '0.weight'"):
        po.infer(MeanField(steps=5), problem(), numbers(FLOAT64), start=problem().initial() / 0.0)


PRIORS = [
    Normal(0.7),
    Laplace(0.5),
    StudentT(4.0, 0.5),
    Cauchy(0.5),
    Logistic(0.4),
    Horseshoe(0.3),
    GroupLasso(1.5),
    Layerwise({"*.weight": Laplace(0.4), "*": Normal(1.0)}),
]


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64], ids=str)
@pytest.mark.parametrize("prior", PRIORS, ids=lambda prior: type(prior).__name__)
def test_scales_that_underflow_have_a_gradient(prior: Prior, dtype: torch.dtype) -> None:
    """Such a weight acts as a point, at a mean of zero too, and its scale may grow again."""
    joint = dataclasses.replace(classification(dtype), prior=prior)
    mean = joint.initial()
    mean[:2] = 0.0
    log_scale = torch.full_like(mean, -800.0)
    q = Factorised(mean, log_scale.exp(), None)
    assert float(q.scale.max()) == 0.0
    grads = Gradients(torch.zeros_like(mean), torch.zeros_like(mean))
    found = divergence(joint, q, log_scale, Key(0), grads, 1.0)
    for value in (*found, *grads):
        assert bool(torch.isfinite(value).all())


def test_scales_that_underflow_in_a_run_come_back() -> None:
    joint = classification(torch.float32)
    method = MeanField(steps=30, batch_size=None, optimizer=Adam(0.5))
    state = method.init(joint, joint.initial(), Key(0))
    state.parameters[joint.size :] = -110.0
    assert float(state.parameters[joint.size :].exp().max()) == 0.0
    batch = joint.check(po.model.Batch(*labels(torch.float32)))
    for step in range(30):
        state, info = method.step(joint, state, batch, Key(1).fold(step))
        assert all(bool(torch.isfinite(torch.as_tensor(value)).all()) for value in info.values())
    assert bool((state.parameters[joint.size :] > -100.0).all())


@pytest.mark.parametrize(
    ("dtype", "gain"), [(torch.float32, 1e-25), (torch.float32, 1e25), (FLOAT64, 1e-200), (FLOAT64, 1e-160)]
)
def test_scales_too_small_or_large_to_begin_with(dtype: torch.dtype, gain: float) -> None:
    joint = classification(dtype)
    with pytest.raises(ValueError, match=r"initial_scales must give variances that torch.float.*'0.weight' from FanIn"):
        po.infer(MeanField(steps=1, initial_scales=FanIn(gain)), joint, labels(dtype))
    good, _ = po.infer(MeanField(steps=1, initial_scales=FanIn(1e-15)), joint, labels(dtype))
    assert bool((good.variance > 0).all())


class Breaking(nn.Module):
    """Gives outputs until its first weight is above a bound; then the outputs are NaN."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.layer = nn.Linear(3, 1, dtype=FLOAT64)
        with torch.no_grad():
            self.layer.weight.zero_()
            self.layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.where(self.layer.weight[0, 0] < self.bound, 1.0, torch.nan)


def rising() -> tuple[po.Joint, tuple[Tensor, Tensor], MeanField]:
    """A run whose first weight rises by about 0.01 a step, to a bound of 0.1 where the data fit breaks."""
    x = normal(Key(0), 20, 3)
    joint = po.Joint(Breaking(0.1), Gaussian(1.0), Normal(10.0), num_data=20)
    return joint, (x, 5.0 * x[:, :1]), MeanField(steps=50, optimizer=Adam(0.01), initial_scales=FanIn(1e-6))


@pytest.mark.parametrize("every", [1, 4])
def test_a_data_fit_that_breaks_leaves_the_last_good_state(every: int, tmp_path: Path) -> None:
    joint, data, method = rising()
    checkpoint = Checkpoint(tmp_path / "run", steps=every)
    with pytest.raises(Diverged, match=r"The last good state, after step \d+, is in '.*run'") as caught:
        po.infer(method, joint, data, checkpoint=checkpoint)
    error = caught.value
    assert 8 <= error.step <= 14
    assert error.tensor in {"layer.weight", "layer.bias"}
    # The update before the loss broke was good: its state is there if one was stored in every step.
    assert error.stored == (error.step - 1) // every * every
    stored = RunFolder(tmp_path / "run").read("state").tensors
    assert bool(torch.isfinite(stored["state.parameters"]).all())
    with pytest.raises(Diverged) as again:  # taken up there, it breaks in the same place
        po.infer(method, joint, data, checkpoint=checkpoint)
    assert (again.value.step, again.value.stored) == (error.step, error.stored)


def test_without_a_folder_that_is_said() -> None:
    joint, data, method = rising()
    with pytest.raises(Diverged, match=r"No state was stored: with checkpoint= the last good one would be\.$"):
        po.infer(method, joint, data)


def test_a_state_that_no_loss_has_seen_is_not_stored(tmp_path: Path) -> None:
    """An update that is too large breaks the state in the step that is stored; the loss of that step was good."""
    method = MeanField(steps=5, optimizer=SGD(step_size=1e308, momentum=0.0))
    with pytest.raises(Diverged, match=r"not finite after step 1 .*No state is in") as caught:
        po.infer(method, problem(), numbers(FLOAT64), checkpoint=Checkpoint(tmp_path, steps=1))
    assert caught.value.tensor in WEIGHTS
    assert caught.value.stored is None


def test_a_loss_that_is_looked_at_late_is_looked_at_before_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the loop itself looks once in a while."""
    joint, data, method = rising()
    monkeypatch.setattr(import_module("posterity.inference.infer"), "check_loss", lambda *_: None)
    with pytest.raises(Diverged, match="The loss is not finite at step") as caught:
        po.infer(method, joint, data, checkpoint=Checkpoint(tmp_path, steps=3))
    assert caught.value.stored == (caught.value.step - 1) // 3 * 3


@pytest.mark.parametrize("source", ["tempering", "start"])
def test_more_members_than_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, members = problem(), 1000
    joint, start = plain, None
    if source == "tempering":
        joint = problem(tempering=po.Tempering.tempered(torch.linspace(0.5, 2.0, members)))
    else:
        start = plain.initial().expand(members, -1)
    alone = po.plan(MeanField(steps=2), plain, numbers(FLOAT64)).total
    monkeypatch.setattr("posterity.inference.memory.device_memory", lambda device: 50 * alone)
    with pytest.raises(ValueError, match=r"MeanField over 21 weights with 1,000 members needs about .*fewer members"):
        po.infer(MeanField(steps=2), joint, numbers(FLOAT64), start=start)
    few = joint.member(0) if start is None else joint
    q, _ = po.infer(MeanField(steps=2), few, numbers(FLOAT64), start=plain.initial().expand(4, -1))
    assert q.num_members == 4


class Branches(nn.Module):
    """vmap refuses it: which way it goes follows from its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, dtype=FLOAT64)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        return outputs if float(self.layer.weight.detach().sum()) > 0 else 2.0 * outputs


@pytest.mark.parametrize("estimator", [WeightSampling(2), LocalReparameterisation(), Flipout()], ids=repr)
def test_a_module_that_vmap_rejects_goes_in_a_loop_and_that_is_said_once(
    estimator: Estimator, caplog: pytest.LogCaptureFixture
) -> None:
    joint = po.Joint(Branches(), Gaussian(0.5), Normal(1.0), num_data=20)
    start = 0.5 * normal(Key(3), 3, 4)
    method = MeanField(steps=6, batch_size=5, estimator=estimator)
    together, trace = po.infer(method, joint, numbers(FLOAT64), start=start)
    said = [text for text in caplog.messages if "members run one after the other because vmap refused" in text]
    assert len(said) == (1 if isinstance(estimator, WeightSampling) else 0)  # the others have always gone in a loop
    for index in range(3):
        alone, alone_trace = po.infer(method, joint, numbers(FLOAT64), start=start[index])
        torch.testing.assert_close(together.member(index).mean, alone.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(together.member(index).variance, alone.variance, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trace["loss"][:, index], alone_trace["loss"], rtol=1e-10, atol=1e-10)
