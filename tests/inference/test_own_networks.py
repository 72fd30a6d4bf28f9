"""Networks that people bring, under every method: masks in buffers, writes into the inputs, random draws."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity as po
from posterity.curvature import Diagonal, Kronecker
from posterity.methods import HMC, MAP, NUTS, SGHMC, SGLD, SWAG, Ensemble, Laplace, MCDropout, MeanField
from posterity.methods.parts.gradients import LocalReparameterisation
from posterity.model import side_effects

FLOAT64 = torch.float64
X = torch.linspace(-1.0, 1.0, 24, dtype=FLOAT64).view(12, 2).sin() * 2
Y = (X.sum(-1) > 0.1).long()

METHODS = {
    "MAP": MAP(steps=3, batch_size=4),
    "MeanField": MeanField(steps=3, batch_size=4),
    "local reparameterisation": MeanField(steps=3, batch_size=None, estimator=LocalReparameterisation()),
    "Laplace": Laplace(tuning=None),
    "Kronecker Laplace": Laplace(structure=Kronecker(), tuning=None),
    "diagonal Laplace": Laplace(structure=Diagonal(), tuning=None),
    "Ensemble": Ensemble(MAP(steps=3, batch_size=4), size=2),
    "Ensemble of Laplace": Ensemble(Laplace(tuning=None), size=2),
    "SWAG": SWAG(MAP(steps=4, batch_size=4), every=1, rank=2),
    "SGHMC": SGHMC(chains=2, draws=3, warmup=1, step_size=1e-2, batch_size=4),
    "SGLD": SGLD(chains=1, draws=2, warmup=1, batch_size=4),
    "NUTS": NUTS(chains=2, draws=2, warmup=2),
    "HMC": HMC(chains=1, draws=2, warmup=2, steps=2),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


class Masked(nn.Module):
    """Scores of positions under a causal mask, with integer and boolean buffers, and batch norm if wanted."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf, dtype=FLOAT64).triu(1))
        self.register_buffer("order", torch.tensor([1, 0]))
        self.register_buffer("used", torch.tensor([True, False]))
        self.register_buffer("missing", torch.tensor([torch.nan], dtype=FLOAT64))
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2) if norm else nn.Tanh())
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)[:, self.order]
        scores = hidden.unsqueeze(2) * hidden.unsqueeze(1) + self.mask
        return self.head((scores.softmax(-1) @ hidden.unsqueeze(2)).squeeze(2)).where(self.used, 0.0)


def joint(module: nn.Module) -> po.Joint:
    return po.Joint(module.double(), po.likelihoods.Categorical(), po.priors.Normal(1.0), len(X))


def fit(method, module: nn.Module, data=None, **options):
    return po.infer(method, joint(module), (X, Y) if data is None else data, progress=False, **options)[0]


def made(kind: type[nn.Module], *arguments: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*arguments)


@every_method
@pytest.mark.parametrize("norm", [False, True])
def test_buffers_that_no_run_changes_are_not_judged(method, norm: bool, tmp_path) -> None:
    if norm and isinstance(method, (NUTS, HMC)):
        pytest.skip("batch norm ties the rows together")
    module = made(Masked, norm)
    q = fit(method, module)
    probs = q.predict(X, draws=4).probs
    assert torch.isfinite(probs).all()
    q.save(tmp_path / "q")
    assert torch.equal(po.load(tmp_path / "q", module).predict(X, draws=4).probs, probs)
    constant = {name for name in q.buffers if "running" not in name and "tracked" not in name}
    assert not constant  # nor are they copied for each member


@pytest.mark.parametrize("name", ["MAP", "MeanField", "Ensemble", "SWAG", "SGHMC", "NUTS"])
def test_runs_with_masks_resume(name: str, tmp_path) -> None:
    class Stop(po.inference.Callback):
        def after_step(self, run) -> None:
            if run.step == 2:
                raise KeyboardInterrupt

    method, where = METHODS[name], tmp_path / "run"
    norm, stored = name != "NUTS", po.inference.Checkpoint(where, steps=1)
    whole = fit(method, made(Masked, norm))
    with pytest.raises(KeyboardInterrupt):
        fit(method, made(Masked, norm), checkpoint=stored, callbacks=[Stop()])
    resumed = fit(method, made(Masked, norm), checkpoint=stored)
    tensors, again = (q.parts()["posterior"].tensors for q in (whole, resumed))
    torch.testing.assert_close(tensors, again, rtol=0.0, atol=0.0, equal_nan=True)


def test_statistics_that_a_run_spoils_are_judged() -> None:
    module = made(Masked, True).double()
    module.body[1].running_var.fill_(torch.inf)
    with pytest.raises(po.errors.Diverged, match="running_var"):
        fit(MAP(steps=2, batch_size=4), module)


def test_constant_buffers_of_a_start_are_taken() -> None:
    first = fit(METHODS["MAP"], made(Masked))
    other = made(Masked)
    other.mask.zero_()
    second = fit(MAP(steps=1, batch_size=None), other, start=first)
    assert torch.equal(second.joint.network.buffers["mask"], made(Masked).mask)


WRITES = {
    "minus": lambda x: x.sub_(0.3),
    "item": lambda x: x.__setitem__((slice(None), 0), 0.0),
    "clamp": lambda x: x.clamp_(-0.5, 0.5),
    "relu": lambda x: F.relu(x, inplace=True),
    "data": lambda x: x.data.mul_(0.5),
    "view": lambda x: x.view(-1).add_(1.0),
    "resized rows": lambda x: x[1:].mul_(2.0),
}


class Writes(nn.Module):
    """Writes into its input, unless it is told to copy first."""

    def __init__(self, write, copies: bool = False) -> None:
        super().__init__()
        self.write, self.copies = write, copies
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if self.copies else x
        self.write(x)
        return self.layers(x)


@every_method
def test_a_forward_that_writes_into_its_input_gets_a_copy(method, caplog) -> None:
    rows, labels = X.clone(), Y.clone()
    with caplog.at_level(logging.INFO, "posterity"):
        q = fit(method, made(Writes, WRITES["minus"]), (rows, labels))
        first, second = (q.predict(rows, draws=4).probs for _ in range(2))
    assert caplog.text.count("writes into its inputs") == 1
    assert torch.equal(rows, X)
    assert torch.equal(first, second)
    wanted = fit(method, made(Writes, WRITES["minus"], True)).predict(X, draws=4).probs
    torch.testing.assert_close(first, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_way_of_writing_is_seen(write) -> None:
    rows = X.clone()
    q = fit(MAP(steps=3, batch_size=None), made(Writes, write), (rows, Y))
    wanted = fit(MAP(steps=3, batch_size=None), made(Writes, write, True))
    assert torch.equal(q.predict(rows).probs, wanted.predict(X).probs)
    assert torch.equal(rows, X)


class WritesNamed(nn.Module):
    """Writes into one of several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        right *= 2.0
        return self.layer(left + right)


@pytest.mark.parametrize("kind", [dict, tuple])
def test_writes_into_one_of_several_inputs_are_seen(kind) -> None:
    left, right = X.clone(), X.flip(0).clone()
    rows = {"left": left, "right": right} if kind is dict else (left, right)
    q = fit(MAP(steps=2, batch_size=None), WritesNamed(), (rows, Y))
    assert torch.equal(q.predict(rows).probs, q.predict(rows).probs)
    assert torch.equal(left, X)
    assert torch.equal(right, X.flip(0))


def test_a_write_that_the_first_call_did_not_show_is_refused() -> None:
    class Sometimes(Writes):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.sub_(0.3) if len(x) > 2 else x)

    with pytest.raises(ValueError, match=r"wrote into its inputs in this call.*x\.clone\(\)"):
        fit(MAP(steps=2, batch_size=None), Sometimes(None), (X.clone(), Y))


def test_nothing_is_copied_for_a_network_that_does_not_write() -> None:
    seen: list[int] = []

    class Sees(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.data_ptr())
            return super().forward(x)

    network = po.model.Network(Sees(2, 2).double())
    network.outputs(network.initial, X)
    assert seen[-1] == X.data_ptr()
    network.run(network.views(network.initial), X, train=True)
    assert seen[-1] == X.data_ptr()


def test_inference_tensors_are_copied() -> None:
    q = fit(MAP(steps=2, batch_size=None), made(Writes, WRITES["minus"]))
    network = q.joint.network
    with torch.inference_mode():
        rows = X.clone()
        first = network.outputs(q.theta, rows)
        assert torch.equal(rows, X)
    torch.testing.assert_close(first, network.outputs(q.theta, X).detach())


class Counts(nn.Module):
    """Writes into a buffer in evaluation mode, on which its outputs depend."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=FLOAT64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        return self.layer(x) * self.calls


def test_written_buffers_begin_every_call_at_their_first_values(caplog) -> None:
    module = Counts()
    with caplog.at_level(logging.INFO, "posterity"):
        q = fit(Ensemble(MAP(steps=3, batch_size=4), size=2), module)
    assert "writes into its buffers (calls)" in caplog.text
    first = q.predict(X).probs
    assert torch.equal(first, q.predict(X).probs)
    weights = q.sample(1, po.Key(0))[0]
    expected = F.linear(X, weights[:4].view(2, 2), weights[4:])
    torch.testing.assert_close(q.joint.network.outputs(weights, X), expected, rtol=1e-12, atol=1e-12)
    assert float(module.calls) == 0.0


@pytest.mark.parametrize("way", ["clamp_", "data"])
def test_a_module_that_writes_into_its_weights_is_refused(way: str) -> None:
    class Positive(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                if way == "data":
                    self.weight.data = self.weight.data.clamp(min=0.0)
                else:
                    self.weight.clamp_(min=0.0)
            return super().forward(x)

    module = Positive(2, 2)
    nn.init.constant_(module.weight, -0.1)
    with pytest.raises(ValueError, match=r"writes into its own weights \('weight'\).*no function of theta"):
        fit(MAP(steps=2), module)


class Noisy(nn.Module):
    """Changes its input at random in evaluation mode."""

    def __init__(self, noise) -> None:
        super().__init__()
        self.noise = noise
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.noise(x))


NOISES = {
    "normal": lambda x: x + torch.randn_like(x),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "rare dropout": lambda x: F.dropout(x, 1e-3, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.999)),
    "numpy": lambda x: x + float(__import__("numpy").random.rand()),
    "python": lambda x: x if __import__("random").random() < 2.0 else -x,
    "own generator": lambda x: x + torch.rand(x.shape, generator=GENERATOR, device="cpu").to(x),
}
GENERATOR = torch.Generator("cpu")
DRAWS = r"draws random numbers even in evaluation mode.*torch\.nn\.Dropout under MCDropout.*Augmentation"


@every_method
@pytest.mark.parametrize("noise", ["normal", "dropout"])
def test_a_forward_that_draws_is_refused_by_every_method(method, noise: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=DRAWS):
        fit(method, made(Noisy, NOISES[noise]))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_every_way_of_drawing_is_seen(noise) -> None:
    with pytest.raises(ValueError, match=DRAWS):
        fit(MAP(steps=2), made(Noisy, noise))


def test_a_network_with_a_state_between_calls_is_refused() -> None:
    class Remembers(nn.Linear):
        before = 0.0

        def forward(self, x: Tensor) -> Tensor:
            outputs = super().forward(x) + self.before
            self.before = outputs.mean().detach()
            return outputs

    with pytest.raises(ValueError, match=r"Two calls on the same rows differ.*keeps a state between calls"):
        fit(MAP(steps=2), Remembers(2, 2))


def test_predictions_refuse_a_forward_that_draws(tmp_path) -> None:
    quiet = made(Noisy, lambda x: x)
    fit(MAP(steps=2), quiet).save(tmp_path / "q")
    loaded = po.load(tmp_path / "q", made(Noisy, NOISES["normal"]).double())
    with pytest.raises(ValueError, match=DRAWS):
        loaded.predict(X)


@pytest.mark.parametrize("noise", [lambda x: x, NOISES["dropout"]], ids=["layers", "always on"])
def test_dropout_has_keys_under_monte_carlo_dropout(noise) -> None:
    first, second = (fit(MCDropout(steps=4, batch_size=4), made(Noisy, noise)) for _ in range(2))
    assert torch.equal(first.theta, second.theta)
    assert torch.equal(first.predict(X, draws=5).probs, second.predict(X, draws=5).probs)


def test_layers_of_dropout_are_no_draws() -> None:
    module = made(Noisy, lambda x: x).double()
    network = po.model.Network(module)
    assert network.side_effects(X) == side_effects.SideEffects(inputs=False)
