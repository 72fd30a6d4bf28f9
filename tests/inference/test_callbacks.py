"""Validation, early stopping and the progress bar."""

import dataclasses
import sys

import pytest
import torch
from contracts.cases import classification, labels, numbers, regression
from killedruns import KillAfter, KilledError

import posterity as po
from posterity.errors import BadData
from posterity.inference import Callback, Checkpoint, EarlyStopping, Validation, callbacks
from posterity.inference.callbacks import bar, tick, tracked
from posterity.methods import MAP, Laplace
from posterity.metrics import negative_log_likelihood
from posterity.numerics import Key
from posterity.optim import SGD, Adam

FLOAT64 = torch.float64
OVERFITS = MAP(steps=120, batch_size=None, optimizer=SGD(0.05))


def held_out():
    x = Key(20).normal((30, 3), FLOAT64, "cpu").to(torch.get_default_device())
    return x, (x[:, 0] > 0).long()


def mislabelled():
    """Rows of which a fifth tell the wrong thing, so that learning them by heart harms."""
    x, _ = labels(FLOAT64)
    return x, ((x[:, 0] > 0) ^ (torch.arange(len(x)) % 5 == 0)).long()


def loose():
    """A prior so wide that training rows can be learnt by heart."""
    return dataclasses.replace(classification(FLOAT64), prior=po.priors.Normal(30.0))


class Watch(Callback):
    """Keeps theta after every step."""

    def __init__(self):
        self.thetas = {}

    def after_step(self, run):
        self.thetas[run.step] = run.state.theta.clone()


@pytest.mark.parametrize(("every", "expected"), [(4, [4, 8, 10]), (5, [5, 10]), (1, list(range(1, 11))), (99, [10])])
def test_validation_is_recorded_at_its_steps_and_the_last(every, expected):
    _, trace = po.infer(
        MAP(steps=10), classification(FLOAT64), labels(FLOAT64), validation=held_out(), callbacks=[Validation(every)]
    )
    assert trace.steps("validation_nll").tolist() == expected


@pytest.mark.parametrize(("steps", "every"), [(10, 1), (100, 2), (149, 2)])
def test_validation_looks_about_fifty_times_by_itself(steps, every):
    _, trace = po.infer(MAP(steps=steps), classification(FLOAT64), labels(FLOAT64), validation=held_out())
    expected = sorted({*range(every, steps + 1, every), steps})
    assert trace.steps("validation_nll").tolist() == expected


def test_validation_is_the_score_of_the_state_after_that_step():
    x, y = held_out()
    _, trace = po.infer(
        MAP(6, optimizer=Adam()), classification(FLOAT64), labels(FLOAT64), validation=(x, y), callbacks=[Validation(3)]
    )
    for steps, value in zip((3, 6), trace["validation_nll"], strict=True):
        q, _ = po.infer(MAP(steps, optimizer=Adam()), classification(FLOAT64), labels(FLOAT64))
        assert float(value) == pytest.approx(negative_log_likelihood(q.predict(x), y), rel=1e-12)


def test_validation_weighs_its_rows():
    x, y = held_out()
    weights = torch.rand(30, generator=Key(1).generator(), dtype=FLOAT64)
    q, trace = po.infer(
        MAP(steps=2), classification(FLOAT64), labels(FLOAT64), validation=(x, y, weights), callbacks=[Validation(2)]
    )
    expected = -(weights * q.predict(x).log_prob(y)).sum() / weights.sum()
    assert float(trace["validation_nll"]) == pytest.approx(float(expected), rel=1e-12)


def test_validation_comes_in_parts_as_in_one(monkeypatch):
    from posterity.inference import validator

    def score():
        return po.infer(MAP(steps=2), classification(FLOAT64), labels(FLOAT64), validation=held_out())[1][
            "validation_nll"
        ]

    whole = score()
    monkeypatch.setattr(validator, "ROWS", 7)
    torch.testing.assert_close(score(), whole, rtol=1e-12, atol=0.0)


def test_each_member_is_validated():
    start = classification(FLOAT64).initial() + 0.5 * Key(3).normal((3, 26), FLOAT64)
    together, trace = po.infer(
        MAP(steps=2), classification(FLOAT64), labels(FLOAT64), start=start, validation=held_out()
    )
    assert trace["validation_nll"].shape == (2, 3)
    x, y = held_out()
    for index in range(3):
        expected = negative_log_likelihood(together.member(index).predict(x), y)
        assert float(trace["validation_nll"][-1, index]) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="stops one run, and this one has 3 members"):
        po.infer(
            MAP(steps=2),
            classification(FLOAT64),
            labels(FLOAT64),
            start=start,
            validation=held_out(),
            callbacks=[EarlyStopping()],
        )


def test_a_sum_over_rows_is_validated_when_it_is_complete():
    _, trace = po.infer(
        Laplace(tuning=None, batch_size=6), classification(FLOAT64), labels(FLOAT64), validation=held_out()
    )
    assert trace.steps("validation_nll").tolist() == [4]


def test_validation_does_not_change_the_run():
    plain, _ = po.infer(MAP(steps=8, batch_size=5), classification(FLOAT64), labels(FLOAT64))
    watched, _ = po.infer(MAP(steps=8, batch_size=5), classification(FLOAT64), labels(FLOAT64), validation=held_out())
    assert torch.equal(plain.point(), watched.point())


def test_early_stopping_goes_back_to_the_best_state():
    watch = Watch()
    q, trace = po.infer(
        OVERFITS, loose(), mislabelled(), validation=held_out(), callbacks=[EarlyStopping(patience=6), watch]
    )
    scores, steps = trace["validation_nll"], trace.steps("validation_nll").tolist()
    best = int(scores.argmin())
    assert 10 < steps[best] < steps[-1] < OVERFITS.steps
    assert len(scores) - 1 - best == 6  # looks without an improvement
    assert torch.equal(q.point(), watch.thetas[steps[best]])
    assert not torch.equal(q.point(), watch.thetas[steps[-1]])
    assert len(trace["loss"]) == steps[-1]


@pytest.mark.parametrize("least", [0.0, 0.01])
def test_small_improvements_do_not_count(least):
    _, trace = po.infer(
        OVERFITS, loose(), mislabelled(), validation=held_out(), callbacks=[EarlyStopping(patience=4, least=least)]
    )
    best, looks, expected = float("inf"), 0, 0
    for value in trace["validation_nll"].tolist():
        best, looks = (value, 0) if value < best - least else (best, looks + 1)
        expected += 1
        if looks == 4:
            break
    assert len(trace["validation_nll"]) == expected


def test_early_stopping_at_the_end_of_the_steps_gives_the_best_state_too():
    watch = Watch()
    q, trace = po.infer(
        OVERFITS, loose(), mislabelled(), validation=held_out(), callbacks=[watch, EarlyStopping(patience=1000)]
    )
    best = int(trace.steps("validation_nll")[trace["validation_nll"].argmin()])
    assert best < OVERFITS.steps == len(trace["loss"])
    assert torch.equal(q.point(), watch.thetas[best])


@pytest.mark.parametrize("kill", [3, 30, 37])
def test_early_stopping_resumes_exactly(kill, tmp_path):
    def fit(**options):
        hooks = [EarlyStopping(patience=6), *options.pop("callbacks", ())]
        return po.infer(OVERFITS, loose(), mislabelled(), validation=held_out(), callbacks=hooks, **options)

    whole, whole_trace = fit()
    assert kill < len(whole_trace["loss"])
    with pytest.raises(KilledError):
        fit(checkpoint=Checkpoint(tmp_path, steps=1), callbacks=[KillAfter(kill)])
    resumed, trace = fit(checkpoint=Checkpoint(tmp_path, steps=1))
    assert torch.equal(resumed.point(), whole.point())
    assert torch.equal(trace["validation_nll"], whole_trace["validation_nll"])
    assert torch.equal(trace["loss"], whole_trace["loss"])
    finished, again = fit(checkpoint=tmp_path)  # stopped early, so nothing is left to do
    assert torch.equal(finished.point(), whole.point())
    assert torch.equal(again["loss"], whole_trace["loss"])


def test_a_plain_function_is_called_after_every_step_and_may_stop_the_run():
    seen = []

    def watch(run):
        seen.append((run.step, float(run.trace.recent("loss", 1)[0])))
        if run.step == 4:
            run.stopped = "enough"

    _, trace = po.infer(MAP(steps=9, optimizer=Adam()), regression(FLOAT64), numbers(FLOAT64), callbacks=[watch])
    assert seen == list(zip([1, 2, 3, 4], trace["loss"].tolist(), strict=True))
    with pytest.raises(TypeError, match=r"or of functions of the run\. Got 3 in it"):
        po.infer(MAP(steps=9), regression(FLOAT64), numbers(FLOAT64), callbacks=[3])


def test_a_callback_may_serve_again():
    stopping = EarlyStopping(patience=6)
    options = {"validation": held_out(), "callbacks": [stopping]}
    first, _ = po.infer(OVERFITS, loose(), mislabelled(), **options)
    second, _ = po.infer(OVERFITS, loose(), mislabelled(), **options)
    assert torch.equal(first.point(), second.point())
    worse, trace = po.infer(MAP(steps=1, optimizer=SGD(1e-9)), loose(), mislabelled(), **options)
    assert not torch.equal(worse.point(), first.point())
    assert len(trace["loss"]) == 1


def test_the_order_of_callbacks_does_not_matter_to_early_stopping():
    one, one_trace = po.infer(
        OVERFITS, loose(), mislabelled(), validation=held_out(), callbacks=[EarlyStopping(3), Validation(2)]
    )
    two, two_trace = po.infer(
        OVERFITS, loose(), mislabelled(), validation=held_out(), callbacks=[Validation(2), EarlyStopping(3)]
    )
    assert torch.equal(one_trace["validation_nll"], two_trace["validation_nll"])
    assert len(one_trace["loss"]) < OVERFITS.steps
    assert torch.equal(one.point(), two.point())


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"EarlyStopping\.patience must be a positive whole number\. Got 0"):
        EarlyStopping(patience=0)
    with pytest.raises(ValueError, match=r"EarlyStopping\.least must be a finite number of at least 0\. Got -0\.1"):
        EarlyStopping(least=-0.1)
    with pytest.raises(ValueError, match=r"Validation\.every must be a positive whole number\. Got 0"):
        Validation(0)


def test_the_bar_is_on_standard_error_alone(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    plain, _ = po.infer(MAP(steps=12), regression(FLOAT64), numbers(FLOAT64), progress=False)
    assert capsys.readouterr() == ("", "")
    barred, _ = po.infer(MAP(steps=12), regression(FLOAT64), numbers(FLOAT64), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "MAP" in err
    assert "12/12" in err
    assert "loss" in err
    assert torch.equal(plain.point(), barred.point())


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_shows_by_itself_on_a_terminal(capsys, monkeypatch, terminal):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    po.infer(MAP(steps=3), regression(FLOAT64), numbers(FLOAT64))
    out, err = capsys.readouterr()
    assert out == ""
    assert ("3/3" in err) == terminal


def test_a_bar_tells_how_long_it_will_take(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert list(tracked([1, 2, 3], "things")) == [1, 2, 3]
    err = capsys.readouterr().err
    assert "things" in err
    assert "3/3" in err
    assert "left" in err


def test_a_bar_inside_another_moves_that_one(monkeypatch):
    """One bar is on the screen, and it never goes back, whatever runs inside; `False` keeps all others away."""
    at = []
    monkeypatch.setattr(callbacks, "shows_progress", lambda wanted: wanted is not False and not callbacks.moves_bar())
    monkeypatch.setattr(callbacks, "_rich_bar", lambda **others: _Display(at))
    with bar("outer", 2) as outer:
        for _ in tracked(range(4), "inner"):
            po.infer(MAP(steps=3), regression(FLOAT64), numbers(FLOAT64), callbacks=[callbacks.ProgressBar()])
        tick()
        with bar("another", 2) as inner:
            inner.reach(1)
            inner.reach(0)
        outer.advance()
    assert at == sorted(at)
    assert at[-1] == 2
    assert any(0 < value < 1 for value in at)
    assert any(1 < value < 2 for value in at)
    at.clear()
    with bar("none", 1, wanted=False):
        list(tracked(range(3), "inner"))
    assert at == []


class _Display:
    """What a bar of rich is asked to show."""

    def __init__(self, at):
        self._at = at

    def __enter__(self):
        return self

    def __exit__(self, *others):
        pass

    def add_task(self, name, total, completed):
        return 0

    def update(self, task, completed):
        self._at.append(completed)


def test_the_bar_goes_away_when_a_run_fails(monkeypatch):
    from posterity.inference import ProgressBar

    ended = []
    monkeypatch.setattr(ProgressBar, "end", lambda self, run: ended.append(self._progress.stop()))
    with pytest.raises(KilledError):
        po.infer(MAP(steps=3), regression(FLOAT64), numbers(FLOAT64), progress=True, callbacks=[KillAfter(2)])
    assert ended == [None]


def test_the_bar_may_come_and_go_between_sessions(tmp_path):
    """A run begun at a terminal and taken up by a batch job is the same run."""
    whole, _ = po.infer(MAP(steps=6), regression(FLOAT64), numbers(FLOAT64))
    checkpoint = Checkpoint(tmp_path, steps=1)
    with pytest.raises(KilledError):
        po.infer(
            MAP(steps=6),
            regression(FLOAT64),
            numbers(FLOAT64),
            progress=True,
            callbacks=[KillAfter(4)],
            checkpoint=checkpoint,
        )
    resumed, _ = po.infer(MAP(steps=6), regression(FLOAT64), numbers(FLOAT64), progress=False, checkpoint=checkpoint)
    assert torch.equal(resumed.point(), whole.point())


def test_validation_rows_are_shared_by_the_members():
    rows = po.as_data([t.expand(2, *t.shape) for t in held_out()], per_member=True)
    with pytest.raises(BadData, match=r"the same for all members\. Pass them without a member axis"):
        po.infer(MAP(steps=2), classification(FLOAT64), labels(FLOAT64), validation=rows)
