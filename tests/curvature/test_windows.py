"""Convolutions of any shape, by chance, against dense autodiff."""

import torch
from curvaturecases import FLOAT64, close, made, truth
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from posterity.curvature import GaussNewton
from posterity.curvature.survey import survey
from posterity.numerics import Key

pair = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    kernel=pair,
    stride=pair,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.integers(1, 2),
    channels=pair,
    size=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    bias=st.booleans(),
    axes=st.integers(1, 2),
)
def test_any_window(kernel, stride, padding, dilation, groups, channels, size, bias, axes) -> None:
    kernel, stride, padding, dilation, size = (t[:axes] for t in (kernel, stride, padding, dilation, size))
    spans = [
        (length + 2 * p - d * (k - 1) - 1) // s + 1
        for length, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
    ]
    assume(min(spans) > 0)
    assume(all(length + 2 * p > d * (k - 1) for length, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    build = nn.Conv1d if axes == 1 else nn.Conv2d
    count = groups * channels[1] * torch.Size(spans).numel()
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}

    def network() -> nn.Module:
        layer = build(groups * channels[0], groups * channels[1], kernel, **options)
        return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(count, 2))

    case = truth(made(network), Key(1).normal((3, groups * channels[0], *size), FLOAT64))
    assert not survey(case.joint, case.batch.inputs).explicit
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
    close(GaussNewton().diagonal(case.joint, case.theta, case.batch, None), case.matrix.diagonal())
