"""Posteriors as plain modules: equal to `predict`, and exported to programs that run without the library."""

import subprocess
import sys

import pytest
import torch
from contracts.cases import inputs, labels, numbers
from torch import nn

import posterity as po
from posterity.curvature import Diagonal, Full, Kronecker
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, Probit, StudentT
from posterity.methods import (
    MAP,
    SGLD,
    Ensemble,
    Laplace,
    LastLayer,
    MCDropout,
    MeanField,
    ProbabilisticBackpropagation,
)
from posterity.posteriors import Dropout, Mixture, Samples
from posterity.predictive import from_outputs
from posterity.priors import Normal

FLOAT64 = torch.float64


def net(outputs: int, *, norm: bool = True, rate: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [nn.Linear(3, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh(), nn.Dropout(rate)]
        module = nn.Sequential(*layers, nn.Linear(6, outputs)).double()
        module(torch.randn(50, 3, dtype=FLOAT64))
    return module


def joint(likelihood, outputs, **options) -> po.Joint:
    return po.Joint(net(outputs, **options), likelihood, Normal(1.0), num_data=20)


def fitted(method, likelihood, outputs, **options):
    rows = labels(FLOAT64) if outputs > 1 else numbers(FLOAT64)
    return po.infer(method, joint(likelihood, outputs, **options), rows)[0]


def chains(likelihood, outputs, **options):
    method = SGLD(draws=4, warmup=3, thin=1, chains=2, batch_size=10, step_size=1e-3)
    return fitted(method, likelihood, outputs, **options)


def weighted(likelihood, outputs):
    parts = [fitted(MeanField(steps=3), likelihood, outputs), fitted(MAP(steps=3), likelihood, outputs)]
    return Mixture(parts, torch.tensor([0.75, 0.25]))


KINDS = {
    "point": lambda *problem: fitted(MAP(steps=3), *problem),
    "gaussian": lambda *problem: fitted(MeanField(steps=3), *problem),
    "samples": chains,
    "ensemble": lambda *problem: fitted(Ensemble(MAP(steps=3), 3), *problem),
    "mixture": weighted,
    "dropout": lambda *problem: fitted(MCDropout(steps=3), *problem, rate=0.4),
    "trained elsewhere": lambda noise, outputs: Mixture.of([net(outputs), net(outputs)], noise),
}


def agrees(q, x, predictive, atol=1e-12, **options):
    result = q.module(**options)(x)
    if predictive.classifies:
        wanted = {"probs": "probs", "entropy": "entropy", "mutual_information": "epistemic"}
    else:
        wanted = {"mean": "mean", "std": "std"}
    assert result.keys() == wanted.keys()
    for name, own in wanted.items():
        assert torch.allclose(result[name], getattr(predictive, own), atol=atol, rtol=atol), name
        assert result[name].dtype == getattr(predictive, own).dtype


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("noise", [Gaussian(0.3), Categorical()], ids=str)
def test_the_module_gives_the_predictions_of_the_same_draws(kind, noise):
    q, x = kind(noise, 1 if noise.link == "identity" else 3), inputs(FLOAT64, 7)
    before = x.clone()
    agrees(q, x, q.predict(x, draws=6, seed=3), draws=6, seed=3)
    assert torch.equal(x, before)
    if not isinstance(q, po.posteriors.Point):
        agrees(q, x, q.predict(x, seed=2), seed=2)
    module = q.module(draws=6, seed=3)
    assert torch.equal(module.train()(x)[next(iter(module(x)))], module.eval()(x)[next(iter(module(x)))])


NOISES = {
    "poisson": (Poisson(), 1, numbers(FLOAT64)[1].abs().round()),
    "student": (StudentT(scale=0.5, degrees=5.0), 1, numbers(FLOAT64)[1]),
    "bernoulli": (Bernoulli(), 2, torch.stack([torch.arange(20) % 2, torch.arange(20) % 3 > 1], 1).double()),
    "probit": (Probit(), 1, (torch.arange(20) % 2).double().unsqueeze(1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", NOISES.values(), ids=NOISES.keys())
def test_other_likelihoods(case):
    noise, outputs, targets = case
    q, _ = po.infer(MeanField(steps=3), joint(noise, outputs), (inputs(FLOAT64), targets))
    x = inputs(FLOAT64, 5)
    agrees(q, x, q.predict(x, draws=5), draws=5)


def test_draws_of_chains_have_their_own_noise_and_move_with_the_module():
    noise = Gaussian(1.0, learn=True)
    problem = joint(noise, 1)
    theta = po.Key(0).normal((2, 3, problem.size), FLOAT64)
    q, x = Samples(problem, theta), inputs(FLOAT64, 5)
    agrees(q, x, q.predict(x))
    names = dict(q.module().named_buffers())
    assert names["part.likelihood_scale"].shape == (6, 1, 1)
    single = q.module().float()(x.float())
    assert single["std"].dtype == torch.float32
    assert torch.allclose(single["std"].double(), q.predict(x).std, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("structure", [Full(), Kronecker(), Diagonal()], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_last_layer_has_moments_in_closed_form(structure, bias):
    x = inputs(FLOAT64, 7)
    method = Laplace(structure=structure, subset=LastLayer(), tuning=None)
    for outputs, noise, targets in (
        (2, Gaussian((0.3, 0.7)), numbers(FLOAT64)[1].expand(-1, 2)),
        (3, Categorical(), torch.arange(20) % 3),
        (2, Categorical(), torch.arange(20) % 2),
        (2, Bernoulli(), torch.ones(20, 2, dtype=FLOAT64)),
        (1, Probit(), torch.ones(20, 1, dtype=FLOAT64)),
    ):
        module = nn.Sequential(*net(outputs)[:-1], nn.Linear(6, outputs, bias=bias, dtype=FLOAT64))
        problem = po.Joint(module, noise, Normal(1.0), num_data=20)
        q, _ = po.infer(method, problem, (inputs(FLOAT64), targets))
        predictive, result = q.predict(x), q.module(draws=400, seed=5)(x)
        if noise.link == "identity":
            assert torch.allclose(result["mean"], predictive.mean, atol=1e-12)
            assert torch.allclose(result["std"], predictive.std, atol=1e-11)
            continue
        assert torch.allclose(result["probs"], predictive.probs, atol=1e-11)
        assert torch.allclose(result["entropy"], predictive.entropy, atol=1e-11)
        drawn = from_outputs(noise, q.outputs(x, 400, po.Key(5)))
        assert torch.allclose(result["mutual_information"], drawn.epistemic, atol=1e-11)
        assert torch.allclose(result["mutual_information"], predictive.epistemic, atol=0.03)


class Pixels(nn.Module):
    """Classes at positions from a convolution, which has no closed form here."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 3, 1, dtype=FLOAT64)

    def forward(self, x):
        return self.layer(x.unsqueeze(1))


@pytest.mark.filterwarnings("ignore")
def test_a_convolution_at_the_end_is_drawn():
    x, y = inputs(FLOAT64), torch.zeros(20, 3, dtype=torch.int64)
    problem = po.Joint(Pixels(), Categorical(positions=1), Normal(1.0), num_data=20)
    q, _ = po.infer(Laplace(subset=LastLayer(), tuning=None), problem, (x, y))
    drawn = from_outputs(problem.likelihood, q.outputs(x, 6, po.Key(1)))
    result = q.module(draws=6, seed=1)(x)
    assert torch.allclose(result["probs"], drawn.probs, atol=1e-12)
    assert torch.allclose(result["mutual_information"], drawn.epistemic, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_propagated_moments():
    module = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    problem = po.Joint(module, Gaussian(0.3), Normal(1.0), num_data=20)
    q, _ = po.infer(ProbabilisticBackpropagation(passes=1), problem, numbers(FLOAT64))
    agrees(q, inputs(FLOAT64, 5), q.predict(inputs(FLOAT64, 5)))


class Scaled(nn.Module):
    """Outputs that are not those of the last layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, dtype=FLOAT64)

    def forward(self, x):
        return self.layer(x).exp()


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_module_says_why_and_what_to_do():
    x = inputs(FLOAT64)
    whole = fitted(Laplace(tuning=None), Gaussian(0.3), 1)
    with pytest.raises(
        TypeError, match=r"over a last linear.*Use Laplace\(subset=LastLayer\(\)\), or q.gaussian.module"
    ):
        whole.module()
    gaussian = whole.gaussian
    agrees(gaussian, x, gaussian.predict(x, draws=5), draws=5)
    problem = po.Joint(Scaled(), Gaussian(0.3), Normal(1.0), num_data=20)
    bent, _ = po.infer(Laplace(subset=po.methods.Matching("layer.*"), tuning=None), problem, numbers(FLOAT64))
    with pytest.raises(TypeError, match=r"must be those of the last layer 'layer' itself.*q.gaussian.module"):
        bent.module()(x)
    each = Dropout.of(net(3, rate=0.3), Categorical(), one_mask_a_draw=False, example=x)
    with pytest.raises(TypeError, match="a mask for each row is not fixed"):
        each.module()
    with pytest.raises(TypeError, match="with an example row of inputs"):
        Dropout.of(net(3, rate=0.3), Categorical()).module()
    with pytest.raises(ValueError, match="module: draws must be a positive whole number"):
        whole.gaussian.module(draws=0)
    density = po.Density(lambda a: -a.square().sum(), {"a": (2,)})
    with pytest.raises(TypeError, match="a Density has no module"):
        po.infer(MeanField(steps=2), density, None)[0].module()


class Attention(nn.Module):
    """Two inputs by name, one of them changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True, dtype=FLOAT64)
        self.out = nn.Linear(4, 3, dtype=FLOAT64)

    def forward(self, tokens, shift):
        tokens += shift.unsqueeze(1)
        return self.out(self.attention(tokens, tokens, tokens)[0].mean(1))


EXPORTED = {
    "gaussian": lambda: fitted(MeanField(steps=3), Gaussian(0.3), 1),
    "ensemble": lambda: fitted(Ensemble(MAP(steps=3), 2), Categorical(), 3),
    "chains": lambda: chains(Gaussian(0.3, learn=True), 1),
    "last layer": lambda: fitted(Laplace(subset=LastLayer(), tuning=None), Categorical(), 3),
    "attention": lambda: Dropout.of(Attention(), Categorical(), example=named(2)),
}

ALONE = """
import sys, torch
sys.modules["posterity"] = None
for name in sys.argv[1:]:
    given, wanted = torch.load(f"{name}.rows", weights_only=True)
    for rows, predictions in zip(given, wanted):
        result = torch.export.load(f"{name}.pt2").module()(rows)
        assert result.keys() == predictions.keys()
        for key, value in predictions.items():
            assert torch.allclose(result[key], value, atol=1e-12), (name, key)
assert not [name for name in sys.modules if name.startswith("posterity.")]
print("alone")
"""


def named(rows: int):
    return {"tokens": po.Key(2).normal((rows, 5, 4), FLOAT64), "shift": po.Key(3).normal((rows, 4), FLOAT64)}


@pytest.mark.filterwarnings("ignore")
def test_exported_programs_run_without_the_library_at_any_batch_size(tmp_path):
    rows = torch.export.Dim("rows", min=2)
    for name, make in EXPORTED.items():
        q, form = make(), named if name == "attention" else lambda count: inputs(FLOAT64, count)
        module = q.module(draws=4, seed=1)
        shapes = {"tokens": {0: rows}, "shift": {0: rows}} if name == "attention" else {0: rows}
        program = torch.export.export(module, (form(3),), dynamic_shapes=(shapes,))
        torch.export.save(program, tmp_path / f"{name}.pt2")
        given = [form(3), form(11)]
        torch.save((given, [module(each) for each in given]), tmp_path / f"{name}.rows")
        if name != "last layer":
            agrees(q, form(11), q.predict(form(11), draws=4, seed=1), draws=4, seed=1)
    command = [sys.executable, "-W", "ignore", "-c", ALONE, *EXPORTED]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert outcome.stdout.strip() == "alone", outcome.stderr
