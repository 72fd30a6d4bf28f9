"""The benchmark harness, on a clock that only the contenders move."""

import argparse
import dataclasses
import gc
import json
import sys

import pytest
from benchmarkfiles import ROOT, load

harness = load("harness")


class Clock:
    """Time that passes only when a contender works."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def contender(self, name, durations, **arguments):
        """A contender whose k-th call takes `durations[k]` (the last one for ever after)."""
        calls = iter(range(10**6))

        def call():
            self.now += durations[min(next(calls), len(durations) - 1)]
            self.log.append(name)
            return name

        return harness.Contender(name, lambda: call, **arguments)


@pytest.fixture
def clock():
    return Clock()


def test_gives_median_minimum_and_spread_per_unit(clock):
    # first call, then (warm-up, timed) in each round: calls 2, 4, 6, 8, 10 are timed
    slow = clock.contender("slow", [99, 99, 10, 99, 30, 99, 20, 99, 50, 99, 40], units=10)
    found = harness.compare("t", [slow], limit="slow", rounds=5, clock=clock)["slow"]
    assert found.seconds == (1.0, 3.0, 2.0, 5.0, 4.0)
    assert (found.median, found.minimum, found.spread) == (3.0, 1.0, 2.0)


def test_a_block_is_timed_as_one_and_its_warm_up_is_not(clock):
    found = harness.compare(
        "t", [clock.contender("a", [99, 99, 1, 2, 6, 99, 3, 3, 3])], limit="a", rounds=2, block=3, clock=clock
    )["a"]
    assert found.seconds == (3.0, 3.0)
    assert len(clock.log) == 1 + 2 * (1 + 3)


def test_contenders_take_turns_and_the_first_one_changes(clock):
    harness.compare("t", [clock.contender(name, [1]) for name in "abc"], limit="a", rounds=4, clock=clock)
    rounds = "".join(clock.log[3:])
    assert clock.log[:3] == ["a", "b", "c"]
    assert rounds == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"


def test_the_two_ratios_are_what_they_say(clock):
    limit = clock.contender("limit", [0, 0, 1, 0, 2, 0, 10])
    other = clock.contender("other", [0, 0, 4, 0, 4, 0, 10])
    found = harness.compare("t", [limit, other], limit="limit", rounds=3, clock=clock)
    assert found.ratio_of_medians("other") == 2.0  # 4 / 2
    assert found.median_of_ratios("other") == 2.0  # of 4, 2, 1
    assert found.ratio_of_medians("limit") == found.median_of_ratios("limit") == 1.0


def test_the_ratios_can_differ(clock):
    limit = clock.contender("limit", [0, 0, 1, 0, 2, 0, 8])
    other = clock.contender("other", [0, 0, 8, 0, 2, 0, 4])
    found = harness.compare("t", [limit, other], limit="limit", rounds=3, clock=clock)
    assert found.ratio_of_medians("other") == 2.0  # 4 / 2
    assert found.median_of_ratios("other") == 1.0  # of 8, 1, 0.5


@pytest.mark.parametrize("was_on", [True, False])
def test_the_garbage_collector_is_off_in_the_rounds_and_then_as_before(was_on):
    seen = []
    contender = harness.Contender("a", lambda: lambda: seen.append(gc.isenabled()))
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        harness.compare("t", [contender], limit="a", rounds=2)
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert seen[1:] == [False] * 4
    assert after is was_on


def fails_in_a_round():
    calls = iter([None, None])  # the first call and the warm-up work, the timed call does not
    return lambda: next(calls)


def test_the_garbage_collector_is_on_again_after_a_failure():
    assert gc.isenabled()
    with pytest.raises(StopIteration):
        harness.compare("t", [harness.Contender("a", fails_in_a_round)], limit="a")
    assert gc.isenabled()


def missing():
    raise ImportError("No module named\n'peer'")


def test_a_peer_that_cannot_run_is_left_out_with_the_reason(clock):
    contenders = [
        clock.contender("limit", [1]),
        harness.Contender("absent", missing, peer=True),
        harness.Contender("broken", lambda: missing, peer=True),
    ]
    found = harness.compare("t", contenders, limit="limit", clock=clock, rounds=2)
    reason = "ImportError: No module named 'peer'"
    assert [timing.name for timing in found.timings] == ["limit"]
    assert found.skipped == {"absent": reason, "broken": reason}


def test_a_contender_of_ours_that_cannot_run_is_an_error(clock):
    with pytest.raises(ImportError):
        harness.compare("t", [clock.contender("limit", [1]), harness.Contender("ours", missing)], limit="limit")


def with_checksum(clock, name, value, **arguments):
    return clock.contender(name, [1], checksum=lambda result: value, **arguments)


def test_checksums_within_the_tolerance_agree(clock):
    contenders = [
        with_checksum(clock, "limit", -2.0),
        with_checksum(clock, "ours", -2.19),
        clock.contender("mute", [1]),
    ]
    found = harness.compare("t", contenders, limit="limit", tolerance=0.1, clock=clock, rounds=1)
    assert [timing.checksum for timing in found.timings] == [-2.0, -2.19, None]
    assert not any(timing.disagrees for timing in found.timings)


@pytest.mark.parametrize("value", [2.21, float("nan"), -2.0])
def test_a_wrong_checksum_of_ours_is_an_error(clock, value):
    contenders = [with_checksum(clock, "limit", 2.0), with_checksum(clock, "ours", value)]
    with pytest.raises(ValueError, match=r"^ours: checksum .* is not limit's 2\.0\.$"):
        harness.compare("t", contenders, limit="limit", tolerance=0.1, clock=clock)


def test_a_wrong_checksum_of_a_peer_is_said_in_its_row(clock):
    contenders = [with_checksum(clock, "limit", 2.0), with_checksum(clock, "peer", 3.0, peer=True)]
    found = harness.compare("t", contenders, limit="limit", tolerance=0.1, clock=clock, rounds=1)
    assert found["peer"].disagrees
    assert "3 (disagrees)" in harness.report([found], ABOUT)


def test_checksums_can_be_held_against_another_contender_than_the_limit(clock):
    contenders = [
        with_checksum(clock, "limit", 1.0),
        with_checksum(clock, "ours", 2.0),
        with_checksum(clock, "like ours", 2.1, peer=True),
        with_checksum(clock, "unlike ours", 1.0, peer=True),
    ]
    with pytest.raises(ValueError, match=r"^limit: checksum 1\.0 is not ours's 2\.0\.$"):
        harness.compare("t", contenders, limit="limit", tolerance=0.1, checked_against="ours", clock=clock)
    contenders[0] = clock.contender("limit", [1])
    found = harness.compare(
        "t", contenders, limit="limit", tolerance=0.1, checked_against="ours", clock=clock, rounds=1
    )
    assert [timing.name for timing in found.timings if timing.disagrees] == ["unlike ours"]


def test_a_checksum_is_made_of_what_the_first_call_returned(clock):
    seen = []
    contender = clock.contender("a", [1], checksum=lambda result: seen.append(result) or 7.0)
    assert harness.compare("t", [contender], limit="a", clock=clock, rounds=3)["a"].checksum == 7.0
    assert seen == ["a"]


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        ("ab", {"limit": "c"}, "limit must name a contender"),
        ("ab", {"limit": "a", "checked_against": "c"}, "checked_against must name a contender"),
        ("aa", {"limit": "a"}, "different names"),
        ("a", {"limit": "a", "rounds": 0}, "at least 1"),
        ("a", {"limit": "a", "block": 0}, "at least 1"),
    ],
)
def test_refuses_comparisons_that_mean_nothing(clock, names, arguments, message):
    with pytest.raises(ValueError, match=message):
        harness.compare("t", [clock.contender(name, [1]) for name in names], **arguments)


def test_a_peer_cannot_be_the_limit(clock):
    with pytest.raises(ValueError, match="not a peer"):
        harness.compare("t", [clock.contender("a", [1], peer=True)], limit="a")


ABOUT = {
    "command": "python -m benchmarks.topic",
    "date": "2026-01-01 00:00 UTC",
    "machine": {"cpu": "Some CPU", "cores": 2},
    "threads": 1,
    "seed": 0,
    "versions": {"python": "3", "torch": "2"},
}


def test_writes_every_number_and_a_table(clock, tmp_path, capsys):
    contenders = [
        clock.contender("limit", [0.002]),
        clock.contender("ours", [0.003]),
        harness.Contender("absent", missing, peer=True),
    ]
    found = harness.compare("Title", contenders, limit="limit", unit="step", rounds=2, clock=clock)
    harness.write("topic", [found], ABOUT, {"share": 0.5}, ["A note."], tmp_path / "new")
    document = json.loads((tmp_path / "new" / "topic.json").read_text())
    text = (tmp_path / "new" / "topic.md").read_text()
    (comparison,) = document["comparisons"]
    ours = comparison["timings"][1]
    assert document["facts"] == {"share": 0.5}
    assert document["machine"] == ABOUT["machine"]
    assert ours["median_of_ratios"] == pytest.approx(1.5)
    assert len(ours["seconds"]) == 2
    assert "| ours | 3 | 3 |" in text
    assert "| 1.500 | 1.500 |" in text
    assert "| absent | skipped: ImportError: No module named 'peer' |" in text
    assert "- A note." in text
    assert "Some CPU, 2 cores, 1 thread, seed 0; python 3, torch 2." in text
    assert capsys.readouterr().out.strip() in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_further_columns_stand_before_the_checksum_and_may_have_gaps(clock, tmp_path):
    contenders = [clock.contender("limit", [1]), with_checksum(clock, "ours", 7.0)]
    found = harness.compare("Title", contenders, limit="limit", rounds=1, clock=clock)
    found = dataclasses.replace(found, columns={"floor": {"ours": 0.25}, "peak MiB": {"limit": 3.0, "ours": 4.0}})
    harness.write("topic", [found], ABOUT, folder=tmp_path)
    text = (tmp_path / "topic.md").read_text()
    assert "| floor | peak MiB | checksum |" in text
    assert "| 1.000 |  | 3 |  |" in text
    assert "| 1.000 | 0.25 | 4 | 7 |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    (comparison,) = json.loads((tmp_path / "topic.json").read_text())["comparisons"]
    assert comparison["columns"]["floor"] == {"ours": 0.25}


def test_a_table_of_other_things_stands_before_the_notes(tmp_path):
    rows = [["network", "difference"], ["LSTM", "1e-16"]]
    harness.write("topic", [], ABOUT, notes=["A note."], folder=tmp_path, table=rows)
    text = (tmp_path / "topic.md").read_text()
    assert "\n| network | difference |\n|---|---|\n| LSTM | 1e-16 |\n\n- A note.\n" in text


def test_the_context_says_how_to_repeat_the_run_and_names_no_folder(monkeypatch, tmp_path):
    arguments = [
        str(tmp_path / "map_step.py"),
        "--seed",
        "3",
        f"--results={tmp_path}/out",
        "--results",
        f"{tmp_path}/out",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    about = harness.context(argparse.Namespace(threads=2, seed=3), packages=["pytest", "no-such-package"])
    assert about["command"] == "python -m benchmarks.map_step --seed 3 --results=out --results out"
    assert (about["threads"], about["seed"]) == (2, 3)
    assert about["versions"]["pytest"] == pytest.__version__
    assert about["versions"]["no-such-package"] == "not installed"
    assert about["machine"]["cpu"]
    assert about["machine"]["cores"] >= 1
    assert str(tmp_path) not in json.dumps(about)


def test_the_options_have_their_defaults():
    options = harness.parser("What it does.").parse_args([])
    assert (options.threads, options.rounds, options.seed) == (1, 15, 0)
    assert options.results == ROOT / "benchmarks" / "results"
