"""`auto` at the command line: the default for files, in runs and in comparisons."""

import json
import shutil

import numpy as np
import pytest

from posterity.cli.frame.folders import find_run
from posterity.cli.main import main
from posterity.errors import BadFolder, PosterityError

pytestmark = pytest.mark.cpu


def write(path, rows=60, classes=False, seed=0):
    draws = np.random.default_rng(seed)
    inputs, kinds = draws.normal(size=(rows, 2)), draws.choice(["red", "blue"], rows)
    targets = 20 + 3 * inputs[:, 0] - inputs[:, 1] + 2 * (kinds == "red") + 0.3 * draws.normal(size=rows)
    shown = np.where(targets > 21, "high", "low") if classes else [f"{target:.4f}" for target in targets]
    lines = [f"{a:.4f},{b:.4f},{kind},{y}" for (a, b), kind, y in zip(inputs, kinds, shown, strict=True)]
    path.write_text("\n".join(["a,b,kind,y", *lines]) + "\n")
    return path


@pytest.fixture(scope="module", autouse=True)
def patient():
    """No clock stops a fit, however busy the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posterity.estimators.automatic.RUNAWAY", 1e9)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two finished runs of auto, and their files."""
    folder = tmp_path_factory.mktemp("auto")
    for name, classes in (("number", False), ("class", True)):
        write(folder / f"{name}.csv", classes=classes)
        words = ("--target", "y", "--seconds", "1", "--device", "cpu", "--quiet", "--out", str(folder / name))
        assert main(["fit", str(folder / f"{name}.csv"), *words]) == 0
    return folder


def test_it_is_the_default_for_files_and_its_run_can_be_used(run, folder, content):
    words = ("fit", folder / "number.csv", "--target", "y", "--seconds", "1", "--device", "cpu")
    before = content(folder / "number")
    again = run(*words, "--json", "--out", folder / "number")
    document = json.loads(again.out)
    assert again.code == 0
    assert "The method is auto; --method names another." in again.err.splitlines()
    assert document["finished_already"]
    assert document["method"] == "auto"
    assert document["network"] is None
    assert "held-out rows" in document["chosen"]
    assert document["scores"]["r2"] > 0.8
    other = run(*words, "--out", folder.parent / "other", "--quiet")
    assert other.code == 0
    assert content(folder.parent / "other") == before  # same seed, same bits
    for name in ("number", "class"):
        scores = json.loads(run("evaluate", folder / name, "--json").out)
        assert scores["method"] == "auto"
        assert scores["fitted_rows"] == 0
        predicted = run("predict", folder / name, "--data", folder / f"{name}.csv")
        assert predicted.code == 0
        assert len(predicted.out.splitlines()) == 61


def test_options_of_one_network_mean_another_method(run, tmp_path):
    file = write(tmp_path / "table.csv", 30)
    words = ("fit", file, "--target", "y", "--device", "cpu")
    done = run(*words, "--hidden", "none", "--out", tmp_path / "run")
    assert done.code == 0
    assert "The method is laplace, as --hidden is given, which auto does not take." in done.err
    assert "table, Laplace" in done.out
    for more, said in (
        (("--method", "auto", "--hidden", "5"), "--hidden is for methods that fit one network"),
        (("--method", "auto", "--log-target"), "--log-target is not for auto, which itself models the logarithm"),
        (("--method", "map", "--seconds", "9"), "--seconds is the budget of auto, and the method is map"),
        (("--seconds", "0"), "--seconds must be"),
    ):
        refused = run(*words, *more, "--out", tmp_path / "no")
        assert (refused.code, refused.out) == (2, "")
        assert said in refused.err
        assert not (tmp_path / "no").exists()


def test_a_comparison_has_a_row_for_it(run, tmp_path):
    file = write(tmp_path / "table.csv")
    words = ("compare", file, "--target", "y", "--device", "cpu", "--quiet", "--json")
    document = json.loads(run(*words, "--methods", "auto,map", "--hidden", "none", "--seconds", "1").out)
    auto, mapped = document["methods"]
    assert [auto["method"], mapped["method"]] == ["auto", "map"]
    assert "held-out rows" in auto["chosen"]
    assert auto["test_nll"] < document["baselines"][0]["test_nll"]
    assert auto["far"]["width"] > 0
    assert mapped["chosen"] is None
    alone = run("compare", file, "--target", "y", "--methods", "auto", "--seconds", "1", "--device", "cpu", "-q")
    assert alone.code == 0
    assert alone.out.splitlines()[0] == "table"  # no network of its own
    for more in (
        ("--methods", "auto", "--hidden", "9"),
        ("--methods", "map", "--seconds", "9"),
        ("--methods", "map,auto", "--log-target"),
    ):
        assert run(*words, *more).code == 2
    assert "must be above 0" in run(*words, "--test-fraction", "0").err


def test_its_comparison_can_be_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    page, figure = tmp_path / "page.html", tmp_path / "figure.png"
    words = ("compare", "sine", "--methods", "auto", "--seconds", "1", "--device", "cpu", "--quiet")
    assert run(*words, "--report", page, "--figure", figure).code == 0
    assert "auto" in page.read_text()
    assert figure.stat().st_size > 1000


def test_a_killed_run_starts_again_and_nothing_is_half_written(run, tmp_path, monkeypatch):
    file = write(tmp_path / "table.csv")
    words = ("fit", file, "--target", "y", "--seconds", "1", "--device", "cpu", "--out", tmp_path / "run")

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("posterity.cli.frame.fitting.fit_automatic", killed)
        stopped = run(*words)
    assert stopped.code == 130
    assert "the same command starts it again" in stopped.err
    assert not (tmp_path / "run").exists()
    assert run("predict", tmp_path / "run").code == 4
    assert run(*words, "--quiet").code == 0
    assert run("predict", tmp_path / "run").code == 0
    assert not (tmp_path / "run" / "stages").exists()


def test_its_model_is_not_saved_among_the_parts_of_a_run(folder, content):
    before = content(folder / "number")
    with pytest.raises(BadFolder, match="holds a fitted run, which would be mixed with what is saved"):
        find_run(folder / "class").posterior.save(folder / "number")
    assert content(folder / "number") == before


def test_where_nothing_was_fitted_no_folder_is_left(run, folder, tmp_path, monkeypatch, content):
    file = write(tmp_path / "table.csv")
    words = ("fit", file, "--target", "y", "--seconds", "1", "--device", "cpu", "--quiet", "--out")
    (tmp_path / "empty").mkdir()
    finished, before = shutil.copytree(folder / "number", tmp_path / "finished"), content(folder / "number")

    def failing(*_, **__):
        raise PosterityError("No Ray cluster answers.")

    with monkeypatch.context() as patch:
        patch.setattr("posterity.cli.frame.fitting.fit_automatic", failing)
        for name in ("new", "empty"):
            assert run(*words, tmp_path / name).code == 1
        assert run(*words, finished, "--force").code == 1
    assert content(finished) == before
    assert not (tmp_path / "new").exists()
    for name in ("empty", "finished"):
        assert not (tmp_path / name / "stages").exists()
    assert run(*words, tmp_path / "empty", "--seed", "1").code == 0


def test_a_damaged_run_is_refused(run, folder, tmp_path):
    import shutil

    from posterity.storage import Part, RunFolder

    for number, change in enumerate(({"inputs": 9}, {"inputs": "2"}, {"method": "magic"}, {"classes": ["a"]})):
        broken = shutil.copytree(folder / "number", tmp_path / str(number))
        config = RunFolder(broken).read("task").config
        RunFolder(broken).commit({"task": Part({**config, **change})})
        refused = run("predict", broken)
        assert (refused.code, refused.out) == (4, "")
        assert "unexpected" not in refused.err
