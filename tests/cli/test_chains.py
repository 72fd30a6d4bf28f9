"""Markov chains over all rows on the command line."""

import json

import pytest

import posterity as po

pytestmark = pytest.mark.cpu
TINY = ("--hidden", "3", "--prior-scale", "1", "--draws", "20", "--warmup", "10", "--chains", "2", "--device", "cpu")


@pytest.fixture
def table(tmp_path):
    x = po.Key(0).normal((30, 2))
    y = x.sum(1) + 0.1 * po.Key(1).normal((30,))
    lines = [f"{a:.4f},{b:.4f},{c:.4f}" for (a, b), c in zip(x.tolist(), y.tolist(), strict=True)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["one,two,price", *lines]) + "\n")
    return path


@pytest.mark.parametrize("method", ["nuts", "hmc"])
def test_fit_keeps_the_draws_and_tells_of_the_chains(run, table, tmp_path, method):
    words = ("fit", table, "--target", "price", "--out", tmp_path / "run", "--method", method, *TINY)
    result = run(*words, "--json")
    assert result.code == 0
    told = json.loads(result.out)["chains"]
    assert (told["chains"], told["draws"]) == (2, 20)
    assert told["rhat"] > 0.9
    assert told["warnings"]  # 20 draws are few
    q = po.load(tmp_path / "run", po.networks.MLP((2, 3, 1), activation="tanh"))
    assert isinstance(q, po.posteriors.Samples)
    assert q.theta.shape == (2, 20, 3 * 3 + 4 + 1)  # with the noise
    assert float(q.theta[..., -1].std()) > 0.01
    assert q.joint.likelihood.log_scale_prior is not None
    again = run(*words)
    assert again.code == 0
    shown = " ".join(again.out.split())
    assert f"{method.upper()}: 2 chains of 20 draws, R-hat" in shown
    assert "Not to be relied on yet: " in shown
    assert run("evaluate", tmp_path / "run", "--json").code == 0
    predicted = run("predict", tmp_path / "run", "--data", table)
    assert predicted.code == 0
    assert len(predicted.out.strip().splitlines()) == 31


def test_compare_and_its_page_tell_of_the_chains(run, tmp_path):
    page = tmp_path / "page.html"
    words = ("--methods", "map,nuts,sghmc", *TINY, "--noise", "0.3", "--steps", "40", "--report", page, "--json")
    result = run("compare", "sine", *words)
    assert result.code == 0
    rows = {row["method"]: row for row in json.loads(result.out)["methods"]}
    assert rows["map"]["chains"] is None
    assert rows["nuts"]["chains"]["draws"] == 20
    assert rows["sghmc"]["chains"]["divergences"] is None
    assert rows["nuts"]["starts_from"] is None
    assert "NUTS: 2 chains of 20 draws" in page.read_text()


def test_classes_and_a_plan(run):
    result = run("compare", "two-moons", "--methods", "hmc", *TINY)
    assert result.code == 0
    assert "HMC: 2 chains of 20 draws" in " ".join(result.out.split())
    shown = run("plan", "two-moons", "--methods", "nuts", "--draws", "30", "--device", "cpu")
    assert shown.code == 0
    assert "NUTS with 4 chains of 30 draws over 2,802 parameters" in " ".join(shown.out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "nuts", "--draws", "0"), "--draws"),
        (("--method", "nuts", "--chains", "-1"), "--chains"),
        (("--method", "hmc", "--warmup", "-5"), "--warmup"),
        (
            ("--method", "laplace", "--draws", "10"),
            "--draws is for nuts, hmc, chees, mams, mclmc, mala, metropolis and langevin",
        ),
        (("--method", "nutz"), "Did you mean 'nuts'?"),
    ],
)
def test_words_that_cannot_be_are_one_line(run, tmp_path, words, said):
    result = run("fit", "sine", "--out", tmp_path / "run", *words, "--device", "cpu")
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err
    assert sum(line.startswith("error: ") for line in result.err.splitlines()) == 1


def test_chains_agree_where_all_is_well():
    from posterity.cli.frame.scores import chains_line

    told = {"chains": 1, "draws": 9, "rhat": None, "bulk_ess": 1234.5, "divergences": None, "warnings": []}
    assert chains_line("nuts", told) == (
        "NUTS: 1 chain of 9 draws, bulk ESS 1,234 (outputs at training rows, noise). They agree."
    )
