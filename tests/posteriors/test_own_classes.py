"""Posteriors whose likelihood or prior is the user's own class are saved, and loaded with the object handed again."""

import logging
from dataclasses import dataclass, field, replace

import pytest
import torch
from contracts.cases import inputs, network, numbers
from contracts.test_methods import same_bits
from killedruns import KillAfter, KilledError
from opaqueprior import Opaque
from torch import Tensor, nn

import posterity as po
from posterity.errors import BadFolder
from posterity.inference import Checkpoint
from posterity.likelihoods import Custom, Gaussian, Likelihood, StudentT
from posterity.methods import MAP, Ensemble, Laplace
from posterity.methods.parts import scales
from posterity.priors import Layerwise, Normal
from posterity.storage import RunFolder

FLOAT64 = torch.float64


@dataclass(frozen=True, eq=False)
class Rounded(Likelihood):
    """Gaussian noise under another name, with fields of several kinds."""

    scale: Tensor
    width: float = 1.0
    words: tuple[str, ...] = ("a", "b")
    link: str = "identity"
    function: object = field(default=abs)

    @property
    def _noise(self) -> Gaussian:
        return Gaussian(float(self.scale[0]))

    def check(self, outputs, targets):
        return self._noise.check(outputs, targets)

    def log_prob(self, outputs, targets):
        return self._noise.log_prob(outputs, targets)

    def sample(self, outputs, key):
        return self._noise.sample(outputs, key)

    def mean(self, outputs):
        return outputs

    def variance(self, outputs):
        return self._noise.variance(outputs)

    def output_hessian(self, outputs, targets):
        return self._noise.output_hessian(outputs, targets)

    def output_fisher(self, outputs, event_dims=None):
        return self._noise.output_fisher(outputs, event_dims)


class Plain(Opaque):
    """A prior that is no dataclass of its own, with an attribute that has no JSON."""

    def __init__(self, inner):
        super().__init__(inner)
        vars(self)["table"] = {1, 2}


def log_density(outputs, targets):
    return -(targets - outputs).abs().sum(-1)


def noise(scale=0.3, **options):
    return Rounded(torch.tensor([scale, 1.0], dtype=FLOAT64), **options)


def net():
    return network([3, 4, 1], FLOAT64)


def joint(likelihood, prior):
    return po.Joint(net(), likelihood, prior, num_data=20)


OWN = {
    "likelihood": (noise, lambda: Normal(1.0), ("likelihood",)),
    "prior": (lambda: Gaussian(0.3), lambda: Opaque(Normal(1.0)), ("prior",)),
    "both": (noise, lambda: Opaque(Normal(1.0)), ("likelihood", "prior")),
    "part of a prior": (
        noise,
        lambda: Layerwise({"0.*": Opaque(Normal(2.0)), "*": Normal(1.0)}),
        ("likelihood", "prior"),
    ),
    "functions": (
        lambda: Custom(log_density, mean_function=torch.abs),
        lambda: Plain(Normal(1.0)),
        ("likelihood", "prior"),
    ),
}


@pytest.mark.parametrize("case", OWN.values(), ids=OWN.keys())
@pytest.mark.parametrize("members", [1, 2])
def test_what_is_handed_again_comes_back(case, members, tmp_path):
    likelihood, prior, names = case
    fit = MAP(steps=3)
    q, _ = po.infer(fit if members == 1 else Ensemble(fit, members), joint(likelihood(), prior()), numbers(FLOAT64))
    q.save(tmp_path)
    given = {"likelihood": likelihood(), "prior": prior()}
    loaded = po.load(tmp_path, net(), **{name: given[name] for name in names})
    x, y = numbers(FLOAT64)
    off = 0.0 if x.device.type == "cpu" else 1e-12  # a GPU's products round by where members lie in memory
    torch.testing.assert_close(loaded.predict(x).log_prob(y), q.predict(x).log_prob(y), rtol=off, atol=off)
    assert same_bits(loaded, q)
    assert same_bits(po.load(tmp_path, net(), **given), q)  # what is posterity's may be handed as well
    for name in names:
        others = {other: given[other] for other in names if other != name}
        with pytest.raises(BadFolder, match=rf"Its {name} is a \w+, of which.*load\(path, network, {name}=\w+\(\.\.\."):
            po.load(tmp_path, net(), **others)


DIFFERENT = {
    "a tensor": (
        {"likelihood": noise(0.4)},
        r"likelihood.scale was tensor\(2,\) \[0.3, 1.0\] and here is .*\[0.4, 1.0\]",
    ),
    "a number": ({"likelihood": noise(width=2.0)}, r"likelihood.width was 1.0 and here is 2.0"),
    "a tuple": ({"likelihood": noise(words=("a", "c"))}, r"likelihood.words\[1\] was 'b' and here is 'c'"),
    "a function": ({"likelihood": noise(function=min)}, r"likelihood.function.* was 'abs' and here is 'min'"),
    "a class": (
        {"likelihood": Gaussian(0.3)},
        r"likelihood given is not the stored one: likelihood was Rounded and here",
    ),
    "the prior": ({"likelihood": noise(), "prior": Normal(2.0)}, r"prior.scale was 1.0 and here is 2.0"),
}


@pytest.mark.parametrize("case", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_another_object_is_refused(case, tmp_path):
    given, words = case
    q, _ = po.infer(MAP(steps=2), joint(noise(), Normal(1.0)), numbers(FLOAT64))
    q.save(tmp_path)
    with pytest.raises(BadFolder, match=words) as caught:
        po.load(tmp_path, net(), **given)
    assert "\n" not in str(caught.value)


def test_another_class_is_named(tmp_path):
    q, _ = po.infer(MAP(steps=2), joint(Gaussian(0.3), Normal(1.0)), numbers(FLOAT64))
    q.save(tmp_path)
    with pytest.raises(BadFolder, match=r"likelihood was 'likelihoods.Gaussian' and here is 'likelihoods.StudentT'"):
        po.load(tmp_path, net(), likelihood=StudentT())


def test_what_cannot_be_compared_is_said(tmp_path, caplog):
    q, _ = po.infer(MAP(steps=2), joint(noise(), Opaque(Normal(1.0))), numbers(FLOAT64))
    q.save(tmp_path)
    with caplog.at_level(logging.WARNING, "posterity"):
        po.load(tmp_path, net(), likelihood=noise(), prior=Opaque(Normal(1.0)))
    (said,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("load")]
    assert said == "load: likelihood.function cannot be compared with what the folder was fitted with."


def test_a_run_with_own_classes_resumes_and_keeps_its_chosen_scales(monkeypatch, tmp_path):
    monkeypatch.setattr(scales, "STEPS", 30)
    monkeypatch.setattr(scales, "ROUNDS", 2)
    x, y = numbers(FLOAT64)
    problem = joint(noise(), Normal())
    checkpoint = Checkpoint(tmp_path, steps=3)
    method = MAP(steps=9, batch_size=6)
    whole, _ = po.infer(method, problem, (x, y))
    with pytest.raises(KilledError):
        po.infer(method, problem, (x, y), checkpoint=checkpoint, callbacks=[KillAfter(6)])
    resumed, _ = po.infer(method, joint(noise(), Normal()), (x, y), checkpoint=checkpoint)
    assert same_bits(resumed, whole)
    with pytest.raises(BadFolder, match="its joint differs"):
        po.infer(method, joint(noise(0.4), Normal()), (x, y), checkpoint=checkpoint)


def test_wrong_kinds_are_refused_and_densities_have_neither(tmp_path):
    q, _ = po.infer(MAP(steps=2), joint(noise(), Normal(1.0)), numbers(FLOAT64))
    q.save(tmp_path / "net")
    with pytest.raises(TypeError, match=r"load: likelihood must be a Likelihood. Got 3"):
        po.load(tmp_path / "net", net(), likelihood=3)
    with pytest.raises(TypeError, match=r"load: prior must be a Prior. Got Gaussian"):
        po.load(tmp_path / "net", net(), prior=Gaussian(1.0))
    density = po.Density(lambda a: -a.square().sum(), {"a": (2,)}, dtype=FLOAT64)
    po.infer(MAP(steps=2), density, None)[0].save(tmp_path / "density")
    with pytest.raises(BadFolder, match="of a Density, which has no prior"):
        po.load(tmp_path / "density", density, prior=Normal(1.0))


def test_laplace_of_an_own_likelihood_comes_back(tmp_path):
    q, _ = po.infer(Laplace(tuning=None), joint(noise(), Normal(1.0)), numbers(FLOAT64))
    q.save(tmp_path)
    loaded = po.load(tmp_path, net(), likelihood=noise())
    x = inputs(FLOAT64)
    assert torch.equal(loaded.output_moments(x)[1], q.output_moments(x)[1])
    plain, _ = po.infer(Laplace(tuning=None), joint(Gaussian(0.3), Normal(1.0)), numbers(FLOAT64))
    assert torch.allclose(loaded.output_moments(x)[1], plain.output_moments(x)[1])
    part = RunFolder(tmp_path).read("posterior")
    assert part.config["joint"]["likelihood"]["own"] == "Rounded"
    assert isinstance(replace(loaded.joint, num_data=3).network.module, nn.Module)
