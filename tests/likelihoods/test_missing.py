"""Missing targets are exactly inert: sums, gradients and curvature are those over the observed entries."""

import math

import pytest
import torch
from torch import Tensor

from posterity.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    Poisson,
    Probit,
    StudentT,
)
from posterity.likelihoods.likelihood import IGNORED

ROWS, SIZE = 5, 4
generator = torch.Generator(torch.get_default_device()).manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


binary = (normal(ROWS, SIZE) > 0).double()
LIKELIHOODS: dict[str, tuple[Likelihood, Tensor, Tensor]] = {
    "gaussian": (Gaussian(0.7), normal(ROWS, SIZE), normal(ROWS, SIZE)),
    "gaussian scales": (Gaussian((0.7, 1.0, 2.0, 3.0)), normal(ROWS, SIZE), normal(ROWS, SIZE)),
    "heteroscedastic": (Heteroscedastic(), normal(ROWS, 2 * SIZE), normal(ROWS, SIZE)),
    "student t": (StudentT(3.0, 0.5), normal(ROWS, SIZE), normal(ROWS, SIZE)),
    "bernoulli": (Bernoulli(), normal(ROWS, SIZE), binary),
    "probit": (Probit(), normal(ROWS, SIZE), binary),
    "poisson": (Poisson(), normal(ROWS, SIZE), normal(ROWS, SIZE).abs().floor()),
    "categorical": (Categorical(), normal(ROWS, 3), torch.arange(ROWS) % 3),
    "tokens": (Categorical(positions=1), normal(ROWS, 3, SIZE), torch.arange(ROWS * SIZE).view(ROWS, SIZE) % 3),
    "pixels": (Categorical(positions=2), normal(ROWS, 3, 2, 2), torch.arange(ROWS * 4).view(ROWS, 2, 2) % 3),
}
each = pytest.mark.parametrize("name", list(LIKELIHOODS))


def with_gaps(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Targets of which some are missing, the whole of row 3, and which are observed."""
    observed = torch.rand(targets.shape, generator=torch.Generator(torch.get_default_device()).manual_seed(1)) < 0.6
    observed[3] = False
    return targets.masked_fill(~observed, math.nan if targets.is_floating_point() else IGNORED), observed


def brute(likelihood: Likelihood, outputs: Tensor, targets: Tensor, observed: Tensor) -> Tensor:
    """log p of each row (..., N), entry by entry through likelihoods of one entry."""
    rows = []
    for row in range(len(targets)):
        axes = 1 + likelihood.positions if isinstance(likelihood, Categorical) else 1
        flat, seen = targets[row].reshape(-1), observed[row].reshape(-1)
        own = outputs.select(outputs.dim() - axes - 1, row).flatten(-axes)  # (..., D)
        total = own.new_zeros(own.shape[:-1])
        for entry in range(len(flat)):
            if not seen[entry]:
                continue
            if isinstance(likelihood, Categorical):
                logits = own.unflatten(-1, (3, -1))[..., entry]
                total = total + logits.log_softmax(-1)[..., int(flat[entry])]
                continue
            if isinstance(likelihood, Heteroscedastic):
                single, f = likelihood, own[..., [entry, entry + len(flat)]]
            else:
                scale = getattr(likelihood, "scale", None)
                single, f = likelihood, own[..., [entry]]
                if isinstance(scale, tuple):
                    single = Gaussian(scale[entry])
            total = total + single.log_prob(f.unsqueeze(-2), flat[entry].reshape(1, 1)).squeeze(-1)
        rows.append(total)
    return torch.stack(rows, -1)


@each
@pytest.mark.parametrize("lead", [(), (2,)])
def test_log_densities_and_gradients(name: str, lead: tuple[int, ...]) -> None:
    likelihood, outputs, targets = LIKELIHOODS[name]
    outputs = (outputs + torch.zeros(*lead, *outputs.shape)).clone().requires_grad_()
    gaps, observed = with_gaps(targets)
    value = likelihood.log_prob(outputs, likelihood.check(outputs[(0,) * len(lead)], gaps))
    wanted = brute(likelihood, outputs, targets, observed)
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
    assert bool((value[..., 3] == 0).all())
    weight = torch.arange(1.0, ROWS + 1.0, dtype=torch.float64)
    slopes = [torch.autograd.grad((v * weight).sum(), outputs, retain_graph=True)[0] for v in (value, wanted)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)
    used = likelihood.used_outputs(outputs, gaps)
    assert used is not None
    assert bool((slopes[0].reshape(*lead, ROWS, -1)[..., ~used] == 0).all())


@each
def test_hessians(name: str) -> None:
    likelihood, outputs, targets = LIKELIHOODS[name]
    gaps, observed = with_gaps(targets)
    hessian = likelihood.output_hessian(outputs, likelihood.check(outputs, gaps))
    for row in range(ROWS):
        one = slice(row, row + 1)

        def negative(flat: Tensor, one: slice = one) -> Tensor:
            return -brute(likelihood, flat.reshape(outputs[one].shape), targets[one], observed[one]).sum()

        wanted = torch.autograd.functional.hessian(negative, outputs[one].reshape(-1))
        torch.testing.assert_close(hessian[row], wanted, rtol=0, atol=1e-10)


@each
@pytest.mark.parametrize("garbage", [1e4, -1e4, math.inf, -math.inf])
def test_outputs_at_missing_targets_do_not_matter(name: str, garbage: float) -> None:
    likelihood, outputs, targets = LIKELIHOODS[name]
    if isinstance(likelihood, Categorical) and math.isinf(garbage):
        garbage = math.copysign(1e30, garbage)  # logits must be finite for a softmax
    gaps, _ = with_gaps(targets)
    gaps = likelihood.check(outputs, gaps)
    used = likelihood.used_outputs(outputs, gaps)
    assert used is not None
    spoilt = torch.where(used.reshape(outputs.shape), outputs, garbage).requires_grad_()
    value = likelihood.log_prob(spoilt, gaps)
    torch.testing.assert_close(value, likelihood.log_prob(outputs, gaps), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(value.sum(), spoilt)
    assert bool(torch.isfinite(grad).all())
    assert bool((grad.reshape(ROWS, -1)[~used] == 0).all())


@each
def test_nothing_observed(name: str) -> None:
    likelihood, outputs, targets = LIKELIHOODS[name]
    gaps = torch.full_like(targets, math.nan if targets.is_floating_point() else IGNORED)
    leaf = outputs.clone().requires_grad_()
    value = likelihood.log_prob(leaf, likelihood.check(outputs, gaps))
    assert value.tolist() == [0.0] * ROWS
    assert torch.autograd.grad(value.sum(), leaf)[0].abs().max() == 0


@each
def test_complete_targets_keep_their_bits(name: str) -> None:
    likelihood, outputs, targets = LIKELIHOODS[name]
    targets = likelihood.check(outputs, targets)
    value = likelihood.log_prob(outputs, targets)
    entries = likelihood.entry_log_prob(outputs, targets)
    assert torch.equal(value, entries.reshape(ROWS, -1).sum(-1) if entries.dim() > 1 else entries)
    torch.testing.assert_close(likelihood.total_log_prob(outputs, targets), value.sum(), rtol=1e-14, atol=0)


def test_expected_log_density_of_gaussian_outputs() -> None:
    likelihood, mean, targets = LIKELIHOODS["gaussian scales"]
    variance = normal(ROWS, SIZE).square()
    gaps, observed = with_gaps(targets)
    scale = torch.tensor(likelihood.scale, dtype=torch.float64)
    each = -0.5 * ((targets - mean).square() + variance) / scale**2 - scale.log() - 0.5 * math.log(2 * math.pi)
    wanted = torch.where(observed, each, 0.0)
    torch.testing.assert_close(likelihood.expected_log_prob(mean, variance, gaps), wanted.sum(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(likelihood.expected_entry_log_prob(mean, variance, gaps), wanted, rtol=0, atol=1e-12)


def test_integers_of_binary_labels() -> None:
    labels = Bernoulli().check(torch.zeros(3, 1), torch.tensor([0, IGNORED, 1]))
    assert labels[:, 0].isnan().tolist() == [False, True, False]


def test_custom_densities_have_no_entries() -> None:
    custom = Custom(lambda f, y: -(f - y).square().sum(-1))
    assert custom.observed(torch.zeros(2, 1)) is None
    with pytest.raises(TypeError, match="one weight for each row"):
        custom.entry_log_prob(torch.zeros(2, 1), torch.zeros(2, 1))
