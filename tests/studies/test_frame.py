"""What the frame shows while a study runs."""

import pytest

from posterity.inference import callbacks
from posterity_studies import frame
from posterity_studies.options import Settings
from posterity_studies.surface import study as surface

pytestmark = pytest.mark.cpu


class Display:
    """What a bar of rich is asked to show."""

    def __init__(self):
        self.at = []

    def __enter__(self):
        return self

    def __exit__(self, *others):
        pass

    def add_task(self, name, total, completed):
        self.total = total
        return 0

    def update(self, task, completed):
        self.at.append(completed)


def test_the_bar_of_a_study_goes_by_the_seconds_of_its_parts(monkeypatch):
    display = Display()
    monkeypatch.setattr(callbacks, "shows_progress", lambda wanted: wanted is None)
    monkeypatch.setattr(callbacks, "_rich_bar", lambda **others: display)
    with frame.progress("study", (2.0, 5.0, 1.0), quiet=False) as begins:
        for _ in range(3):
            begins()
    assert display.total == 8.0
    assert display.at == [2.0, 7.0]
    with frame.progress("study", (2.0, 5.0), quiet=True) as begins:
        begins()
        list(callbacks.tracked([1, 2], "fits"))
    assert display.at == [2.0, 7.0]


def test_a_study_reports_each_of_its_parts():
    lines = []
    surface.run(Settings(), report=lines.append)
    assert len(surface.PARTS) == len(lines) + 1  # the figures come last
