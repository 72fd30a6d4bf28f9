"""Images with channels last, as a GPU prefers them: here on a CPU, for modules that take them and that do not."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity as po
from posterity.model import layouts
from posterity.model.data import as_data

ROWS, CLASSES = 12, 3


class Own(nn.Module):
    """Convolutions with batch norm and a shortcut; `split` is how the images become rows."""

    def __init__(self, split: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.out = nn.Linear(4 * 9, CLASSES)
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        x = F.max_pool2d(F.relu(x + self.norms[1](self.second(x))), 2)
        out: Tensor = self.out(x.flatten(1) if self.split == "flatten" else x.view(len(x), -1))
        return out


def joint_of(split: str) -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    key = po.Key(3)
    x = key.normal((ROWS, 2, 6, 6), torch.float64)
    y = (key.fold("y").uniform((ROWS,)) * CLASSES).long()
    module = Own(split).double()
    return po.Joint(module, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=ROWS), (x, y)


def results(split: str) -> dict[str, Tensor]:
    joint, data = joint_of(split)
    batch, theta = joint.checked(as_data(data)).first(), joint.initial()
    value, grad, buffers = joint.value_and_grad(theta, batch, joint.starting_buffers(theta))
    method = po.methods.Laplace(structure=po.curvature.Kronecker(), tuning=None)
    posterior, _ = po.infer(method, joint, data)
    probs = posterior.predict(data[0], integrator=po.predictive.Probit()).probs
    return {"value": value, "grad": grad, "outputs": joint.outputs(theta, data[0]), "probs": probs, **buffers}


@pytest.mark.cpu
@pytest.mark.parametrize("split", ["flatten", "view"])
def test_layouts_compute_the_same(
    split: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, seen = results(split), []
    convolve = F.conv2d
    monkeypatch.setattr(layouts, "CHANNELS_LAST_ON", ("cpu",))

    def noted(images: Tensor, *given: object) -> Tensor:
        seen.append(images.is_contiguous(memory_format=torch.channels_last))
        return convolve(images, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "conv2d", noted)
    with caplog.at_level(logging.INFO, "posterity"):
        last = results(split)
    assert any(seen)
    assert seen[-1] == (split == "flatten")
    assert caplog.text.count("images keep their memory layout") == (split == "view")
    assert plain.keys() == last.keys()
    for name, value in plain.items():
        torch.testing.assert_close(last[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_other_errors_are_those_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    joint, data = joint_of("flatten")
    monkeypatch.setattr(layouts, "CHANNELS_LAST_ON", ("cpu", "cuda"))
    with pytest.raises(RuntimeError, match="channels"):
        joint.outputs(joint.initial(), data[0][:, :1])
    assert not joint.network._images.refusals
