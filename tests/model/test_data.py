"""Data behind one face: every row its turn, the t-th batch always the same."""

import random
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from posterity.datasets.dataset import LabelledData
from posterity.errors import BadData, check_batch_size
from posterity.model.data import Batch, NoData, StreamData, TensorData, as_data, as_inputs, in_memory
from posterity.numerics import Key

ROWS = 10
pytestmark = pytest.mark.cpu  # torch's loaders shuffle by generators of the CPU


def x(rows=ROWS):
    return torch.arange(rows, dtype=torch.float32).unsqueeze(1)


def y(rows=ROWS):
    return torch.arange(rows, dtype=torch.float32).unsqueeze(1) * 10


class Rows(Dataset):
    """Rows made on demand, with a name for each input; `noise` draws from every source of random numbers."""

    def __init__(self, rows=ROWS, noise=False):
        self.rows, self.noise = rows, noise

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        if not isinstance(index, int) or not 0 <= index < self.rows:
            raise IndexError(index)
        shift = torch.rand(()) + np.random.rand() + random.random() if self.noise else 0.0
        return torch.tensor([float(index)]) + shift, torch.tensor([10.0 * index])


def loader(**options):
    return DataLoader(Rows(noise=options.pop("noise", False)), **{"batch_size": 3, **options})


SOURCES = {
    "tensors": lambda: (x(), y()),
    "arrays": lambda: (x().numpy(), y().numpy()),
    "labelled": lambda: LabelledData(x(), y()),
    "tensor dataset": lambda: TensorDataset(x(), y()),
    "dataset": Rows,
    "noisy dataset": lambda: Rows(noise=True),
    "loader": loader,
    "shuffling loader": lambda: loader(shuffle=True),
    "noisy loader": lambda: loader(shuffle=True, noise=True),
    "loader with its generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(1)),
    "sampler with its generator": lambda: loader(sampler=RandomSampler(Rows(), generator=torch.Generator())),
    "loader by batch sampler": lambda: DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 3, False)),
    "dropping loader": lambda: loader(shuffle=True, drop_last=True),
    "weighted rows": lambda: (x(), y(), torch.arange(10.0)),
    "two inputs": lambda: ((x(), -x()), y()),
    "named inputs": lambda: ({"a": x(), "b": -x()}, y()),
}
EVERY = pytest.mark.parametrize("name", list(SOURCES))
OWN_BATCHES = ("loader", "sampler")  # in the names of sources that have a batch size of their own
SIZED = pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name in SOURCES
        for size in (None, 3, 4, 10, 99)
        if size is None or not any(word in name for word in OWN_BATCHES)
    ],
)


def equal(first, second):
    assert first.tensors.keys() == second.tensors.keys()
    return all(torch.equal(value, second.tensors[name]) for name, value in first.tensors.items())


def seen(batches):
    """The numbers of the rows, by their targets."""
    return [int(value) for batch in batches for value in (batch.targets / 10).reshape(-1)]


@EVERY
def test_every_batch_has_its_own_rows(name):
    data = as_data(SOURCES[name]())
    assert data.num_data == ROWS
    for batch in data.minibatches(3, 7, Key(0)).from_step(0):
        assert batch.size == batch.targets.shape[0]
        assert batch.size == 3 or (batch.size == 1 and any(word in name for word in OWN_BATCHES))
        first = next(iter(batch.tensors.values()))
        if "noisy" not in name:
            assert torch.equal(first * 10, batch.targets)
        if name == "weighted rows":
            assert torch.equal(batch.weights * 10, batch.targets[:, 0])
        if name == "two inputs":
            assert torch.equal(batch.inputs[0], -batch.inputs[1])
        if name == "named inputs":
            assert torch.equal(batch.inputs["a"], -batch.inputs["b"])


@SIZED
def test_a_run_taken_up_again_sees_the_same_batches(name, size):
    data, steps = as_data(SOURCES[name]()), 11  # several passes
    feed = data.minibatches(size, steps, Key(4))
    whole = list(feed.from_step(0))
    assert len(whole) == len(feed) == steps
    for start in range(steps + 1):
        rest = list(as_data(SOURCES[name]()).minibatches(size, steps, Key(4)).from_step(start))
        assert len(rest) == steps - start
        assert all(equal(a, b) for a, b in zip(rest, whole[start:], strict=True))
    longer = list(data.minibatches(size, 2 * steps, Key(4)).from_step(0))  # no batch depends on how many there are
    assert all(equal(a, b) for a, b in zip(longer, whole, strict=False))


@SIZED
def test_passes_see_every_row_once(name, size):
    data = as_data(SOURCES[name]())
    if name == "dropping loader":
        with pytest.raises(BadData, match=r"needs every row once, but the DataLoader has drop_last=True\. Pass one"):
            data.passes(size)
        return
    feed = data.passes(size, count=3)
    whole = list(feed.from_step(0))
    each = len(whole) // 3
    assert len(whole) == len(feed)
    for part in range(3):
        assert sorted(seen(whole[part * each : (part + 1) * each])) == list(range(ROWS))
    if not any(word in name for word in OWN_BATCHES):
        assert seen(whole[:each]) == list(range(ROWS))  # in their own order
        assert max(batch.size for batch in whole) == min(size or ROWS, ROWS)
    for start in range(len(feed) + 1):
        rest = list(data.passes(size, count=3).from_step(start))
        assert len(rest) == len(feed) - start
        assert all(equal(a, b) for a, b in zip(rest, whole[start:], strict=True))


@pytest.mark.parametrize("name", ["tensors", "dataset"])
def test_orders_depend_on_key_and_epoch_alone(name):
    data = as_data(SOURCES[name]())
    whole = list(data.minibatches(2, 15, Key(1)).from_step(0))  # three epochs of five
    epochs = [seen(whole[low : low + 5]) for low in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[1] == Key(1).fold(1).permutation(ROWS).tolist()
    other = list(data.minibatches(2, 15, Key(2)).from_step(0))
    assert seen(other[:5]) != epochs[0]
    by_fives = list(data.minibatches(5, 4, Key(1)).from_step(0))
    assert seen(by_fives[:2]) == epochs[0]  # the order of an epoch does not depend on the batch size


def test_a_shuffling_loader_depends_on_the_key_and_epoch():
    data = as_data(loader(shuffle=True))
    epochs = [seen(list(data.minibatches(None, 8, Key(1)).from_step(0))[low : low + 4]) for low in (0, 4)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != seen(list(data.minibatches(None, 4, Key(2)).from_step(0)))


@pytest.mark.parametrize("name", ["tensors", "dataset"])
def test_the_last_incomplete_batch_is_dropped(name):
    data = as_data(SOURCES[name]())
    whole = list(data.minibatches(4, 6, Key(0)).from_step(0))
    assert [batch.size for batch in whole] == [4] * 6
    for low in (0, 2, 4):
        assert len(set(seen(whole[low : low + 2]))) == 8
    assert set(seen(whole)) == set(range(ROWS))  # their turn comes


@EVERY
def test_loaders_leave_the_random_states_alone(name):
    source = SOURCES[name]()
    own = getattr(source, "generator", None) or getattr(getattr(source, "sampler", None), "generator", None)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    state = None if own is None else own.get_state()
    data = as_data(source)
    data.first()
    iterator = data.minibatches(3, 9, Key(0)).from_step(2)
    drawn = []
    for _ in range(4):
        next(iterator)
        drawn.append(torch.rand(()))  # the user draws in between
    list(iterator)
    if name != "dropping loader":
        list(data.passes(3).from_step(0))
    torch.random.set_rng_state(before[0])
    assert [float(number) for number in drawn] == [float(torch.rand(())) for _ in range(4)]
    torch.random.set_rng_state(before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
    assert own is None or torch.equal(own.get_state(), state)


@pytest.mark.parametrize("name", ["noisy dataset", "noisy loader"])
def test_every_row_draws_its_own_noise(name):
    data = as_data(SOURCES[name]())
    batches = list(data.minibatches(3, 8, Key(0)).from_step(0))
    noise = torch.cat([batch.inputs - batch.targets / 10 for batch in batches])
    assert len(set(noise.reshape(-1).tolist())) == len(noise)  # in one pass and over passes


def test_the_users_draws_do_not_change_the_batches():
    data = as_data(loader(shuffle=True, noise=True))
    first = list(data.minibatches(None, 6, Key(0)).from_step(0))
    second = []
    for batch in data.minibatches(None, 6, Key(0)).from_step(0):
        second.append(batch)
        torch.rand(3), np.random.rand(3), random.random()
    assert all(equal(a, b) for a, b in zip(first, second, strict=True))


@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 20), st.integers(0, 20))
@example(6, 2, 1, 2)  # a start behind the last step of an epoch
@settings(deadline=None, max_examples=60)
def test_feeds_of_any_size(rows, size, steps, start):
    data = as_data((x(rows), y(rows)))
    stream = StreamData(Rows(rows), rows)
    for source in (data, stream):
        whole = list(source.minibatches(size, steps, Key(0)).from_step(0))
        assert [seen([b]) for b in whole[start:]] == [
            seen([b]) for b in source.minibatches(size, steps, Key(0)).from_step(start)
        ]
        assert all(batch.size == min(size, rows) for batch in whole)
        assert seen(source.passes(size).from_step(0)) == list(range(rows))


def test_all_rows_are_one_batch_in_order():
    data = as_data((x(), y()))
    for size in (None, 10, 11):
        (only,) = data.minibatches(size, 1, Key(0)).from_step(0)
        assert only is data.rows
    assert data.first() is data.rows
    assert as_data(data) is data


def test_members_have_their_own_rows():
    inputs, targets, weights = torch.stack([x(), x() + 100]), torch.stack([y(), y()]), torch.ones(2, ROWS)
    data = as_data((inputs, targets, weights), per_member=True)
    assert isinstance(data, TensorData)
    assert data.num_data == ROWS
    for batch in data.minibatches(3, 4, Key(0)).from_step(0):
        assert batch.per_member
        assert (batch.size, batch.inputs.shape, batch.weights.shape) == (3, (2, 3, 1), (2, 3))
        assert torch.equal(batch.inputs[1] - 100, batch.inputs[0])
        one = batch.member(1)
        assert not one.per_member
        assert torch.equal(one.inputs, batch.inputs[1])
        assert torch.equal(one.weights, batch.weights[1])
        assert (one.size, one.member(0)) == (3, one)
    assert [batch.size for batch in data.passes(4).from_step(0)] == [4, 4, 2]
    assert seen(batch.member(0) for batch in data.passes(4).from_step(0)) == list(range(ROWS))


def test_no_data():
    data = as_data(None)
    assert isinstance(data, NoData)
    assert list(data.minibatches(3, 4, Key(0)).from_step(1)) == [None] * 3
    assert list(data.passes(3, 2).from_step(0)) == [None] * 2
    assert (data.num_data, data.fingerprint(), data.to(torch.device("cpu"))) == (0, "none", data)
    with pytest.raises(BadData, match="This needs data"):
        data.first()


def test_the_first_batch():
    assert as_data(loader()).first().size == 3
    assert as_data(Rows(1000)).first().size == 256
    assert seen([as_data(Rows(5)).first()]) == list(range(5))


def test_batches_are_prepared_as_they_come():
    data = as_data(loader()).prepared(lambda batch: batch._replace(targets=batch.targets + 1))
    assert torch.equal(next(data.passes(None).from_step(0)).targets, y()[:3] + 1)
    assert torch.equal(data.to(torch.device("cpu")).first().targets, y()[:3] + 1)


@pytest.mark.parametrize("array", ["float64", "float32", "int64", "uint8", "bool", ">f4", ">i8", "float16"])
def test_arrays_of_every_kind(array):
    numbers = np.arange(6).reshape(3, 2).astype(array)
    for given_ in (numbers, numbers[::-1], np.asfortranarray(numbers), numbers.T.copy().T):
        tensor = as_inputs(given_)
        assert torch.equal(tensor.double(), torch.tensor(given_.astype("float64")))
    numbers.flags.writeable = False  # as pandas gives them
    assert as_inputs(numbers).shape == (3, 2)


def test_tables_are_arrays():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    data = as_data((frame, frame["a"]))
    assert torch.equal(data.first().inputs, torch.tensor([[1.0, 3.0], [2.0, 4.0]], dtype=torch.float64))
    assert data.first().targets.shape == (2,)


def test_tensors_lose_their_graph():
    weight = torch.ones(3, 1, requires_grad=True)
    batch = as_data((weight * 2, torch.ones(3, 1))).first()
    assert not batch.inputs.requires_grad


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class CountedStream(Stream):
    def __len__(self):
        return 5


class Endless(Dataset):
    def __getitem__(self, index):
        return torch.zeros(1), torch.zeros(1)


BAD = {
    "nothing": (lambda: (torch.zeros(0, 1), torch.zeros(0, 1)), "no rows"),
    "empty dataset": (lambda: Rows(0), "no rows"),
    "empty loader": (lambda: DataLoader(Rows(0), batch_size=2), "no rows"),
    "one tensor": (x, r"Wanted the data as \(inputs, targets\) .* Got tensor\(10, 1\)\. Pass a pair"),
    "four": (lambda: (x(), y(), None, None), r"Wanted the data as"),
    "no pair": (lambda: TensorDataset(x()), r"Wanted the data as"),
    "lists": (lambda: ([[1.0]], [[2.0]]), r"inputs\[0\] must be a tensor or an array\. Got \[1\.0\]"),
    "no inputs": (lambda: ((), y()), "at least one tensor. Got none"),
    "no named inputs": (lambda: ({}, y()), "at least one tensor. Got none"),
    "text": (lambda: (np.array([["a"]]), np.zeros((1, 1))), r"inputs must hold numbers\. Got an array of <U1\. Encode"),
    "objects": (lambda: (np.array([[None]]), np.zeros((1, 1))), "inputs must hold numbers. Got an array of object"),
    "long numbers": (lambda: (np.zeros((1, 1), np.longdouble), np.zeros((1, 1))), r"torch has no numbers .*astype"),
    "too few targets": (lambda: (x(), y(9)), r"Got 10 rows of inputs and 9 of targets"),
    "unequal inputs": (lambda: ((x(), x(9)), y()), r"Got 10 rows of inputs and 9 of inputs\[1\]"),
    "unequal batch": (lambda: Batch(x(), y(9)), r"Got 10 rows of inputs and 9 of targets"),
    "a number": (lambda: (x(), torch.tensor(1.0)), r"targets must have one row for each data point\. Got shape \(\)"),
    "few weights": (lambda: (x(), y(), torch.ones(9)), "9 of weights"),
    "wide weights": (lambda: (x(), y(), torch.ones(10, 3)), "one finite number >= 0 for each row"),
    "negative weights": (lambda: (x(), y(), -torch.ones(10)), "one finite number >= 0 for each row"),
    "nan weights": (lambda: (x(), y(), torch.full((10,), float("nan"))), "one finite number >= 0"),
    "stream": (Stream, "no known number of rows"),
    "endless": (Endless, "no known number of rows"),
    "loader of a stream": (lambda: DataLoader(Stream(), batch_size=2), "no known number of rows"),
    "counted stream without rows": (lambda: in_memory(as_data(CountedStream())), r"num_data = 5 rows\. Got 0"),
    "loader without batches": (lambda: DataLoader(Rows(), batch_size=None), "not single rows. Give it a batch_size"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_data_are_refused_in_one_line(name):
    make, message = BAD[name]
    with pytest.raises(BadData, match=message) as caught:
        as_data(make())
    assert "\n" not in str(caught.value)


def test_members_must_agree():
    wide = x().expand(3, -1, -1)
    with pytest.raises(BadData, match=r"same number of members\. Got 3 of inputs and 2 of targets"):
        as_data((wide, y().expand(2, -1, -1)), per_member=True)
    with pytest.raises(BadData, match=r"one row for each data point of each member\. Got shape \(10,\)"):
        as_data((wide, y()[:, 0]), per_member=True)
    with pytest.raises(BadData, match="10 rows of inputs and 9 of targets"):
        as_data((wide, y(9).expand(3, -1, -1)), per_member=True)


def test_a_batch_of_a_loader_that_is_no_pair_is_refused():
    data = as_data(DataLoader(TensorDataset(x()), batch_size=2))
    with pytest.raises(BadData, match="Wanted each batch of the loader as"):
        data.first()


def test_loaders_that_repeat_or_leave_out_rows_make_no_pass():
    for sampler, reason in (
        (RandomSampler(Rows(), replacement=True), "a RandomSampler with replacement"),
        (WeightedRandomSampler([1.0] * ROWS, ROWS), "a WeightedRandomSampler"),
    ):
        data = as_data(loader(sampler=sampler))
        assert len(list(data.minibatches(None, 5, Key(0)).from_step(0))) == 5
        with pytest.raises(BadData, match=f"but the DataLoader has {reason}"):
            data.passes(None)
        with pytest.raises(BadData, match=f"but the DataLoader has {reason}"):
            as_data(DataLoader(Rows(), batch_sampler=BatchSampler(sampler, 3, False))).passes(None)
    half = DataLoader(Rows(), batch_sampler=BatchSampler(SequentialSampler(Subset(Rows(), range(5))), 2, False))
    with pytest.raises(BadData, match=r"each of the 10 rows once\. The loader gave 5"):
        list(as_data(half).passes(None).from_step(0))


def test_a_loader_of_a_subset_has_the_rows_of_the_subset():
    data = as_data(loader(sampler=SubsetRandomSampler([1, 3, 5, 7])))
    assert data.num_data == 4
    assert sorted(seen(data.passes(None).from_step(0))) == [1, 3, 5, 7]
    assert as_data(DataLoader(Subset(Rows(), range(6)), batch_size=2)).num_data == 6
    batches = BatchSampler(SubsetRandomSampler([1, 3, 5, 7]), 3, False)
    assert as_data(DataLoader(Rows(), batch_sampler=batches)).num_data == 4


def test_a_batch_sampler_may_stand_where_a_sampler_does():
    class Blocks(Rows):
        def __getitem__(self, indices):
            return default_collate([Rows.__getitem__(self, index) for index in indices])

    data = as_data(DataLoader(Blocks(), sampler=BatchSampler(SequentialSampler(Rows()), 4, False), batch_size=None))
    assert seen(data.passes(None).from_step(0)) == list(range(ROWS))


def test_generators_of_batch_samplers_are_left_as_they_were():
    generator = torch.Generator()
    batches = BatchSampler(RandomSampler(Rows(), generator=generator), 3, False)
    data, before = as_data(DataLoader(Rows(), batch_sampler=batches)), generator.get_state()
    passes = [seen(data.minibatches(None, 4, Key(1)).from_step(0)) for _ in range(2)]
    assert passes[0] == passes[1]
    assert torch.equal(generator.get_state(), before)


def test_a_loader_that_gives_fewer_batches_than_it_says_is_refused():
    class Short(BatchSampler):
        def __iter__(self):
            return iter([[0, 1]])

    data = as_data(DataLoader(Rows(), batch_sampler=Short(SequentialSampler(Rows()), 2, False)))
    with pytest.raises(BadData, match="says that it has 5 batches and gave 1"):
        list(data.minibatches(None, 3, Key(0)).from_step(0))


FINGERPRINTED = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.float64]


@pytest.mark.parametrize("dtype", FINGERPRINTED)
@pytest.mark.parametrize("place", ["inputs", "targets"])
def test_the_fingerprint_changes_with_every_byte(dtype, place):
    tensors = {"inputs": torch.zeros(4, 3, dtype=dtype), "targets": torch.zeros(4, dtype=dtype)}
    first = as_data(tuple(tensors.values())).fingerprint()
    assert first == as_data(tuple(value.clone() for value in tensors.values())).fingerprint()
    changed = {name: value.clone() for name, value in tensors.items()}
    found = {first}
    flat = changed[place].view(-1).view(torch.uint8)
    for index in range(flat.numel()):
        flat[index] = 1
        found.add(as_data(tuple(changed.values())).fingerprint())
        flat[index] = 0
    assert len(found) == flat.numel() + 1


def test_the_fingerprint_changes_with_shape_kind_names_and_weights():
    zeros = torch.zeros(4, 4)
    cases = [
        (zeros, zeros),
        (zeros.reshape(4, 2, 2), zeros),
        (zeros.int(), zeros),
        ((zeros,), zeros),
        ({"a": zeros}, zeros),
        ({"b": zeros}, zeros),
        ((zeros, zeros), zeros),
        (zeros, zeros, torch.zeros(4)),
        (zeros, zeros, torch.ones(4)),
    ]
    found = {as_data(case).fingerprint() for case in cases}
    assert len(found) == len(cases)
    assert as_data((zeros, zeros), per_member=True).fingerprint() not in found
    assert as_data((zeros.T, zeros)).fingerprint() in found  # strides do not matter


def test_a_stream_says_what_it_is():
    assert re.fullmatch("Rows of 10 rows, first [0-9a-f]{32}", as_data(Rows()).fingerprint())
    assert re.fullmatch("DataLoader of 10 rows in batches of 3, first [0-9a-f]{32}", as_data(loader()).fingerprint())
    assert as_data(loader()).fingerprint() == as_data(loader()).fingerprint()


def test_batch_sizes():
    for size in (None, 1, 128):
        check_batch_size("MAP.batch_size", size)
    for size in (0, -1, 1.5, 2.0, True, "8"):
        with pytest.raises(ValueError, match=r"MAP\.batch_size must be a positive whole number of rows, or None"):
            check_batch_size("MAP.batch_size", size)


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(SOURCES))
def test_batches_are_moved_to_the_device(name):
    device = torch.device("cuda", 0)
    data = as_data(SOURCES[name]()).to(device)
    here = as_data(SOURCES[name]())
    for there, batch in zip(
        data.minibatches(3, 5, Key(0)).from_step(0), here.minibatches(3, 5, Key(0)).from_step(0), strict=True
    ):
        assert {tensor.device for tensor in there.tensors.values()} == {device}
        assert equal(there.map(lambda tensor: tensor.cpu()), batch)
    assert data.first().targets.device == device
    assert data.fingerprint() == here.fingerprint()
