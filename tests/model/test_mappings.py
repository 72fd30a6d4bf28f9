"""Batches as they come: mappings with labels inside, nested inputs, model outputs with logits, streams without end."""

import logging
from collections import OrderedDict, UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import posterity as po
from posterity.errors import BadData, BadFolder
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import MAP, Ensemble, Laplace
from posterity.model import Batch, Network, as_data
from posterity.model.data import in_memory
from posterity.numerics.random import Key

N, LENGTH, VOCABULARY, CLASSES = 12, 5, 11, 3


class ModelOutput(OrderedDict):
    """As the outputs of Hugging Face: entries are attributes, too, and those that are None are left out."""

    def __init__(self, **entries) -> None:
        super().__init__({name: value for name, value in entries.items() if value is not None})

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@dataclass
class Plain:
    logits: Tensor


class BatchEncoding(UserDict):
    """As a tokenizer's."""


class Encoder(nn.Module):
    """Mean of embeddings under a mask, with Hugging Face's signature; `tokens`: logits of each token, classes last."""

    def __init__(self, returns=ModelOutput, tokens: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, CLASSES)
        self.returns, self.tokens = returns, tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None):
        assert labels is None, "labels are not the module's"
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = self.table(input_ids) * mask.unsqueeze(-1)
        if not self.tokens:
            hidden = hidden.sum(1) / mask.sum(1, keepdim=True)
        return self.returns(logits=self.head(hidden))


def encoder(**options) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(**options).double()


def entries(tokens: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    ids = torch.randint(VOCABULARY, (N, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.arange(N).unsqueeze(1) % LENGTH + 1).long()
    labels = torch.randint(CLASSES, (N, LENGTH), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels.masked_fill(mask == 0, -100) if tokens else labels[:, 0],
    }


def as_logits(**given: Tensor) -> Tensor:
    return given["logits"]


RETURNS = {
    "model output": ModelOutput,
    "dataclass": Plain,
    "dict": dict,
    "tuple": lambda logits: (logits, logits + 1.0),
    "tensor": as_logits,
}


@pytest.mark.parametrize("name", list(RETURNS))
@pytest.mark.parametrize("mapping", [dict, BatchEncoding])
def test_mappings_equal_pairs(name: str, mapping) -> None:
    given = entries()
    inputs = {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"]}
    plain = po.Joint(encoder(returns=as_logits), Categorical(), po.priors.Normal(1.0), N)
    joint = po.Joint(encoder(returns=RETURNS[name]), Categorical(), po.priors.Normal(1.0), N)
    wanted, _ = po.infer(Laplace(tuning=None), plain, (inputs, given["labels"]), progress=False)
    q, _ = po.infer(Laplace(tuning=None), joint, mapping(given), progress=False)
    torch.testing.assert_close(q.gaussian.variance, wanted.gaussian.variance, rtol=0, atol=0)
    for batch in (mapping(given), mapping(inputs)):
        torch.testing.assert_close(q.predict(batch).probs, wanted.predict(inputs).probs, rtol=0, atol=0)
    members = torch.stack([joint.initial(), joint.initial() + 0.1])
    both = joint.outputs(members, inputs)  # through vmap
    torch.testing.assert_close(both[1], joint.outputs(members[1], inputs))


class Rows(Dataset):
    def __init__(self, given: dict[str, Tensor]) -> None:
        self.given = given

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self.given.items()}


def encoded(rows: list[dict[str, Tensor]]) -> BatchEncoding:
    return BatchEncoding(torch.utils.data.default_collate(rows))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.cpu)])  # forked workers have no GPU
def test_loaders_of_mappings(workers: int) -> None:
    given = entries()
    joint = po.Joint(encoder(), Categorical(), po.priors.Normal(1.0), N)
    loader = DataLoader(Rows(given), batch_size=4, collate_fn=encoded, num_workers=workers)
    wanted, _ = po.infer(Laplace(tuning=None), joint, given, progress=False)
    q, _ = po.infer(Laplace(tuning=None), joint, loader, progress=False)
    torch.testing.assert_close(q.gaussian.log_evidence, wanted.gaussian.log_evidence, rtol=0, atol=1e-9)
    torch.testing.assert_close(q.predict(loader).probs, wanted.predict(given).probs)
    if not workers:
        _, trace = po.infer(MAP(steps=4), joint, Rows(given), validation=loader, progress=False)
        assert "validation_nll" in trace


def test_the_adapter_names_labels_and_makes_the_outputs() -> None:
    given = entries(tokens=True)
    renamed = {("targets" if name == "labels" else name): value for name, value in given.items()}
    network = Network(encoder(tokens=True), outputs=lambda out: out.logits.movedim(-1, 1), labels="targets")
    joint = po.Joint(network, Categorical(positions=1), po.priors.Normal(1.0), N)
    q, _ = po.infer(Laplace(tuning=None), joint, renamed, progress=False)
    probs = q.predict(renamed).probs
    assert probs.shape == (N, CLASSES, LENGTH)
    module = encoder(tokens=True)
    loss = nn.functional.cross_entropy(
        module(given["input_ids"], given["attention_mask"]).logits.flatten(0, 1),
        given["labels"].flatten(),
        reduction="sum",
    )
    batch = joint.check(Batch({k: v for k, v in given.items() if k != "labels"}, given["labels"]))
    torch.testing.assert_close(-joint.log_likelihood(joint.initial(), batch), loss.detach(), rtol=0, atol=1e-12)
    with pytest.raises(BadData, match=r"targets in 'targets'\. Got entries 'input_ids', 'attention_mask', 'labels'\."):
        po.infer(MAP(steps=1), joint, given, progress=False)
    ensemble, _ = po.infer(Ensemble(MAP(steps=2, batch_size=4), 2), joint, renamed, progress=False)
    assert ensemble.predict(renamed).probs.shape == probs.shape


def test_padding_changes_nothing() -> None:
    given = entries(tokens=True)
    longer = {
        name: nn.functional.pad(value, (0, 3), value=-100 if name == "labels" else 0) for name, value in given.items()
    }
    network = Network(encoder(tokens=True), outputs=lambda out: out.logits.movedim(-1, 1))
    joint = po.Joint(network, Categorical(positions=1), po.priors.Normal(1.0), N)
    fits = [
        po.infer(Laplace(structure=po.curvature.Full(), tuning=None), joint, rows, progress=False)[0]
        for rows in (given, longer)
    ]
    torch.testing.assert_close(fits[0].gaussian.log_evidence, fits[1].gaussian.log_evidence, rtol=0, atol=1e-9)
    scores = [
        po.metrics.accuracy(q.predict(rows), rows["labels"]) for q, rows in zip(fits, (given, longer), strict=True)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-12)


@pytest.mark.parametrize("shifted", [False, True])
def test_labels_that_copy_their_tokens_are_said(shifted: bool, caplog) -> None:
    """A likelihood shifts no labels: a causal model whose labels are its tokens would learn to copy."""
    given = entries(tokens=True)
    ids = given["input_ids"] % CLASSES
    labels = (
        nn.functional.pad(ids[:, 1:], (0, 1), value=-100) if shifted else ids.masked_fill(given["labels"] < 0, -100)
    )
    network = Network(encoder(tokens=True), outputs=lambda out: out.logits.movedim(-1, 1))
    joint = po.Joint(network, Categorical(positions=1), po.priors.Normal(1.0), N)
    with caplog.at_level(logging.WARNING, "posterity"):
        joint.checked(as_data({"input_ids": ids, "labels": labels}))
    assert ("shift labels to the left" in caplog.text) is not shifted


def cut(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows as long as the longest of their batch, as Hugging Face's collators pad them."""
    batch = torch.utils.data.default_collate(rows)
    return {name: value[:, : int(batch["attention_mask"].sum(1).max())] for name, value in batch.items()}


def test_batches_of_different_lengths() -> None:
    given = entries(tokens=True)
    loader = DataLoader(Rows(given), batch_size=3, collate_fn=cut)
    assert len({batch["labels"].shape for batch in loader}) > 1
    network = Network(encoder(tokens=True), outputs=lambda out: out.logits.movedim(-1, 1))
    joint = po.Joint(network, Categorical(positions=1), po.priors.Normal(1.0), N)
    method = Laplace(structure=po.curvature.Full(), tuning=None)
    wanted, _ = po.infer(method, joint, given, progress=False)
    q, _ = po.infer(method, joint, loader, progress=False)
    torch.testing.assert_close(q.gaussian.log_evidence, wanted.gaussian.log_evidence, rtol=0, atol=1e-9)
    losses = [
        po.infer(MAP(steps=4), joint, loader, validation=rows, progress=False)[1]["validation_nll"][-1]
        for rows in (given, loader)
    ]
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-9)
    with pytest.raises(BadData, match=r"rows of one shape.*batch by batch, or pad"):
        q.predict(loader)


def test_saved_posteriors_load_with_the_adapter(tmp_path) -> None:
    given = entries(tokens=True)
    network = Network(encoder(tokens=True), outputs=lambda out: out.logits.movedim(-1, 1))
    joint = po.Joint(network, Categorical(positions=1), po.priors.Normal(1.0), N)
    q, _ = po.infer(Laplace(tuning=None), joint, given, progress=False)
    q.save(tmp_path / "q")
    again = po.load(tmp_path / "q", Network(encoder(tokens=True), outputs=lambda out: out.logits.movedim(-1, 1)))
    assert torch.equal(again.predict(given).probs, q.predict(given).probs)
    with pytest.raises(BadFolder, match=r"with an adapter, Network\(module, outputs=.*this one is without one"):
        po.load(tmp_path / "q", encoder(tokens=True))  # its softmax would be over positions


def test_the_first_of_a_tuple_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="posterity")
    network = Network(nn.LSTM(3, 2, batch_first=True))
    for _ in range(2):
        assert network.outputs(network.initial, torch.zeros(4, 5, 3)).shape == (4, 5, 2)
    assert caplog.text.count("the first of the 2 values") == 1


class Graph(nn.Module):
    """Nested inputs: {"nodes": (features, mask), "edges": [adjacency]}."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, nodes: tuple[Tensor, Tensor], edges: tuple[Tensor]) -> Tensor:
        features, mask = nodes
        mixed = edges[0] @ features * mask.unsqueeze(-1)
        return self.layer(mixed.sum(1))


def test_nested_inputs() -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    features, adjacency = (torch.randn(N, 4, k, generator=generator) for k in (2, 4))
    mask, y = torch.rand(N, 4, generator=generator) < 0.7, torch.randn(N, 1, generator=generator)
    inputs = {"nodes": (features, mask), "edges": [adjacency]}
    joint = po.Joint(Graph(), Gaussian(1.0), po.priors.Normal(1.0), N)
    loader = DataLoader(
        [({"nodes": (f, m), "edges": [a]}, t) for f, m, a, t in zip(features, mask, adjacency, y, strict=True)],
        batch_size=5,
    )
    fits = [po.infer(Laplace(tuning=None), joint, data, progress=False)[0] for data in ((inputs, y), loader)]
    torch.testing.assert_close(fits[0].gaussian.log_evidence, fits[1].gaussian.log_evidence)
    assert fits[0].predict(inputs).mean.shape == (N, 1)
    spoilt = {"nodes": (features, mask), "edges": [adjacency[:3]]}
    with pytest.raises(BadData, match=r"12 rows of inputs and 3 of inputs\['edges'\]\[0\]"):
        as_data((spoilt, y))
    with pytest.raises(BadData, match=r"inputs\['nodes'\]\[1\] must be .* an array\. Got 'mask'\. Leave out"):
        as_data(({"nodes": (features, "mask")}, y))


class Stream(IterableDataset):
    """Rows of a line, in shares of the workers if there are any and they are `shared`."""

    def __init__(self, count: int = N, shared: bool = True) -> None:
        self.count, self.shared = count, shared

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None and self.shared else (0, 1)
        x = torch.linspace(-1.0, 1.0, self.count, dtype=torch.float64).unsqueeze(1)
        for index in range(first, self.count, step):
            yield x[index], 2.0 * x[index]


class Counted(Stream):
    def __len__(self) -> int:
        return self.count


def line(num_data: int = N) -> po.Joint:
    net = nn.Linear(1, 1).double()
    return po.Joint(net, Gaussian(0.1), po.priors.Normal(1.0), num_data)


def rows_of(stream: Stream) -> tuple[Tensor, Tensor]:
    x, y = zip(*stream, strict=True)
    return torch.stack(x), torch.stack(y)


SOURCES = {
    "bare": Stream,
    "counted": Counted,
    "loader": lambda: DataLoader(Stream(), batch_size=5),
    "counted loader": lambda: DataLoader(Counted(), batch_size=5),
    "worker": lambda: DataLoader(Stream(), batch_size=5, num_workers=1),
    "workers": lambda: DataLoader(Stream(), batch_size=5, num_workers=2),
    "ready batches": lambda: DataLoader(Ready(), batch_size=None),
}


class Ready(Stream):
    """Batches of three."""

    def __iter__(self):
        x, y = rows_of(Stream())
        yield from zip(x.split(3), y.split(3), strict=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.cpu) if "worker" in name else name for name in SOURCES]
)
def test_iterated_rows(name: str) -> None:
    joint = line()
    wanted, _ = po.infer(Laplace(tuning=None), joint, rows_of(Stream()), progress=False)
    q, _ = po.infer(Laplace(tuning=None), joint, SOURCES[name](), progress=False)
    torch.testing.assert_close(q.gaussian.log_evidence, wanted.gaussian.log_evidence, rtol=0, atol=1e-9)
    data = as_data(SOURCES[name](), num_data=N)
    assert data.num_data == N
    feed = data.minibatches(5, 7, Key(0))
    batches = [batch for batch in feed.from_step(0) if batch is not None]
    assert len(batches) == 7
    for start in (2, 4):  # resumed in the first pass, or later
        for left, right in zip(feed.from_step(start), batches[start:], strict=True):
            assert torch.equal(left.inputs, right.inputs)
    assert in_memory(data).first().size == N
    if "worker" not in name:
        _, trace = po.infer(MAP(steps=5), joint, SOURCES[name](), progress=False)
        assert bool(torch.isfinite(trace["loss"]).all())


@pytest.mark.parametrize("method", [MAP(steps=8), Laplace(tuning=None)])
@pytest.mark.parametrize(
    ("make", "count", "got"),
    [
        (lambda: DataLoader(Stream(), batch_size=5), 10, "num_data = 10 rows. Got at least 12"),
        (lambda: DataLoader(Stream(), batch_size=5), 14, "num_data = 14 rows. Got 12"),
        (lambda: DataLoader(Stream(), batch_size=5), 300, "num_data = 300 rows. Got 12"),
        (Stream, 10, "num_data = 10 rows. Got at least"),
        (lambda: DataLoader(Counted(), batch_size=5), 10, "num_data is 10 but the data have 12 rows"),
        (Counted, 10, "num_data is 10 but the data have 12 rows"),
        pytest.param(
            lambda: DataLoader(Stream(shared=False), batch_size=5, num_workers=2),
            N,
            "num_data = 12 rows. Got at least",
            marks=pytest.mark.cpu,
        ),
    ],
)
def test_another_number_of_rows_is_refused(method, make, count: int, got: str) -> None:
    with pytest.raises(BadData, match=got):
        po.infer(method, line(count), make(), progress=False)


def test_validation_says_its_number_of_rows() -> None:
    with pytest.raises(BadData, match=r"no known number of rows.*as_data\(data, num_data=\.\.\.\)"):
        po.infer(MAP(steps=2), line(), rows_of(Stream()), validation=Stream(), progress=False)
    held = as_data(DataLoader(Stream(), batch_size=5), num_data=N)
    _, trace = po.infer(MAP(steps=2), line(), rows_of(Stream()), validation=held, progress=False)
    assert "validation_nll" in trace


def test_predictions_of_iterated_rows() -> None:
    joint = line()
    q, _ = po.infer(Laplace(tuning=None), joint, rows_of(Stream()), progress=False)
    assert len(q.predict(DataLoader(Stream(), batch_size=5))) == N
    with pytest.raises(BadData, match="drops rows"):
        q.predict(DataLoader(Stream(), batch_size=5, drop_last=True))


def test_dropped_rows_are_not_missed_in_training() -> None:
    loader = DataLoader(Stream(), batch_size=5, drop_last=True)
    _, trace = po.infer(MAP(steps=6), line(), loader, progress=False)
    assert len(trace["loss"]) == 6
    with pytest.raises(BadData, match="drop_last=True"):
        po.infer(Laplace(tuning=None), line(), loader, progress=False)


def test_bert_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config).double()
    given = transformers.BatchEncoding(entries())
    joint = po.Joint(model, Categorical(), po.priors.Normal(1.0), N)
    q, _ = po.infer(Laplace(subset=po.methods.LastLayer(), tuning=None), joint, given, progress=False)
    assert q.predict(given).probs.shape == (N, CLASSES)
