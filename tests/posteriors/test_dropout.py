"""The posterior of dropout: masks as draws, chunks, storage, and all masks where they are few."""

import dataclasses

import pytest
import torch
from drawn import generator_states, normal
from torch import nn

import posterity as po
from posterity.likelihoods import Categorical, Gaussian
from posterity.metrics import accuracy, negative_log_likelihood
from posterity.model import dropout_sites as mask_draws
from posterity.model.dropout_sites import dropout_sites, mask_numbers, outputs_under
from posterity.networks import MLP
from posterity.numerics import Key
from posterity.posteriors import Dropout, enumerated
from posterity.priors import Normal


def posterior(net: nn.Module | None = None, likelihood: po.likelihoods.Likelihood | None = None, row=2) -> Dropout:
    if net is None:
        torch.manual_seed(0)
        net = MLP([2, 6, 2], dropout=0.4)
    joint = po.Joint(net, Categorical() if likelihood is None else likelihood, Normal(), num_data=10)
    shape = (row,) if isinstance(row, int) else row
    return Dropout(joint, joint.initial(), example=torch.zeros(1, *shape, dtype=joint.dtype))


X = normal(Key(0), 11, 2, dtype=torch.float32)


def test_chunks_of_rows_see_the_same_masks():
    q = posterior()
    whole, parts = q.predict(X, draws=20), q.predict(X, draws=20, batch_size=4)
    torch.testing.assert_close(whole.probs, parts.probs)
    assert not torch.equal(whole.probs, q.predict(X, draws=20, seed=1).probs)


@pytest.mark.parametrize("one_mask_a_draw", [True, False])
def test_saved_and_loaded(one_mask_a_draw, tmp_path):
    q = dataclasses.replace(posterior(), one_mask_a_draw=one_mask_a_draw)
    q.save(tmp_path / "run")
    loaded = po.load(tmp_path / "run", MLP([2, 6, 2], dropout=0.4))
    assert isinstance(loaded, Dropout)
    assert loaded.one_mask_a_draw == one_mask_a_draw
    assert torch.equal(loaded.predict(X).probs, q.predict(X).probs)
    assert torch.equal(loaded.sample(4, Key(2)), q.sample(4, Key(2)))


@pytest.mark.parametrize("large", [1, 100, 1 << 20])
def test_draws_that_go_together_are_those_that_go_alone(large, monkeypatch):
    q = posterior()
    known = dropout_sites(q.joint.network, X)
    numbers = mask_numbers(known, 20, Key(0), X.device)
    alone = [
        outputs_under(q.joint.network, q.theta, X, None, [n[i : i + 1] for n in numbers], known) for i in range(20)
    ]
    monkeypatch.setitem(mask_draws.LARGE, X.device.type, large)
    torch.testing.assert_close(q.outputs(X, 20, Key(0)), torch.cat(alone))


def test_whole_channels_count_with_all_their_pixels():
    net = nn.Sequential(nn.Dropout2d(0.5), nn.Conv2d(4, 1, 3))
    (site,) = dropout_sites(po.model.Network(net), torch.ones(2, 4, 32, 32)).sites
    assert (site.units, site.entries) == (4, 4 * 32 * 32)


def test_metrics_and_gradients_go_through_it():
    q = posterior()
    labels = torch.zeros(11, dtype=torch.long)
    pred = q.predict(X)
    assert 0 <= float(accuracy(pred, labels)) <= 1
    assert float(negative_log_likelihood(pred, labels)) > 0
    assert float(pred.epistemic.max()) > 0  # of a row that no unit acts on it is 0
    x = X.clone().requires_grad_()
    q.predict(x).probs[:, 0].sum().backward()
    assert bool((x.grad != 0).any())


def test_the_generator_of_torch_stays_where_it_is():
    q = posterior()
    before = generator_states()
    q.predict(X)
    q.sample(3, Key(0))
    enumerated(q, X)
    assert torch.equal(generator_states(), before)


def test_weights_of_convolutions_behind_whole_channels():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.5), nn.Conv2d(4, 2, 3), nn.Flatten())
    q = posterior(net.double(), Gaussian(1.0), row=(1, 5, 5))  # float32 convolutions of a GPU may round to TF32
    x = normal(Key(1), 3, 1, 5, 5)
    torch.testing.assert_close(q.joint.outputs(q.sample(9, Key(4)), x), q.outputs(x, 9, Key(4)))


class Tied(nn.Module):
    """A weight behind dropout that also acts without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.drop(torch.relu(self.layer(x))))


class Skip(nn.Module):
    """A dropped tensor that also goes around the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x)
        return x + self.layer(x)


@pytest.mark.parametrize(
    "net",
    [
        Tied(),
        Skip(),
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.ReLU(), nn.Linear(3, 1)),
        nn.Sequential(nn.Linear(2, 3), nn.AlphaDropout(0.5), nn.Linear(3, 1)),
    ],
    ids=["tied", "skip", "last", "before a rectifier", "alpha"],
)
def test_masks_that_are_no_masks_of_weights_are_refused(net):
    q = posterior(net, Gaussian(1.0))
    assert q.outputs(X, 3, Key(0)).shape[:2] == (3, 11)
    with pytest.raises(TypeError, match="is not a mask of weights"):
        q.sample(2, Key(0))


def test_sampling_needs_an_example():
    with pytest.raises(TypeError, match="example row"):
        dataclasses.replace(posterior(), example=None).sample(2, Key(0))


def test_too_many_masks_are_refused():
    q = posterior(MLP([2, 20, 2], dropout=0.1))
    with pytest.raises(ValueError, match=r"20 units that are dropped have 1,048,576 masks, and at most 16,384"):
        enumerated(q, X)
    with pytest.raises(ValueError, match="64 masks, and at most 32"):
        enumerated(posterior(), X, most=32)


@pytest.mark.parametrize("one_mask_a_draw", [True, False])
def test_inputs_that_are_dropped_in_place_stay_what_they_are(one_mask_a_draw):
    found = []
    for inplace in (False, True):
        net = nn.Sequential(nn.Dropout(0.5, inplace=inplace), nn.Linear(2, 1, bias=False)).double()
        joint, x = po.Joint(net, Gaussian(1.0), po.priors.Normal(), 3), torch.ones(3, 2, dtype=torch.float64)
        q = Dropout(joint, torch.ones(2, dtype=torch.float64), one_mask_a_draw=one_mask_a_draw)
        found.append(q.outputs(x, 20, Key(0)))
        assert bool((x == 1.0).all())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_moment_matching_of_the_mixture_needs_gaussian_noise():
    with pytest.raises(TypeError, match="Gaussian likelihood"):
        enumerated(posterior(), X).moment_matched()
    with pytest.raises(TypeError, match="Gaussian likelihood"):
        po.predictive.moment_matched(posterior(likelihood=po.likelihoods.Poisson()).predict(X))
    with pytest.raises(TypeError, match=r"of regression.*Got ClassPredictive"):
        po.predictive.moment_matched(posterior().predict(X))
    with pytest.raises(ValueError, match="at least 2 draws"):
        po.predictive.moment_matched(posterior(likelihood=Gaussian(1.0)).predict(X, draws=1))


def test_rows_that_cannot_be_told_need_masks_of_their_own():
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(2, 1), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.drop(x @ x.T).mean(1, keepdim=True) * x)

    q = posterior(Pairs(), Gaussian(1.0))
    with pytest.raises(ValueError, match="one_mask_a_draw=False"):
        q.predict(X)
    with pytest.raises(ValueError, match="cannot be told"):
        enumerated(q, X[:1])
    assert dataclasses.replace(q, one_mask_a_draw=False).predict(X).mean.shape == (11, 1)
