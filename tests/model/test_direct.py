"""Chains of linear layers without autograd's graph: the bits of autograd, for any part of the model around them."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.data import as_data

ROWS = 60
ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, lambda: nn.GELU(approximate="tanh"), nn.Identity]


class Own(nn.Module):
    """The same function as its `Sequential`, which is not known to be a chain."""

    def __init__(self, chain: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(chain)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def joints(chain: nn.Sequential, likelihood: Likelihood, *patterns: str) -> tuple[po.Joint, po.Joint]:
    prior = po.priors.Normal(0.7)
    pair = [po.Joint(module, likelihood, prior, num_data=ROWS) for module in (chain, Own(chain))]
    if patterns:
        pair = [
            joint.with_weights(*(prefix + p for p in patterns))
            for joint, prefix in zip(pair, ("", "layers."), strict=True)
        ]
    return pair[0], pair[1]


def chain_of(activation: object, bias: bool = True, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    make: type[nn.Module] = activation  # type: ignore[assignment]
    return nn.Sequential(
        nn.Linear(4, 7, bias=bias), make(), nn.Linear(7, 6, bias=bias), make(), nn.Linear(6, outputs, bias=bias)
    )


def labelled(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    key = po.Key(1)
    return key.normal((ROWS, 4), dtype), (key.fold("y").uniform((ROWS,)) * 3).long()


def assert_equal(first: Tensor, second: Tensor) -> None:
    """Bits on a CPU; on a GPU a product may be summed in another order where its result lies at another address."""
    if first.is_cuda:
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
    else:
        assert torch.equal(first, second)


def assert_same_bits(joint: po.Joint, own: po.Joint, data: tuple[Tensor, ...], direct: bool = True) -> None:
    """Compare value and gradient, of data alone and with the prior, after a first call has been looked at."""
    thetas, results = [], []
    for each in (joint, own):
        batch = each.checked(as_data(data)).first()
        thetas.append(each.initial())
        each.value_and_grad(thetas[-1], batch)
        assert (each.network.direct(batch.inputs) is not None) == (direct and each is joint)
        out = torch.full_like(thetas[-1], torch.nan)
        value, grad, _ = each.data_value_and_grad(thetas[-1], batch, {}, out)
        assert grad is out
        total, slope, _ = each.value_and_grad(thetas[-1], batch, {}, out=torch.full_like(out, torch.nan))
        plain, gathered, _ = each.value_and_grad(thetas[-1], batch, {})
        results.append((value, out, total, slope, plain, gathered))
    assert torch.equal(thetas[0], thetas[1])
    assert results[0][1].abs().max() > 0
    for first, second in zip(*results, strict=True):
        assert_equal(first, second)
    assert_equal(results[0][2], results[0][4])
    assert_equal(results[0][3], results[0][5])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_have_the_bits_of_autograd(activation: object, bias: bool) -> None:
    chain = chain_of(activation, bias)
    assert_same_bits(*joints(chain, po.likelihoods.Categorical()), labelled())


@pytest.mark.parametrize(
    "likelihood",
    [po.likelihoods.Gaussian(scale=0.3), po.likelihoods.Gaussian(), po.likelihoods.StudentT(scale=0.5)],
    ids=["known noise", "learnt noise", "heavy tails"],
)
@pytest.mark.parametrize("missing", [False, True])
def test_likelihoods_of_numbers(likelihood: Likelihood, missing: bool) -> None:
    x, _ = labelled(torch.float64)
    y = x[:, :3].clone()
    y[3, 1] = torch.nan if missing else 0.0
    assert_same_bits(*joints(chain_of(nn.Tanh).double(), likelihood), (x, y))


def test_missing_labels_and_weights() -> None:
    x, y = labelled()
    y[::7] = -100
    pair = joints(chain_of(nn.ReLU), po.likelihoods.Categorical())
    assert_same_bits(*pair, (x, y))
    assert_same_bits(*pair, (x, y, torch.arange(ROWS) % 3 * 1.0))


def test_what_needs_autograd_has_it() -> None:
    x, y = labelled()
    chain = chain_of(nn.ReLU)
    likelihood = po.likelihoods.Categorical()
    assert_same_bits(*joints(chain, likelihood, "4.*"), (x, y), direct=False)  # frozen layers
    in_place = chain_of(lambda: nn.ReLU(inplace=True))
    assert_same_bits(*joints(in_place, likelihood), (x, y), direct=False)
    square = nn.Linear(4, 4)
    tied = nn.Sequential(square, nn.Tanh(), square, nn.Linear(4, 3))
    assert_same_bits(*joints(tied, likelihood), (x, y), direct=False)
    joint, _ = joints(chain, likelihood)
    batch = joint.checked(as_data((x, y))).first()
    joint.value_and_grad(joint.initial(), batch)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert joint.network.direct(batch.inputs) is None
    assert joint.network.direct(x.unsqueeze(0)) is None


@pytest.mark.parametrize("kind", [po.methods.MAP, po.methods.MeanField])
def test_runs_of_a_chain_and_of_an_own_module_agree_to_the_bit(kind: type) -> None:
    x, y = labelled()
    method = kind(steps=25, batch_size=16, optimizer=po.optim.Adam(0.01))
    chain, own = (
        po.infer(method, joint, (x, y))[1] for joint in joints(chain_of(nn.ReLU), po.likelihoods.Categorical())
    )
    assert_equal(chain["loss"], own["loss"])


@dataclass(frozen=True)
class Half(po.likelihoods.Categorical):
    """Labels that count half."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * super().log_prob(outputs, targets)

    def total_log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * super().total_log_prob(outputs, targets)


def test_a_subclass_has_the_gradient_of_its_own_density() -> None:
    joint, whole = (
        po.Joint(chain_of(nn.Tanh), noise, po.priors.Normal(0.7), num_data=ROWS)
        for noise in (Half(), po.likelihoods.Categorical())
    )
    theta = po.Key(4).normal((joint.size,))
    rows = as_data(labelled()).first()
    for _ in range(2):  # the first call looks at the network
        half, half_grad, _ = joint.data_value_and_grad(theta, joint.check(rows), out=torch.empty_like(theta))
        value, grad, _ = whole.data_value_and_grad(theta, whole.check(rows), out=torch.empty_like(theta))
    torch.testing.assert_close(half, 0.5 * value)
    torch.testing.assert_close(half_grad, 0.5 * grad)
