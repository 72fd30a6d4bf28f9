"""Rows in files as data: batches, resumption, and the same fits as from memory."""

import os

import pytest
import shardfiles
import torch

import posterity as po
from posterity.datasets import read_shards, shards
from posterity.errors import BadData
from posterity.model.data import as_data
from posterity.numerics.random import Key


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files of 100 rows in shards of ten."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 120)
    return shardfiles.write(tmp_path / "rows", "parquet", *shardfiles.rows())


def joint(num_data=100, **settings):
    torch.manual_seed(0)
    return po.Joint(
        torch.nn.Linear(3, 1), po.likelihoods.Gaussian(scale=50.0), po.priors.Normal(1.0), num_data=num_data, **settings
    )


def test_batches_of_an_epoch_have_every_row_once_and_other_orders_in_each(folder):
    data = as_data(read_shards(folder, "y", window=2))
    feed = data.minibatches(9, 33, Key(1))
    _inputs, targets = shardfiles.rows()
    epochs = []
    batches = list(feed.from_step(0))
    assert len(batches) == 33
    assert {batch.size for batch in batches} == {9}
    for epoch in range(3):
        numbers = torch.cat([batch.inputs[:, 0] for batch in batches[11 * epoch : 11 * epoch + 11]]).long()
        goals = torch.cat([batch.targets for batch in batches[11 * epoch : 11 * epoch + 11]])
        assert len(numbers.unique()) == 99
        assert torch.equal(goals, targets[numbers])
        epochs.append(numbers)
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("size", [1, 7, 10, 25, 100, 1000])
def test_batches_from_any_step_are_those_of_the_whole_run(folder, size):
    data = as_data(read_shards(folder, "y", window=3))
    for feed in (data.minibatches(size, 12, Key(4)), data.passes(size, 2)):
        whole = list(feed.from_step(0))
        assert len(whole) == len(feed)
        for start in (0, 1, len(feed) // 2, len(feed) - 1):
            late = list(feed.from_step(start))
            assert len(late) == len(feed) - start
            for held, wanted in zip(late, whole[start:], strict=True):
                assert torch.equal(held.inputs, wanted.inputs)
                assert torch.equal(held.targets, wanted.targets)
    inputs, _targets = shardfiles.rows()
    each = [batch.inputs for batch in data.passes(size).from_step(0)]
    assert torch.equal(torch.cat(each), inputs)
    assert max(map(len, each)) <= size


def test_a_run_resumed_at_any_step_ends_with_the_bits_of_the_whole(folder, tmp_path):
    data, method = read_shards(folder, "y", window=2), po.methods.MeanField(steps=25, batch_size=8)
    whole, _ = po.infer(method, joint(), data, seed=3)

    class Stop(Exception):
        pass

    def stop(run):
        if run.step == 13:
            raise Stop

    with pytest.raises(Stop):
        po.infer(method, joint(), data, seed=3, checkpoint=po.Checkpoint(tmp_path / "run", steps=4), callbacks=[stop])
    read, reads = shards.Shards._read, list[int]()
    shards.Shards._read, kept = (lambda own, index: (reads.append(index), read(own, index))[1]), read
    try:
        again, _ = po.infer(method, joint(), read_shards(folder, "y", window=2), seed=3, checkpoint=tmp_path / "run")
    finally:
        shards.Shards._read = kept
    assert torch.equal(again.point(), whole.point())
    assert reads
    with pytest.raises(po.errors.BadFolder, match=r"data"):
        po.infer(method, joint(), read_shards(folder, "y", window=3), seed=3, checkpoint=tmp_path / "run")


@pytest.mark.parametrize("size", [7, 1024])
def test_full_passes_fit_what_the_rows_in_memory_fit(folder, size):
    inputs, targets = shardfiles.rows()
    data = read_shards(folder, "y")
    for method in (po.methods.Conjugate(batch_size=size), po.methods.Laplace(tuning=None, batch_size=size)):
        own, _ = po.infer(method, joint(), data)
        wanted, _ = po.infer(method, joint(), (inputs, targets))
        assert torch.equal(own.point(), wanted.point())
        at = inputs[:5]
        assert torch.equal(own.predict(at).std, wanted.predict(at).std)
    assert torch.equal(own.predict(data).mean, own.predict(inputs).mean)
    with pytest.raises(TypeError, match=r"needs all rows at once\. Got a Shards"):
        own.predict(data, joint=True)


def test_the_other_methods_of_batches_take_files(folder):
    data = read_shards(folder, "y")
    methods = (
        po.methods.MAP(steps=20, batch_size=10),
        po.methods.SWAG(fit=po.methods.MAP(steps=20, batch_size=10), every=1, warmup=5, rank=5),
        po.methods.NaturalGradient(steps=20, batch_size=10),
        po.methods.SGLD(warmup=5, draws=5, batch_size=10),
        po.methods.Ensemble(po.methods.MAP(steps=5, batch_size=10), 2),
        po.methods.NUTS(warmup=5, draws=5),
    )
    for method in methods:
        q, _ = po.infer(method, joint(), data, progress=False)
        assert bool(torch.isfinite(q.predict(data, draws=5).mean).all()), method


def test_weights_and_samples_are_those_of_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 120)
    inputs, targets = shardfiles.rows()
    shares = torch.linspace(0.5, 1.5, 100, device="cpu")
    shardfiles.parquet.write_table(shardfiles.table(inputs, targets, share=shares.numpy()), tmp_path / "rows.parquet")
    stored, held = (
        as_data(read_shards(tmp_path / "rows.parquet", "y", weights="share")),
        as_data((inputs, targets, shares)),
    )
    for count in (7, 50):
        own, wanted = stored.sample(count), held.sample(count)
        assert torch.equal(own.inputs, wanted.inputs)
        assert torch.equal(own.weights, wanted.weights)
    fits = [po.infer(po.methods.Conjugate(), joint(), data)[0].point() for data in (stored, held)]
    assert torch.equal(*fits)


def test_labels_out_of_range_and_files_without_targets_are_refused(tmp_path):
    inputs, _ = shardfiles.rows()
    shardfiles.parquet.write_table(
        shardfiles.table(inputs, torch.arange(100, device="cpu") % 3), tmp_path / "rows.parquet"
    )
    problem = po.Joint(torch.nn.Linear(3, 2), po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=100)
    with pytest.raises(BadData, match=r"label"):
        po.infer(po.methods.MAP(steps=5, batch_size=10), problem, read_shards(tmp_path / "rows.parquet", "y"))
    with pytest.raises(BadData, match=r"The files must have targets"):
        po.infer(po.methods.MAP(steps=5), problem, read_shards(tmp_path / "rows.parquet"))
    with pytest.raises(BadData, match=r"num_data is 99"):
        po.infer(po.methods.MAP(steps=5), joint(99), read_shards(tmp_path / "rows.parquet", ["y"]))


def test_a_file_that_changes_during_a_run_ends_it(folder):
    def touch(run):
        if run.step == 3:
            os.utime(folder / "1.parquet", ns=(0, 0))

    with pytest.raises(BadData, match=r"has changed since it was opened"):
        po.infer(
            po.methods.MAP(steps=60, batch_size=10), joint(), read_shards(folder, "y", window=1), callbacks=[touch]
        )
