"""Laplace posteriors of recurrent networks: predictions against row by row autograd in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.curvature import Diagonal, Full, GaussNewton, Hessian, Kronecker
from posterity.methods import Laplace

ROWS = 6


class Recurrent(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.cell = kind(3, 4, batch_first=True, **options)
        self.head = nn.Linear(4 * (1 + self.cell.bidirectional), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def problem(kind: type[nn.RNNBase], **options: object) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(ROWS, 5, 3)
        return Recurrent(kind, **options), x, (x.sum((1, 2)) > 0).long()


def jacobians(module: nn.Module, x: Tensor) -> Tensor:
    """Row by row and output by output, in float64, where no fused kernel runs."""
    module = copy.deepcopy(module).double()
    weights = list(module.parameters())
    rows = []
    for row in x.double():
        outputs = module(row.unsqueeze(0))[0]
        grads = [torch.autograd.grad(output, weights, retain_graph=True) for output in outputs]
        rows.append(torch.stack([torch.cat([g.flatten() for g in grad]) for grad in grads]))
    return torch.stack(rows)  # (N, D, P)


@pytest.mark.parametrize("structure", [Full(), Kronecker(), Diagonal()], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTM, {}), (nn.LSTM, {"num_layers": 2, "bidirectional": True}), (nn.GRU, {}), (nn.RNN, {})],
    ids=["lstm", "deep lstm", "gru", "rnn"],
)
def test_linearised_predictions_of_recurrent_networks(kind, options, structure) -> None:
    module, x, y = problem(kind, **options)
    joint = po.Joint(module, po.likelihoods.Categorical(), po.priors.Normal(), ROWS)
    q, _ = po.infer(Laplace(structure=structure, tuning=None), joint, (x, y), progress=False)
    before = torch._C._get_mkldnn_enabled()
    assert torch.isfinite(q.predict(x).probs).all()
    assert torch._C._get_mkldnn_enabled() == before
    covariance = q.output_moments(x)[1].double()
    jacobian = jacobians(module, x)
    wanted = jacobian @ q.gaussian.precision.covariance().double() @ jacobian.mT
    torch.testing.assert_close(covariance, wanted, rtol=2e-5, atol=2e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("curvature", [GaussNewton(), Hessian()], ids=str)
def test_curvature_of_an_lstm_in_float32_is_that_in_float64(curvature) -> None:
    module, x, y = problem(nn.LSTM)
    precisions = []
    for dtype in (torch.float32, torch.float64):
        joint = po.Joint(copy.deepcopy(module).to(dtype), po.likelihoods.Categorical(), po.priors.Normal(), ROWS)
        batch = po.model.Batch(x.to(dtype), y)
        precisions.append(curvature.matrix(joint, joint.initial(), batch, None).double())
    torch.testing.assert_close(*precisions, rtol=1e-4, atol=1e-5)
