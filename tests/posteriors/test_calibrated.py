"""Calibrated posteriors: what `predict` returns, what stays, and what comes back from disk."""

import drawn
import pytest
import torch
from contracts.cases import classification, inputs, labels, network, regression
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.errors import BadData, BadFolder
from posterity.methods import MAP, Laplace
from posterity.metrics import accuracy, negative_log_likelihood
from posterity.numerics.random import Key
from posterity.posteriors import Calibrated, Dropout, Mixture, Point, Samples, with_targets
from posterity.predictive import ConformalIntervals, ConformalSets, TemperatureScaling, VectorScaling
from posterity.storage import Part, RunFolder

FLOAT64 = torch.float64
HELD_OUT = inputs(FLOAT64, 40), (drawn.uniform(Key(5), 40) > 0.5).long()


def laplace():
    q, _ = po.infer(Laplace(tuning=None), classification(FLOAT64), labels(FLOAT64))
    return q


def mixture():
    joint = classification(FLOAT64)
    return Mixture([Point(joint, theta) for theta in 3.0 * drawn.normal(Key(1), 3, joint.num_weights)])


def samples():
    joint = classification(FLOAT64)
    return Samples(joint, 3.0 * drawn.normal(Key(1), 2, 4, joint.num_weights))


@pytest.mark.parametrize("scaling", [TemperatureScaling, VectorScaling])
@pytest.mark.parametrize("posterior", [laplace, mixture, samples])
def test_predictions_are_scaled_and_come_back_from_disk(posterior, scaling, tmp_path):
    q = posterior()
    calibrated = Calibrated.fit(q, HELD_OUT, scaling)
    x = inputs(FLOAT64, 7)
    before = q.predict(x)
    after = calibrated.predict(x)
    own = scaling.fit(q.predict(HELD_OUT[0]), HELD_OUT[1])
    assert torch.allclose(after.probs, own.apply(before).probs, rtol=0, atol=1e-12)
    assert not torch.allclose(after.probs, before.probs)
    nll = [negative_log_likelihood(*with_targets(p, HELD_OUT)) for p in (calibrated, q)]
    assert nll[0] < nll[1]
    assert torch.equal(calibrated.functions(3)(x), q.functions(3)(x))
    assert torch.equal(calibrated.sample(2), q.sample(2))
    calibrated.save(tmp_path)
    loaded = po.load(tmp_path, network([3, 4, 2], FLOAT64))
    assert isinstance(loaded, Calibrated)
    assert type(loaded.posterior) is type(q)
    assert torch.equal(loaded.predict(x).probs, after.probs)
    q.save(tmp_path)  # what was calibrated is replaced
    assert torch.equal(po.load(tmp_path, network([3, 4, 2], FLOAT64)).predict(x).probs, before.probs)


def test_rows_go_in_chunks_and_a_run_starts_from_the_posterior_beneath():
    q = laplace()
    calibrated = Calibrated(q, TemperatureScaling(2.0))
    x = inputs(FLOAT64, 9)
    assert torch.allclose(calibrated.predict(x, batch_size=4).probs, calibrated.predict(x).probs)
    first, again = (
        po.infer(MAP(steps=2), classification(FLOAT64), labels(FLOAT64), start=start)[0] for start in (q, calibrated)
    )
    assert torch.equal(first.point(), again.point())
    assert calibrated.as_gaussian() is q.gaussian
    assert "scaling: TemperatureScaling(temperature=2.0)" in repr(calibrated)
    assert bool((po.acquisition.bald(calibrated, x) <= q.predict(x).epistemic + 1e-12).all())


def test_targets_stay_beside_their_rows_whatever_the_order_of_the_loader():
    q = laplace()
    order = torch.Generator(torch.get_default_device())
    loader = DataLoader(TensorDataset(*HELD_OUT), batch_size=7, shuffle=True, generator=order)
    pred, y = with_targets(q, loader)
    assert accuracy(pred, y) == accuracy(q.predict(HELD_OUT[0]), HELD_OUT[1])
    assert negative_log_likelihood(pred, y) == pytest.approx(
        negative_log_likelihood(q.predict(HELD_OUT[0]), HELD_OUT[1]), abs=1e-12
    )
    assert not torch.equal(y, HELD_OUT[1])


def test_conformal_sets_and_intervals_of_a_posterior_in_two_lines():
    q = Calibrated.fit(laplace(), HELD_OUT)
    sets = ConformalSets.fit(*with_targets(q, DataLoader(TensorDataset(*HELD_OUT), batch_size=7)))
    members = sets.sets(q.predict(inputs(FLOAT64, 5)), 0.8)
    assert torch.equal(
        members, ConformalSets.fit(q.predict(HELD_OUT[0]), HELD_OUT[1]).sets(q.predict(inputs(FLOAT64, 5)), 0.8)
    )
    numbers, _ = po.infer(
        Laplace(tuning=None), regression(FLOAT64), po.as_data((inputs(FLOAT64, 20), inputs(FLOAT64, 20)[:, :1]))
    )
    rows = inputs(FLOAT64, 30), drawn.normal(Key(3), 30, 1)
    intervals = ConformalIntervals.fit(*with_targets(numbers, rows))
    lower, upper = intervals.interval(numbers.predict(rows[0]), 0.8)
    assert float(((rows[1] >= lower) & (rows[1] <= upper)).double().mean()) >= 0.8


def test_what_cannot_be_calibrated_is_refused(tmp_path):
    q = laplace()
    with pytest.raises(TypeError, match=r"scaling must be a class, such as VectorScaling\. Got TemperatureScaling"):
        Calibrated.fit(q, HELD_OUT, TemperatureScaling(2.0))
    with pytest.raises(TypeError, match="must be a Scaling"):
        Calibrated(q, 2.0)
    calibrated = Calibrated(q, TemperatureScaling(2.0))
    with pytest.raises(TypeError, match=r"not calibrated\. Got Calibrated"):
        Calibrated(calibrated, TemperatureScaling(2.0))
    with pytest.raises(TypeError, match="calibrate the mixture"):
        Mixture([calibrated, calibrated])
    with pytest.raises(BadData, match="needs rows with targets"):
        with_targets(q, None)
    numbers = Point(joint := regression(FLOAT64), torch.zeros(joint.num_weights, dtype=FLOAT64))
    with pytest.raises(TypeError, match="needs a predictive of classes"):
        Calibrated.fit(numbers, (inputs(FLOAT64, 4), drawn.normal(Key(0), 4, 1)))
    part = calibrated.parts()["posterior"]
    for config, message in (
        ({**part.config, "more": 1}, "calibrated posterior"),
        ({**part.config, "scaling": 3}, "must hold a scaling"),
        ({"scaling": part.config["scaling"], "of": part.config}, "must hold a scaling and a posterior"),
    ):
        RunFolder(tmp_path).commit({"posterior": Part(config, part.tensors)})
        with pytest.raises(BadFolder, match=message):
            po.load(tmp_path, network([3, 4, 2], FLOAT64))


def test_dropout_is_calibrated_as_any_other():
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)).double()
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(), num_data=20)
    q = Calibrated.fit(Dropout(joint, 30.0 * drawn.normal(Key(1), joint.num_weights)), HELD_OUT)
    assert q.scaling.temperature > 1.0


@pytest.mark.parametrize("scaling", [TemperatureScaling, VectorScaling])
@pytest.mark.parametrize("posterior", [mixture, samples])
def test_a_module_has_the_scaled_probabilities_and_is_exported(posterior, scaling):
    calibrated, x = Calibrated.fit(posterior(), HELD_OUT, scaling), inputs(FLOAT64, 7)
    wanted, module = calibrated.predict(x), calibrated.module()
    rows = ({0: torch.export.Dim("rows")},)
    for made in (module(x), torch.export.export(module, (x[:3],), dynamic_shapes=rows).module()(x)):
        assert torch.allclose(made["probs"], wanted.probs, rtol=0, atol=1e-12)
        assert torch.allclose(made["entropy"], torch.special.entr(wanted.probs).sum(1), rtol=0, atol=1e-12)
        assert torch.allclose(made["mutual_information"], wanted.epistemic, rtol=0, atol=1e-12)
