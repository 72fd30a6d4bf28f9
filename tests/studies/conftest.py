"""Fixtures of the tests of studies."""

import pytest

from posterity.inference import task


@pytest.fixture
def fitted(monkeypatch):
    """How many fits each call of `infer` has made."""
    sizes, infer = [], task.infer

    def counted(method, joint, *words, **options):
        sizes.append(joint.num_members or 1)
        return infer(method, joint, *words, **options)

    monkeypatch.setattr(task, "infer", counted)
    return sizes
