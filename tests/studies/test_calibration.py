"""Simulation-based calibration: ranks, test quantities, methods of every kind, numbers as JSON, figures."""

import json
import math
import warnings

import pytest
import torch
from scipy import stats
from torch import nn

from posterity.likelihoods import Gaussian
from posterity.methods import HMC, MAP, Conjugate, Laplace, MeanField
from posterity.model import Joint, Tempering
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam
from posterity.priors import Normal
from posterity_studies.calibration import study
from posterity_studies.calibration.calibrate import (
    MODELS,
    Calibration,
    Problem,
    autocorrelation,
    calibrate,
    chi_square_p,
    counts_of,
    ranks_of,
)
from posterity_studies.calibration.figures import band_width, draw
from posterity_studies.calibration.settings import Settings, number_of_bins
from posterity_studies.calibration.study import RECIPES, run

pytestmark = pytest.mark.cpu
X = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).unsqueeze(1)


def line(**noise):
    joint = Joint(nn.Linear(1, 1).double(), Gaussian(**{"scale": 0.5, **noise}), Normal(1.0), len(X))
    return Problem(joint, X)


def test_ranks_count_the_draws_below_and_ties_fall_at_random():
    truth = torch.tensor([0.0, 1.5, 9.0])
    draws = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    assert ranks_of(truth, draws, Key(0)).tolist() == [0, 1, 3]
    tied = ranks_of(torch.zeros(4000), torch.zeros(4000, 3), Key(1))
    counts = torch.bincount(tied, minlength=4)
    assert len(counts) == 4
    assert float(((counts - 1000) ** 2 / 1000).sum()) < stats.chi2.ppf(1 - 1e-6, 3)


def test_p_values_are_those_of_scipy():
    ranks = torch.randint(0, 32, (500,), generator=Key(3).generator("cpu"))
    counts = counts_of(ranks, 31, 8)
    assert counts.sum() == 500
    assert counts[0] == (ranks < 4).sum()
    assert chi_square_p(counts) == pytest.approx(stats.chisquare(counts.numpy()).pvalue, rel=1e-10)


@pytest.mark.parametrize(("replicates", "draws"), [(9, 31), (100, 36), (0, 31)])
def test_ranks_that_fit_into_no_bins_are_refused(replicates, draws):
    with pytest.raises(ValueError, match=r"equal bins|positive"):
        calibrate(Conjugate(), line(), replicates, draws)


def test_bins_hold_equal_numbers_of_ranks():
    for replicates, draws in ((1000, 63), (60, 31), (10, 31), (1000, 24)):
        bins = number_of_bins(replicates, draws)
        assert (draws + 1) % bins == 0
        assert replicates / bins >= 5


def test_autocorrelation_of_a_first_order_chain():
    noise = Key(4).normal((2000, 60), torch.float64)
    chain = [noise[:, 0]]
    for column in noise.unbind(1)[1:]:
        chain.append(0.5 * chain[-1] + math.sqrt(0.75) * column)
    assert autocorrelation(torch.stack(chain, 1)) == pytest.approx(0.5, abs=0.03)
    assert autocorrelation(noise) == pytest.approx(0.0, abs=0.02)
    assert autocorrelation(torch.ones(5, 7)) == 1.0


def test_parameters_and_data_come_from_prior_and_likelihood():
    problem = line(learn=True, log_scale_prior=(-1.0, 0.3))
    theta, data = problem.simulated(20_000, Key(5))
    assert theta.shape == (20_000, 3)
    assert data.per_member
    assert data.targets.shape == (20_000, 6, 1)
    bound = 5 / math.sqrt(20_000)
    assert theta.mean(0).tolist() == pytest.approx([0.0, 0.0, -1.0], abs=bound)
    assert theta.std(0).tolist() == pytest.approx([1.0, 1.0, 0.3], abs=bound)
    away = (data.targets - (theta[:, :1, None] * X + theta[:, 1:2, None])) / theta[:, 2:, None].exp()
    assert float(away.mean()) == pytest.approx(0.0, abs=bound)
    assert float(away.std()) == pytest.approx(1.0, abs=bound)


def test_quantities_are_weights_or_function_values_noise_and_log_densities():
    problem = line(learn=True, log_scale_prior=(-1.0, 0.3))
    theta, data = problem.simulated(4, Key(6))
    several = theta.unsqueeze(1).expand(-1, 3, -1)
    result = problem.quantities(several, data)
    assert list(result) == ["weight", "bias", "log_scale", "log likelihood", "log prior"]
    assert all(values.shape == (4, 3) for values in result.values())
    single = problem.joint.log_likelihood(theta[2], data.member(2))
    assert float(result["log likelihood"][2, 1]) == pytest.approx(float(single))
    assert float(result["log prior"][2, 0]) == pytest.approx(float(problem.joint.log_prior(theta[2])))
    probed = Problem(problem.joint, X, torch.tensor([[0.0], [2.0]], dtype=torch.float64))
    result = probed.quantities(several, data)
    assert list(result) == ["f(0)", "f(2)", "log_scale", "log likelihood", "log prior"]
    assert torch.equal(result["f(2)"][:, 0], 2 * theta[:, 0] + theta[:, 1])
    wide = Problem(Joint(nn.Linear(1, 2).double(), Gaussian(), Normal(), len(X)), X, X[:2])
    theta, data = wide.simulated(3, Key(7))
    assert list(wide.quantities(theta.unsqueeze(1), data))[:4] == ["f1", "f2", "f3", "f4"]


def test_problems_that_cannot_be_calibrated_are_refused():
    joint = line().joint
    with pytest.raises(ValueError, match=r"6 data\. Got 2"):
        Problem(joint, X[:2])
    with pytest.raises(ValueError, match="must not be tempered"):
        Problem(Joint(joint.network, joint.likelihood, joint.prior, 6, Tempering.tempered(2.0)), X)
    with pytest.raises(ValueError, match="without members"):
        Problem(Joint(joint.network, joint.likelihood, Normal(torch.ones(3)), 6), X)
    with pytest.raises(ValueError, match="log_scale_prior"):
        line(learn=True).simulated(2, Key(0))


def test_the_exact_posterior_is_calibrated_and_that_of_other_data_is_not(monkeypatch):
    """Conjugate solves one problem at a time."""
    assert calibrate(Conjugate(), line(), 200, seed=4).smallest > 1e-4
    right = Problem.simulated

    def noisier(self, replicates, key):
        theta, data = right(self, replicates, key)
        return theta, data._replace(targets=2 * data.targets)

    monkeypatch.setattr(Problem, "simulated", noisier)
    assert calibrate(Conjugate(), line(), 200, seed=4).smallest < 1e-4


def test_methods_of_members_run_in_stages_and_fitted_noise_is_one_number():
    adam = Adam(0.05)
    result = calibrate((MAP(300, None, adam), Laplace(tuning=None)), line(), 60, 31)
    assert result.smallest > 1e-4
    fitted = calibrate(MeanField(50, None, adam), line(learn=True, log_scale_prior=(-1.0, 0.3)), 20, 15)
    assert fitted.autocorrelations["log_scale"] == pytest.approx(1.0)
    assert set(fitted.ranks["log_scale"].tolist()) <= {0, 15}


def test_a_run_depends_on_its_seed_alone():
    method, problem = HMC(warmup=20, steps=3), MODELS["logistic"]()
    first, again, other = (calibrate(method, problem, 20, 15, seed) for seed in (1, 1, 2))
    for name, ranks in first.ranks.items():
        assert torch.equal(ranks, again.ranks[name])
    assert any(not torch.equal(ranks, other.ranks[name]) for name, ranks in first.ranks.items())
    assert 0 < first.accept <= 1


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        quick = {"nuts": lambda model: (HMC(warmup=20, steps=3),), "laplace": lambda model: (MAP(50), Laplace())}
        patch.setattr(study, "RECIPES", quick)
        yield run(Settings(("linear", "network"), ("nuts", "laplace"), 20, 15, seed=2))


def test_the_document_has_every_number(small):
    document = small.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [(row["model"], row["method"]) for row in document["results"]] == [
        ("linear", "nuts"),
        ("linear", "laplace"),
        ("network", "nuts"),
        ("network", "laplace"),
    ]
    for row, shown in zip(small.rows, document["results"], strict=True):
        assert shown["smallest_p"] == min(quantity["p"] for quantity in shown["quantities"])
        assert shown["passes"] == (shown["smallest_p"] > 1e-4)
        assert all(sum(quantity["counts"]) == 20 for quantity in shown["quantities"])
        assert (
            shown["quantities"][[quantity["p"] for quantity in shown["quantities"]].index(shown["smallest_p"])][
                "quantity"
            ]
            == row.worst
        )
    assert "draws=15" in document["results"][0]["stages"][0]
    assert "chains=20" in document["results"][0]["stages"][0]
    assert set(document["models"]) == {"linear", "network"}


def test_the_table_has_a_line_for_each_quantity():
    result = Calibration(
        {"weight": torch.arange(16), "log prior": torch.zeros(16, dtype=torch.int64)},
        {"weight": 0.25, "log prior": 0.0},
        15,
    )
    lines = str(result).splitlines()
    assert [text.split()[0] for text in lines] == ["quantity", "weight", "log"]
    assert lines[1].split()[1:] == ["1", "0.25"]


def test_every_figure_is_drawn(small, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(small, tmp_path / "new") == ["ecdf.png", "histograms.png"]
    for name in ("ecdf.png", "histograms.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


def test_the_band_holds_so_many_curves():
    """Of uniform ranks, 99 % of whose curves stay inside; one point alone would need 2.58 standard errors."""
    width = band_width(200, 15)
    assert 2.58 < width < 4.5
    assert band_width(200, 15) == width


def test_names_and_numbers_are_checked():
    Settings(("linear",), ("nuts",), 100, 31)
    for wrong, message in (
        (((), ("nuts",), 100, 31), "--models must name at least one"),
        ((("linear",), ("nut",), 100, 31), "Did you mean 'nuts'"),
        ((("linear",), ("nuts",), 3, 31), "more replicates"),
        ((("linear",), ("nuts",), 100, 0), "--draws"),
    ):
        with pytest.raises(ValueError, match=message):
            Settings(*wrong)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_recipes_are_methods(name, model):
    assert all(hasattr(stage, "step") for stage in RECIPES[name](model))
