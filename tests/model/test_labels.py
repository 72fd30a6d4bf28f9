"""Labels out of range are refused before any kernel of a loss sees them, on every path."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import posterity as po
from posterity import evidence, metrics
from posterity.curvature import EmpiricalFisher, GaussNewton, Hessian
from posterity.errors import BadData
from posterity.likelihoods import Bernoulli, Categorical, Poisson
from posterity.methods import MAP, Laplace
from posterity.model import Batch
from posterity.predictive import ClassPredictive, TemperatureScaling

ROWS, CLASSES = 8, 3
X = torch.linspace(-1.0, 1.0, 2 * ROWS).view(ROWS, 2)
GOOD = torch.arange(ROWS) % CLASSES
FIT = MAP(steps=4, batch_size=2)


def bad(label: int = CLASSES) -> Tensor:
    """Good labels but for the last row."""
    return torch.cat([GOOD[:-1], torch.tensor([label])])


class Pixels(nn.Module):
    """Logits (N, C, 4) of four positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, CLASSES * 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(-1, CLASSES, 4)


def joint(likelihood=None, module: nn.Module | None = None) -> po.Joint:
    likelihood = Categorical() if likelihood is None else likelihood
    return po.Joint(module or nn.Linear(2, CLASSES), likelihood, po.priors.Normal(1.0), ROWS)


class Rows(Dataset):
    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], self.labels[index]


def loader(labels: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(X, labels), batch_size=2)


SOURCES = {"tensors": lambda y: (X, y), "dataset": Rows, "loader": loader}
every_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
LABELS = f"targets must lie in 0..{CLASSES - 1}"


@every_source
@pytest.mark.parametrize("label", [-99, -1, CLASSES])
def test_training_rows(source, label: int) -> None:
    with pytest.raises(BadData, match=rf"{LABELS}.*Got {label}"):
        po.infer(FIT, joint(), source(bad(label)), progress=False)


@every_source
def test_validation_rows(source) -> None:
    with pytest.raises(BadData, match=LABELS):
        po.infer(FIT, joint(), (X, GOOD), validation=source(bad()), progress=False)


@every_source
def test_evidence_and_curvature_passes(source) -> None:
    problem = joint()
    with pytest.raises(BadData, match=LABELS):
        po.infer(Laplace(tuning=None), problem, source(bad()), progress=False)
    q, _ = po.infer(Laplace(tuning=None), problem, (X, GOOD), progress=False)
    for score in (evidence.elbo, evidence.importance):
        with pytest.raises(BadData, match=LABELS):
            score(q.gaussian, source(bad()))


def test_labels_at_positions() -> None:
    labels = torch.zeros(ROWS, 4, dtype=torch.long)
    labels[-1, 2] = CLASSES
    with pytest.raises(BadData, match=rf"{LABELS}.*row {ROWS - 1}"):
        po.infer(FIT, joint(Categorical(positions=1), Pixels()), (X, labels), progress=False)


@pytest.mark.parametrize(
    ("likelihood", "label", "message"),
    [(Bernoulli(), 2, "targets must be 0 or 1"), (Poisson(), -1, "targets must be counts")],
)
@every_source
def test_binary_labels_and_counts(source, likelihood, label: int, message: str) -> None:
    labels = torch.cat([GOOD[:-1] % 2, torch.tensor([label])])
    with pytest.raises(BadData, match=message):
        po.infer(FIT, joint(likelihood, nn.Linear(2, 1)), source(labels), progress=False)


@pytest.mark.parametrize("members", [False, True])
@pytest.mark.parametrize("weights", [None, torch.ones(ROWS)])
def test_batches_that_nobody_has_checked(weights: Tensor | None, members: bool) -> None:
    problem, batch = joint(), Batch(X, bad(), weights)
    theta = problem.initial().repeat(2, 1) if members else problem.initial()
    for density in (problem.log_likelihood, problem.log_density, problem.value_and_grad, problem.data_value_and_grad):
        with pytest.raises(BadData, match=LABELS):
            density(theta, batch)
        density(theta, Batch(X, GOOD, weights))
    if members:
        several = Batch(X.expand(2, -1, -1), torch.stack([GOOD, bad()]), None, per_member=True)
        with pytest.raises(BadData, match=LABELS):
            problem.value_and_grad(theta, several)


@pytest.mark.parametrize("curvature", [GaussNewton(), Hessian(), EmpiricalFisher()], ids=str)
def test_curvature_of_a_batch_that_nobody_has_checked(curvature) -> None:
    problem = joint()
    with pytest.raises(BadData, match=LABELS):
        curvature.matrix(problem, problem.initial(), Batch(X, bad()), None)


def test_checked_batches_are_checked_once(monkeypatch) -> None:
    calls: list[int] = []
    check = Categorical.check
    monkeypatch.setattr(Categorical, "check", lambda self, f, y: calls.append(len(y)) or check(self, f, y))
    po.infer(MAP(steps=7, batch_size=2), joint(), (X, GOOD), progress=False)
    assert calls == [ROWS]  # no step checks, which would stall a GPU


def test_predictions_and_metrics() -> None:
    q, _ = po.infer(FIT, joint(), (X, GOOD), progress=False)
    pred = q.predict(X)
    scores = [metrics.accuracy, metrics.brier_score, metrics.negative_log_likelihood]
    for score in [*scores, metrics.expected_calibration_error]:
        with pytest.raises(BadData, match="labels from 0 to 2"):
            score(pred, bad())
    for density in (pred.log_prob, pred.expected_log_prob, pred.joint_log_prob):
        with pytest.raises(BadData, match="labels from 0 to 2"):
            density(bad())
    mixed = ClassPredictive.mixed([pred, pred], torch.tensor([0.5, 0.5]))
    with pytest.raises(BadData, match="labels from 0 to 2"):
        mixed.log_prob(bad())
    with pytest.raises(BadData, match="labels from 0 to 2"):
        TemperatureScaling.fit(torch.zeros(ROWS, CLASSES), bad())


def test_a_module_on_the_meta_device_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 3, device="meta"), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device.*to_empty\(device=.*load_state_dict"):
        joint(module=module)
    buffered = nn.Linear(2, 3)
    buffered.register_buffer("mask", torch.zeros(1, device="meta"))
    with pytest.raises(ValueError, match=r"'mask' is on the meta device"):
        joint(module=buffered)
