"""What an earlier release stored is read, predicts, goes on and is fitted again as it was then.

Numbers are those recorded, to the bit where torch and the processor are the same kind, else to four digits.
"""

import gzip
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from releases.cases import ASKED, DEFAULTS, FIT, WITH_DEFAULTS, tasks
from releases.observed import bits, check, estimated, observed, trace_of
from releases.release import FIRST, RELEASES
from safetensors.torch import load_file

from posterity import load
from posterity.cli.main import main
from posterity.errors import BadFolder, shown
from posterity.inference import Callback, Sequential

pytestmark = pytest.mark.cpu
# Conjugate regression goes by a QR decomposition now, and no longer by the squares of its rows.
ROUNDED_OTHERWISE = {"conjugate", "conjugate_double", "variational_em_conjugate"}
# The log evidence of a subset no longer holds the prior of the weights that are points.
OTHER_EVIDENCE = {"laplace_last_layer", "laplace_matching", "laplace_largest_variance", "laplace_some_random"}


def of_releases(names, wanted):
    """The test for each release and each of what is wanted of it."""
    each = [pytest.param(r, item, id=f"{r.name}-{item}") for r in RELEASES.values() for item in wanted(r)]
    return pytest.mark.parametrize(("release", names), each)


def own_machine(release):
    if not release.exact:
        pytest.skip("recorded with another torch, or on another kind of processor")


def split(tensors):
    """What is expected of a posterior, and of the trace of its run."""
    trace = {name: tensor for name, tensor in tensors.items() if name.startswith("trace.")}
    return {name: tensor for name, tensor in tensors.items() if name not in trace}, trace


def stored_tensors(run):
    """All tensors of the posterior in the folder, as the file has them."""
    (file,) = run.glob("posterior-*/*.safetensors")
    return Counter(map(bits, load_file(file).values()))


def parts(posterior):
    part = posterior.parts()["posterior"]
    return dict(part.config), {name: bits(tensor) for name, tensor in part.tensors.items()}


@of_releases("name", lambda release: release.cases)
def test_a_stored_posterior_is_what_it_was(release, name):
    case, folder = release.cases[name], release.folder / "posteriors" / name
    posterior = load(folder / "run", case.problem.model(), **case.given)
    assert not stored_tensors(folder / "run") - Counter(parts(posterior)[1].values())
    check(observed(case, posterior), split(load_file(folder / "expected.safetensors"))[0], release.exact)


@of_releases("name", lambda release: [name for name, case in release.cases.items() if case.refit])
def test_the_same_fit_gives_the_same_numbers(release, name):
    case, folder = release.cases[name], release.folder / "posteriors" / name
    posterior, trace = case.fit()
    exact = release.exact and not (release is FIRST and name in ROUNDED_OTHERWISE)
    check({**observed(case, posterior), **trace_of(trace)}, load_file(folder / "expected.safetensors"), exact)
    if exact:
        (config, tensors), (then, recorded) = (
            parts(posterior),
            parts(load(folder / "run", case.problem.model(), **case.given)),
        )
        changed = {name for name in recorded if tensors.get(name) != recorded[name]}
        assert config == then
        assert tensors.keys() == recorded.keys()
        otherwise = release is FIRST and name in OTHER_EVIDENCE
        assert changed == ({"posterior.gaussian.log_evidence"} if otherwise else set())


@of_releases("name", lambda release: release.estimators)
def test_a_stored_estimator_predicts_what_it_did(release, name):
    folder, (estimator, _) = release.folder / "estimators" / name, release.estimators[name]
    model = type(estimator).load(folder / "run")
    check(estimated(model), load_file(folder / "expected.safetensors"), release.exact)


class CountedSteps(Callback):
    def __init__(self):
        self.first = None

    def after_step(self, run):
        self.first = self.first or run.step


@of_releases("name", lambda release: release.stopped)
def test_a_stopped_run_goes_on(release, name, tmp_path):
    stopped, folder, steps = release.stopped[name], release.folder / "checkpoints" / name, CountedSteps()
    run = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    try:
        posterior, trace = stopped.fit(run, steps)
    except BadFolder as error:
        if release.exact or "its start differs" not in str(error):
            raise
        pytest.skip("the start, drawn anew, has other last bits on this machine, and so it is another run")
    assert steps.first == stopped.step // stopped.every * stopped.every + 1
    found = {**observed(stopped.case, posterior), **trace_of(trace)}
    check(found, load_file(folder / "expected.safetensors"), release.exact)


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_finished_tasks_are_not_done_again(release, tmp_path):
    run = shutil.copytree(release.folder / "tasks" / "run", tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    wanted = tasks()
    outcomes = Sequential().run(wanted, run)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    for outcome in outcomes:
        check(trace_of(outcome.trace), load_file(release.folder / "tasks" / f"{outcome.name}.safetensors"), exact=True)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A function that brings a recorded folder of the command line, and its table, into the present folder."""
    monkeypatch.chdir(tmp_path)

    def bring(release, name, folder):
        Path("table.csv").write_text(release.table)
        return None if folder is None else shutil.copytree(release.folder / "cli" / name / folder, tmp_path / name)

    return bring


def said_then(release, name, asked):
    return gzip.decompress((release.folder / "cli" / name / f"{asked}.txt.gz").read_bytes()).decode()


def first_columns(told, then):
    """As many columns as there were then: the parts of the uncertainty come last."""
    count = then.splitlines()[0].count(",") + 1
    return "".join(",".join(line.split(",")[:count]) + "\n" for line in told.splitlines())


@pytest.mark.parametrize("asked", ASKED)
@of_releases("name", lambda release: release.commands)
def test_finished_runs_of_the_command_line_say_the_same(release, name, asked, place, capsys):
    place(release, name, "run")
    assert main([*release.asked(asked, name)]) == 0
    told, then = capsys.readouterr().out, said_then(release, name, asked)
    if asked == "evaluate":  # it says more now
        document, known = json.loads(told), json.loads(then)
        assert release is not FIRST or document["fitted_rows"] is None
        scores = {key: document["scores"][key] for key in known["scores"]}
        told, then = (
            json.dumps(value, indent=2) for value in ({**{k: document[k] for k in known}, "scores": scores}, known)
        )
    if asked == "predict":
        same_predictions(first_columns(told, then), then, release.exact)
    else:
        same_text(told, then, release.exact)


@of_releases("name", lambda release: release.again)
def test_finished_runs_of_the_command_line_are_not_done_again(release, name, place, capsys):
    place(release, name, "run")
    assert main(["fit", *release.commands[name], "--out", name, *FIT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished_already"]


@pytest.mark.parametrize("folder", ["run", "stopped"])
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("moons", (), "its batch_size is 128 and 'auto' was asked for"),
        ("moons", DEFAULTS, "of posterity 0.1.0, where laplace tuned a prior scale that was given"),
        ("table", DEFAULTS, "of posterity 0.1.0, where the noise was fitted along with the weights"),
    ],
)
def test_what_a_command_meant_then_is_not_taken_for_what_it_means_now(folder, name, options, message, place, capsys):
    run = place(FIRST, name, folder)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["fit", *WITH_DEFAULTS[name], *options, "--out", name, *FIT]) == 4
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.suffix != ".lock"} == before


@pytest.mark.parametrize("begun", [False, True], ids=["anew", "from where it stopped"])
@of_releases("name", lambda release: [name for name in release.again if name in release.begun])
def test_the_same_command_says_the_same(release, name, begun, place, capsys):
    own_machine(release)
    place(release, name, "stopped" if begun else None)
    assert main(["fit", *release.commands[name], "--out", name, *FIT, "--quiet"]) == 0
    capsys.readouterr()
    assert main([*release.asked("predict", name)]) == 0
    then = said_then(release, name, "predict")
    same_predictions(first_columns(capsys.readouterr().out, then), then, exact=True)


NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+")


def same_predictions(found, expected, exact):
    """As `same_text`, but for the ends of intervals of mixtures, which Newton's method finds now, not bisection."""
    found, expected = ([line.split(",") for line in text.splitlines()] for text in (found, expected))
    ends = [index for index, name in enumerate(expected[0]) if name in ("lower", "upper")]
    for rows in (found, expected):
        for row in rows[1:]:
            row.append([float(row[index]) for index in ends])
            for index in ends:
                row[index] = ""
    for own, known in zip(found[1:], expected[1:], strict=True):
        assert own.pop() == pytest.approx(known.pop(), rel=1e-5 if exact else 1e-3, abs=1e-6 if exact else 1e-4)
    same_text(*("\n".join(map(",".join, rows)) for rows in (found, expected)), exact)


def same_text(found, expected, exact):
    """Equal, or equal but for the last digits of numbers."""
    if exact:
        assert found == expected
    assert NUMBER.sub("#", found) == NUMBER.sub("#", expected)
    first, second = (torch.tensor(list(map(float, NUMBER.findall(text)))) for text in (found, expected))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_nothing_recorded_tells_where(release):
    for path in release.folder.rglob("*"):
        if path.is_file():
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            for word in (b"/tmp/", b"/home/", bytes(Path.home()), bytes(Path.cwd())):
                assert word not in content, shown(f"{path.name}: {word!r}")
