"""The study of mixtures: what theory says of EM holds as numbers, planted mistakes are seen, all is drawn."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from goldcases import load

from posterity.errors import BoundFell
from posterity.evidence import jensen
from posterity.numerics import Key
from posterity_studies.mixtures import bounds, clusters, example, factorised, partly, prior
from posterity_studies.mixtures.figures import draw
from posterity_studies.mixtures.study import run
from posterity_studies.options import Settings

pytestmark = pytest.mark.cpu
FIGURES = [
    "points.png",
    "responsibilities.png",
    "jensen.png",
    "bound.png",
    "staircase.png",
    "factorised.png",
    "labels.png",
    "clusters.png",
    "priors.png",
]


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partly, "REPLICATES", 40)
        for name, value in (("STARTS", 6), ("MOST", 6), ("RESTARTS", 3)):
            patch.setattr(clusters, name, value)
        for name, value in (("SCALES", (0.1, 1.0)), ("DATA_SETS", 2), ("STEPS", 300), ("ROUNDS", 10), ("TEST", 300)):
            patch.setattr(prior, name, value)
        result = run(Settings(seed=1))
        result.document()  # with these settings in it
        yield result


@pytest.fixture(scope="module")
def small():
    data = example.miniature()
    return data, example.expectation_maximization(data, example.MINIATURE_START)


def test_with_labels_the_fit_is_the_statistics_of_the_classes(study):
    for component in range(2):
        own = study.data.points[study.data.labels == component]
        assert float(study.complete["weights"][component]) == pytest.approx(len(own) / len(study.data.points))
        assert float(study.complete["means"][component]) == pytest.approx(float(own.mean()))
        assert float(study.complete["variances"][component]) == pytest.approx(float(own.var(correction=0)))


def test_with_labels_em_is_done_after_one_round(study):
    run = example.expectation_maximization(study.data, example.START)
    for name, value in study.complete.items():
        torch.testing.assert_close(run.history[1][name], value)
        torch.testing.assert_close(run.end[name], value)


def test_the_miniature_is_the_gold_case(small):
    data, run = small
    case = load("em_gmm_1d")
    torch.testing.assert_close(data.points, case.inputs["y"])
    for number in range(3):
        at = run.history[number + 1]
        case.check(f"iterations.{number}.pi", at["weights"][0])
        case.check(f"iterations.{number}.mu", at["means"])
        case.check(f"iterations.{number}.var", at["variances"])
    case.check("limit.mu", run.end["means"])
    result = bounds.checks(data, run, Key(0))
    case.check("log_lik0", result.log_likelihood_start)
    case.check("limit.log_lik", result.log_likelihood_end)
    misprint = case.must_not_equal["bound_if_sum_over_n_missing_on_the_KL_term"]
    assert result.one_divergence == pytest.approx(misprint)


@pytest.mark.parametrize("which", ["checks", "miniature"])
def test_what_theory_says_holds(study, which):
    result = getattr(study, which)
    size = abs(result.log_likelihood_start)
    assert result.touching < 1e-12 * size
    assert result.highest_above < 1e-12 * size
    assert result.decomposition < 1e-12 * size
    assert result.two_forms < 1e-12 * size
    assert result.smallest_step > -1e-12 * size
    assert result.fisher < 1e-11
    assert result.end_gradient < 1e-3
    assert result.log_likelihood_end > result.log_likelihood_start + 1.0


@pytest.mark.parametrize("which", ["checks", "miniature"])
def test_the_misprints_are_seen(study, which):
    result = getattr(study, which)
    assert result.common_q < result.log_likelihood_start - 1.0  # not tight
    assert result.one_entropy < result.log_likelihood_start - 1.0
    assert result.one_divergence > result.log_likelihood_start + 1.0  # no bound


def test_no_common_q_is_better_than_the_best_one(small):
    data, run = small
    table = example.log_joint(data, run.history[0])
    first = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    q = torch.stack([first, 1.0 - first], -1)  # (G, 2)
    result = (q * (table.sum(0) - len(table) * q.log())).sum(-1)
    best = bounds.checks(data, run, Key(0)).common_q
    assert float(result.max()) <= best + 1e-9
    assert float(result.max()) == pytest.approx(best, abs=1e-4)


def test_a_wrong_bound_is_seen(small, monkeypatch):
    data, run = small

    def doubled(log_joint, q, hidden=1):
        return jensen.q_function(log_joint, q, hidden) + 2.0 * jensen.entropy(q, hidden)

    monkeypatch.setattr(jensen, "jensen_bound", doubled)
    result = bounds.checks(data, run, Key(0))
    assert result.highest_above > 0.5
    assert result.decomposition > 0.5
    assert result.two_forms > 0.5
    with pytest.raises(BoundFell):
        example.expectation_maximization(data, example.MINIATURE_START)


def test_a_wrong_gradient_is_seen(small, monkeypatch):
    data, run = small
    right = jensen.fisher_gradient

    def uniform(log_joint, values):
        return right(log_joint, values, torch.full((len(data.points), 2), 0.5, dtype=torch.float64))

    monkeypatch.setattr(jensen, "fisher_gradient", uniform)
    assert bounds.checks(data, run, Key(0)).fisher > 0.1


def test_each_curve_touches_where_the_round_begins_and_is_highest_where_it_ends(study):
    means = [float(at["means"][0]) for at in study.run.history]
    assert len(study.curves) == len(study.one_mean) == bounds.FIRST
    for number, curve in enumerate(study.curves):
        assert curve.at == pytest.approx(means[number])
        assert curve.best == pytest.approx(means[number + 1])
        assert curve.value == pytest.approx(float(study.run.after_e[number]))
    for curve in (*study.curves, *study.one_mean):
        gap, step = curve.log_likelihood - curve.bound, float(curve.grid[1] - curve.grid[0])
        assert float(gap.min()) > -1e-9
        assert float(curve.grid[gap.argmin()]) == pytest.approx(curve.at, abs=step)
        assert float(curve.grid[curve.bound.argmax()]) == pytest.approx(curve.best, abs=step)
    for before, after in zip(study.one_mean, study.one_mean[1:], strict=False):
        assert after.at == pytest.approx(before.best)
        torch.testing.assert_close(after.log_likelihood, before.log_likelihood)


def test_the_log_of_a_mean_is_above_the_mean_of_logs_by_the_divergence(study):
    result, row = study.jensen, study.document()["jensen"]
    assert row["log_of_the_mean"] - row["mean_of_the_logs"] == pytest.approx(row["divergence"], rel=1e-12)
    assert row["divergence"] > 0.1
    assert row["bound_above_anywhere"] < 1e-12
    highest = int(result.bound.argmax())
    assert float(result.q[highest]) == pytest.approx(row["responsibility"], abs=1 / bounds.GRID)
    chosen = float(result.bound[int((result.q - bounds.CHOSEN).abs().argmin())])
    assert chosen == pytest.approx(row["mean_of_the_logs"], abs=1e-12)


def test_with_a_product_for_q_the_bound_stays_below_by_a_divergence(study):
    exact, product = study.ascents["EM"], study.ascents["variational EM"]
    for ascent in (exact, product):
        assert ascent.off < 1e-9
        assert float(ascent.bound.diff().min()) > -1e-9
    assert float(exact.divergence.abs().max()) < 1e-9
    assert exact.largest_fall < 1e-9
    assert float(product.divergence[0]) == pytest.approx(0.0, abs=1e-9)  # orthogonal weights: coins stay independent
    assert float(product.divergence[1:].min()) > 1.0
    assert float(exact.log_likelihood[-1]) > float(product.log_likelihood[-1]) + 1.0
    assert all(study.claims().values())
    wrong = replace(study, ascents={"EM": product, "variational EM": exact})
    assert list(wrong.claims().values()) == [False, True, True, False, False]


def test_the_regression_on_hidden_coins_maximises():
    rows = factorised.points(Key(2))
    values = {"weights": torch.tensor(factorised.START, dtype=torch.float64), "variance": torch.tensor(2.0).double()}
    q = jensen.posterior(factorised.log_joint(rows, values), 2)
    best = {name: value.requires_grad_() for name, value in factorised.maximised(rows, q).items()}
    value = jensen.q_function(factorised.log_joint(rows, best), q, 2).sum()
    for gradient in torch.autograd.grad(value, list(best.values())):
        assert float(gradient.abs().max()) < 1e-8


def test_labelled_rows_keep_their_component():
    data = example.sample(20, example.TRUTH, Key(3))
    some = example.Sample(data.points, torch.where(torch.arange(20) < 10, data.labels, example.UNKNOWN))
    q = jensen.posterior(example.log_joint(some, example.START))
    assert torch.equal(q[:10].argmax(-1), data.labels[:10])
    assert bool(((q[:10] == 0) | (q[:10] == 1)).all())
    assert bool(((q[10:] > 0) & (q[10:] < 1)).all())


def test_labels_are_worth_much_and_all_of_them_are_the_class_means(study, monkeypatch):
    assert [row.share for row in study.shares] == list(partly.SHARES)
    none, _, some, every = study.shares
    assert none.error > some.error + 3 * some.standard_error > every.error
    monkeypatch.setattr(partly, "SHARES", (1.0,))
    monkeypatch.setattr(partly, "REPLICATES", 3)
    (result,) = partly.partly_labelled(Key(5))
    samples = [example.sample(partly.COUNT, partly.TRUTH, Key(5).fold(index)) for index in range(3)]
    off = torch.stack([example.complete(sample)["means"] - partly.TRUTH["means"] for sample in samples])
    assert result.error == pytest.approx(float(off.square().mean(-1).sqrt().mean()))


def test_five_clusters_are_found(study):
    result = study.clusters
    random, spread = result.starts
    assert [len(item.ends) for item in result.starts] == [6, 6]
    assert spread.share_at(result.best) >= max(random.share_at(result.best), 0.5)
    for start in result.starts:
        assert start.worst <= start.middle <= result.best
    assert min(result.components, key=lambda first: first.bic).components == 5
    assert [component.alive for component in result.components] == [1, 2, 3, 4, 5, 5]
    assert result.components[4].elbo > max(component.elbo for component in result.components[:4])
    distances = torch.cdist(result.means, torch.tensor(clusters.CENTRES, dtype=torch.float64))
    assert sorted(distances.argmin(0).tolist()) == list(range(5))
    assert float(distances.min(0).values.max()) < 0.6


def test_variational_em_chooses_a_good_prior_without_held_out_rows(study):
    tight, wide = study.priors.fixed
    assert tight.mean > wide.mean + 0.5
    single, layers = study.priors.chosen
    assert single.scales[0] == single.scales[1]
    assert 0.5 < single.scales[0] < 5.0
    assert layers.scales[0] != layers.scales[1]
    assert single.noise == pytest.approx(prior.NOISE)
    assert layers.noise == pytest.approx(prior.NOISE, rel=0.4)
    for chosen in (single, layers):
        assert chosen.above_best.mean < 0.1
        assert chosen.test_nll.mean > prior.noise_alone() - 0.1


def test_document_and_figures(study, tmp_path):
    document = study.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["labels"]["data_sets"] == 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(study, tmp_path / "new") == FIGURES
    assert all((tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG") for name in FIGURES)
