"""What sliders, costs and boxes say in a real browser is what posterity.metrics says of the same predictions."""

import pytest
import torch
from chromiumpages import BROWSER, asked

from posterity import metrics
from posterity.numerics import Key
from posterity.predictive import AffinePredictive, ClassPredictive, ExponentialPredictive, GaussianPredictive
from posterity.predictive.normals import NormalsPredictive
from posterity.predictive.scaling import TemperatureScaling
from posterity.report import embedded
from posterity.report.html import page
from posterity.report.sections import class_sections, methods_chooser, numbers_sections

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"),
]
ROWS = 300
MOVE = """
    const set = (id, value) => {
        const control = document.getElementById(id);
        control.value = value;
        control.dispatchEvent(new Event("input", { bubbles: true }));
    };
    const read = name => [...document.querySelectorAll(`[data-figure="${name}"] tbody tr`)].map(row =>
        Object.fromEntries([["method", row.querySelector("th").textContent],
            ...[...row.querySelectorAll("data")].map(item => [item.dataset.key, Number(item.value)])]));
"""


def numbers(log=False):
    """Predictives of numbers, normal and not, and targets (N, 1)."""
    x = Key(1).normal((ROWS, 1), torch.float64)
    y = 2.0 * x + 1.5 * Key(2).normal((ROWS, 1), torch.float64)
    scale = 0.2 + x.abs()
    gaussian = GaussianPredictive(2.0 * x, scale.square(), torch.ones(1, dtype=torch.float64))
    means = torch.stack([2.0 * x - 1.0, 2.0 * x + 2.0, 0.0 * x])
    scales = torch.stack([scale, 0.5 * scale, scale + 1.0])
    mixture = NormalsPredictive(means, scales, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 0.0 * x)
    shift, factor = (3.0, 0.1) if log else (71538.0657, 4321.0)
    if log:
        mixture = gaussian
    known = {"normal": gaussian, "mixture": mixture}
    return {w: AffinePredictive(p, shift, factor) for w, p in known.items()}, known, y, shift, factor


def numbers_page(log=False):
    predictives, _, y, shift, factor = numbers(log)
    packed = embedded.number_numbers(predictives, (shift + factor * y)[:, 0], embedded.LEVELS, log=log)
    packed |= {"log": log, "unit": "y", "rows": [f"row {n}" for n in range(ROWS)], "figures": {}}
    packed["methods"] = [{"word": w, "label": w, **packed["methods"][w]} for w in predictives]
    both = methods_chooser([(w, w) for w in predictives], [*predictives])
    return page("page", [both, *numbers_sections(embedded.LEVELS, 0.95, "All.", has_line=False)], packed)


@pytest.mark.parametrize("log", [False, True])
def test_the_level_moves_coverage_and_width_as_metrics_have_them(tmp_path, log):
    script = f"""{MOVE} return [...Array({len(embedded.LEVELS)}).keys()].map(level => {{
        set("level", level); return read("levels"); }});"""
    answers, console = asked(tmp_path, numbers_page(log), script)
    assert console == []
    _, known, y, shift, factor = numbers(log)
    assert len(answers) == len(embedded.LEVELS) >= 10
    for level, rows in zip(embedded.LEVELS, answers, strict=True):
        assert [row["method"] for row in rows] == list(known)
        for row, pred in zip(rows, known.values(), strict=True):
            own, targets = (
                (ExponentialPredictive(pred, shift, factor), (shift + factor * y).exp()) if log else (pred, y)
            )
            width = metrics.interval_width(own, targets, level) * (1.0 if log else factor)
            assert row["coverage"] == pytest.approx(metrics.coverage(own, targets, level), abs=1e-6)
            assert row["width"] == pytest.approx(width, rel=1e-6)


def classes(count, rows=ROWS):
    """Predictives of classes, one of them far too sure, and labels."""
    logits = 2.0 * Key(3).normal((rows, count), torch.float64)
    labels = (logits + 2.0 * Key(4).normal((rows, count), torch.float64)).argmax(1)
    sure = ClassPredictive.of_log_probs((9.0 * logits).log_softmax(-1)[None], torch.float64)
    return {"calm": ClassPredictive(logits.softmax(-1)), "sure": sure}, labels


def class_page(predictives, labels, names):
    packed = embedded.class_numbers(predictives, labels)
    packed |= {"classes": names, "rows": [f"row {n}" for n in range(len(labels))], "figures": {}}
    packed["methods"] = [{"word": w, "label": w, **packed["methods"][w]} for w in predictives]
    both = methods_chooser([(w, w) for w in predictives], [*predictives])
    return page("page", [both, *class_sections(names, "All.", has_map=False)], packed)


@pytest.mark.parametrize("count", [2, 10])
def test_the_temperature_moves_nll_and_ece_as_metrics_have_them(tmp_path, count):
    predictives, labels = classes(count)
    steps = [-16, -12, -8, -5, -2, 0, 1, 3, 6, 10, 16]
    script = f"""{MOVE} return {steps}.map(step => {{ set("temperature", step); return read("scaled"); }});"""
    text = class_page(predictives, labels, [f"c{index}" for index in range(count)])
    answers, console = asked(tmp_path, text, script)
    assert console == []
    for step, rows in zip(steps, answers, strict=True):
        for row, pred in zip(rows, predictives.values(), strict=True):
            scaled = TemperatureScaling(2.0 ** (step / 8)).apply(pred)
            assert row["nll"] == pytest.approx(metrics.negative_log_likelihood(scaled, labels), abs=1e-6, rel=1e-6)
            assert row["ece"] == pytest.approx(metrics.expected_calibration_error(scaled, labels), abs=1e-6)
            assert row["accuracy"] == pytest.approx(metrics.accuracy(scaled, labels), abs=1e-6)
        if step == 0:
            plain = [metrics.negative_log_likelihood(pred, labels) for pred in predictives.values()]
            assert [row["nll"] for row in rows] == pytest.approx(plain, abs=1e-6)


def test_threshold_and_costs_decide_as_metrics_do(tmp_path):
    predictives, labels = classes(2)
    cuts = [1, 5, 10, 20, 35, 50, 60, 75, 90, 99]
    script = f"""{MOVE} set("alarm", 2); set("miss", 7.5);
        return {cuts}.map(cut => {{ set("threshold", cut); return read("decided"); }});"""
    answers, console = asked(tmp_path, class_page(predictives, labels, ["no", "yes"]), script)
    assert console == []
    for cut, rows in zip(cuts, answers, strict=True):
        for row, pred in zip(rows, predictives.values(), strict=True):
            table = metrics.confusion_matrix(pred, labels, [[0.0, cut / 100], [1 - cut / 100, 0.0]])
            counts = [row[key] for key in ("rejections", "alarms", "misses", "hits")]
            assert counts == table.flatten().tolist()
            assert row["cost"] == pytest.approx((2 * counts[1] + 7.5 * counts[2]) / ROWS, abs=1e-9)
    wise = [[0.0, 1.0], [3.0, 0.0]]  # cut at 1 / 4
    script = f"""{MOVE} set("alarm", 1); set("miss", 3); set("threshold", 25); return read("decided");"""
    rows, _ = asked(tmp_path, class_page(predictives, labels, ["no", "yes"]), script)
    for row, pred in zip(rows, predictives.values(), strict=True):
        assert row["cost"] == pytest.approx(metrics.mean_cost(pred, labels, wise), abs=1e-9)


def test_boxes_choose_the_methods(tmp_path):
    predictives, labels = classes(2)
    script = """document.getElementById("show-calm").click();
        return [...document.querySelectorAll('[data-figure="scaled"] tbody th')].map(cell => cell.textContent);"""
    assert asked(tmp_path, class_page(predictives, labels, ["no", "yes"]), script)[0] == ["sure"]


def test_rows_beyond_the_cap_are_left_out_evenly():
    predictives, _ = classes(2, 5000)
    chosen = embedded.chosen_rows([*predictives.values()])
    assert len(chosen) == embedded.MOST_ROWS
    assert (int(chosen[0]), int(chosen[-1])) == (0, 4999)
    assert set(chosen.diff().tolist()) <= {5, 6}
    many = ClassPredictive(torch.full((5000, 400), 1 / 400))
    assert len(embedded.chosen_rows([many])) == int(embedded.MOST_BYTES / (400 * 16 / 3))
