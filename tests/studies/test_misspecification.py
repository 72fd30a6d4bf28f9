"""The study of misspecification: its expectations are those of draws, and temperatures err where they should."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

from posterity.inference import infer
from posterity.likelihoods import Gaussian
from posterity.methods import Conjugate
from posterity.model import Joint, Tempering
from posterity.numerics import Key
from posterity.priors import Normal
from posterity_studies.misspecification import models
from posterity_studies.misspecification.figures import draw
from posterity_studies.misspecification.study import Study, run, temperatures
from posterity_studies.options import Settings

pytestmark = pytest.mark.cpu
KINDS = (models.WELL, models.CLEANER, models.NOISIER)
TEMPERINGS = (Tempering.bayes(), Tempering.tempered(0.3), Tempering.cold(3.0))


@pytest.fixture(scope="module")
def study() -> Study:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posterity_studies.misspecification.study.TEMPERATURES", (0.1, 10.0, 9))
        patch.setattr(models, "LABELS", 6)
        result = run(Settings(seed=1))
        result.document()
        yield result


def test_claims_hold_and_can_fail(study):
    assert all(study.claims().values())
    wrong = {models.WELL: models.NOISIER, models.CLEANER: models.WELL, models.NOISIER: models.CLEANER}
    turned = replace(study, curves=tuple(replace(own, targets=wrong[own.targets]) for own in study.curves))
    assert not any(turned.claims().values())


@pytest.mark.parametrize("tempering", TEMPERINGS)
def test_the_linear_posterior_is_that_of_the_library(tempering):
    model = models.linear_models(Key(2))[models.WELL]
    targets = Key(3).normal((models.ROWS, 1), torch.float64, "cpu")
    net = torch.nn.Linear(models.INPUTS, 1, bias=False, dtype=torch.float64)
    joint = Joint(net, Gaussian(1.0), Normal(1.0), models.ROWS, tempering=tempering)
    q, _ = infer(Conjugate(), joint, (model.design, targets))
    gain, covariance = model.posterior(tempering)
    predicted = q.predict(model.places)
    variance = torch.einsum("kd,de,ke->k", model.places, covariance, model.places) + 1.0
    torch.testing.assert_close(predicted.mean, model.places @ gain @ targets)
    torch.testing.assert_close(predicted.std.square().squeeze(1), variance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tempering", TEMPERINGS)
def test_the_linear_expectation_is_the_mean_over_data_sets(kind, tempering):
    model, key, draws = models.linear_models(Key(2))[kind], Key(4), 4000
    weights = key.fold("w").normal((draws, models.INPUTS), torch.float64, "cpu")
    noise = key.fold("noise").normal((draws, models.ROWS), torch.float64, "cpu") * model.noise.sqrt()
    new = key.fold("new").normal((draws, models.PLACES), torch.float64, "cpu") * model.new_noise.sqrt()
    gain, covariance = model.posterior(tempering)
    means = (weights @ model.design.mT + noise) @ gain.mT @ model.places.mT
    scales = (torch.einsum("kd,de,ke->k", model.places, covariance, model.places) + 1.0).sqrt()
    values = -torch.distributions.Normal(means, scales).log_prob(weights @ model.places.mT + new).mean(-1)
    assert abs(model.nll(tempering) - float(values.mean())) <= 5.0 * float(values.std()) / draws**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_logistic_expectation_is_the_mean_over_data_sets(kind, monkeypatch):
    monkeypatch.setattr(models, "LABELS", 4)
    model, tempering, key, draws = models.logistic_models()[kind], Tempering.cold(2.0), Key(5), 4000
    weights, prior = models.weight_grid()
    chosen = torch.bucketize(key.fold("w").uniform((draws,), torch.float64, "cpu"), prior.cumsum(0)).clamp(max=300)
    uniform = [
        key.fold(name).uniform((count, draws), torch.float64, "cpu") for name, count in (("rows", 4), ("new", 41))
    ]
    labels, new = (u < truth[:, chosen] for u, truth in zip(uniform, (model.truth, model.new_truth), strict=True))
    signs = torch.where(labels, 1.0, -1.0).double()
    log_post = torch.nn.functional.logsigmoid((signs * model.design[:, None]).mT.unsqueeze(-1) * weights).sum(1)
    posterior = torch.softmax(0.5 * (log_post + prior.log()), -1)  # (S, G)
    probabilities = (posterior @ torch.sigmoid(weights.unsqueeze(1) * model.places)).mT  # (K, S)
    values = -torch.where(new, probabilities, 1.0 - probabilities).log().mean(0)
    assert abs(model.nll(tempering) - float(values.mean())) <= 5.0 * float(values.std()) / draws**0.5


def test_temperatures_have_one_among_them():
    assert 1.0 in temperatures().tolist()


def test_document_and_figure(study, tmp_path):
    document = study.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [row["best_eta"] for row in document["curves"] if row["targets"] == models.WELL] == [1.0, 1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(study, tmp_path / "new") == ["temperature.png"]
    assert (tmp_path / "new" / "temperature.png").read_bytes().startswith(b"\x89PNG")
