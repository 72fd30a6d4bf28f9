"""The executor `Ray` on one local cluster of two nodes, of which one declares a GPU that is not there.

One test runs all checks, because xdist would start a cluster in each of its workers.
"""

import logging
import os
import signal
import threading
import time
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from clusterwork import shared, wait_to_be_killed, warn, where
from contracts.cases import numbers, regression
from executorcases import FIT, FLOAT64, assert_same, mixed_tasks, tasks
from killedworkers import Deadly, diverge

import posterity as po
from posterity.errors import Diverged, PosterityError
from posterity.estimators.automatic import fit_automatic
from posterity.inference import Outcome, Ray, Sequential, Task
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, Ensemble
from posterity.priors import Normal
from posterity.scale import ray as scale
from posterity.scale.parcels import Lost

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'posterity[ray]'")
pytestmark = pytest.mark.cpu
RAY = Ray(threads=1, workers=2)


@pytest.fixture
def cluster():
    """A head node with a CPU, to which this process is connected, and a node with a CPU and a GPU in name only."""
    with scale.sigterm_kept():  # each node that is added takes SIGTERM over
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ray.cluster_utils import Cluster

            nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
            nodes.add_node(num_cpus=1, num_gpus=1)
            before = signal.getsignal(signal.SIGTERM)
            scale.connect(nodes.address, 1)
            assert signal.getsignal(signal.SIGTERM) is before
        yield nodes
        ray.shutdown()
        nodes.shutdown()


def an_ensemble_and_tasks_that_fail_have_the_bits_of_one_after_the_other(cluster, folder, monkeypatch, caplog):
    joint, rows = regression(FLOAT64), numbers(FLOAT64)
    given = [*Ensemble(MAP(steps=5, batch_size=6), 4).tasks(joint, rows, seed=1), *mixed_tasks()]
    assert_same(Sequential().run(given), RAY.run(given))


def auto_has_the_bits_of_one_after_the_other(cluster, folder, monkeypatch, caplog):
    x = torch.linspace(-2, 2, 40).unsqueeze(1)
    here, there = (
        fit_automatic(x, (3.0 * x).sin(), "regression", seconds=1.0, executor=executor) for executor in (None, RAY)
    )
    assert here.sentence == there.sentence
    for name, part in here.parts().items():
        other = there.parts()[name]
        assert part.config == other.config
        assert all(torch.equal(tensor, other.tensors[key]) for key, tensor in part.tensors.items())


def threads_cpus_and_gpus_are_asked_for_each_task(cluster, folder, monkeypatch, caplog):
    (threads,) = Ray(threads=3, cpus=1).results({"threads": torch.get_num_threads})
    assert threads == 3
    ((pid, devices),) = Ray(threads=1, gpus=1).results({"gpu": where})
    assert pid != os.getpid()
    assert devices == "0"
    with pytest.raises(PosterityError, match=r"needs a node with 1 CPUs and 2 GPUs\. The nodes have .* and 1 GPUs"):
        list(Ray(threads=1, gpus=2).results({"gpu": where}))
    with pytest.raises(PosterityError, match="needs a node with 2 CPUs"):
        list(Ray(threads=2).results({"cpu": where}))


def large_tensors_travel_once_and_each_task_has_its_own_copy(cluster, folder, monkeypatch, caplog):
    rows, puts, put = torch.zeros(20_000), [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(len(value)) or put(value))
    work = {str(number): partial(shared, rows, number) for number in range(6)}
    assert dict(RAY.each(work)) == {str(number): 20_000.0 * number for number in range(6)}
    assert len(puts) == 1
    assert puts[0] > 80_000
    assert float(rows.sum()) == 0.0


def warnings_of_the_work_are_logged_here(cluster, folder, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "posterity"):
        assert list(RAY.results({"one": partial(warn, 3)})) == [3]
    assert [record.getMessage() for record in caplog.records] == ["the step was small: 3"]


def errors_end_the_work_and_what_cannot_travel_is_lost(cluster, folder, monkeypatch, caplog):
    with pytest.raises(PosterityError, match="seed 3: The loss is NaN") as caught:
        list(RAY.results({"one": diverge, "two": int}))
    assert caught.value.exit_code == Diverged.exit_code
    lost = dict(RAY.each({"lock": partial(print, threading.Lock()), "result": threading.Lock, "fine": int}))
    assert lost.pop("fine") == 0
    assert all(isinstance(result, Lost) and "it cannot be sent to a process" in str(result) for result in lost.values())


def other_versions_are_refused(cluster, folder, monkeypatch, caplog):
    monkeypatch.setattr(scale, "_versions", lambda: ("0.0.9", torch.__version__))
    with pytest.raises(PosterityError, match=r"a node cannot begin the work .* Each needs Python .*, as here"):
        list(RAY.results({"one": int}))


def a_killed_worker_is_begun_again_and_a_task_that_always_kills_is_named(cluster, folder, monkeypatch, caplog):
    folders = folder / "once", folder / "always"
    given = tasks(1)
    for folder, times in zip(folders, (1, 99), strict=True):
        folder.mkdir()
        joint = po.Joint(Deadly(folder, times).double(), Gaussian(0.3), Normal(), 12)
        given.append(Task(folder.name, FIT, joint, numbers(FLOAT64)))
    outcomes = Ray(threads=1, retries=1).run(given)
    assert_same(Sequential().run(given[:2]), outcomes[:2])
    assert "its worker or node died, 2 times" in outcomes[2].error
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 2]


def an_interrupted_run_keeps_what_is_done(cluster, folder, monkeypatch, caplog):
    save, saved = Outcome.save, []

    def interrupted(self, task, path):
        if saved:
            raise KeyboardInterrupt
        save(self, task, path)
        saved.append(self.name)

    with monkeypatch.context() as patch:
        patch.setattr(Outcome, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Ray(threads=1, workers=1).run(tasks(4), folder)
    assert [path.name for path in folder.iterdir()] == saved
    ran, each = [], Ray.each
    monkeypatch.setattr(Ray, "each", lambda self, work: ran.extend(work) or each(self, work))
    assert_same(Sequential().run(tasks(4)), RAY.run(tasks(4), folder))
    assert sorted([*ran, *saved]) == [f"fit {number}" for number in range(4)]


def work_of_a_node_that_dies_is_begun_again(cluster, folder, monkeypatch, caplog):
    mortal = cluster.add_node(num_cpus=1, num_gpus=2)  # the only one with two, until it dies
    executor, work, results = Ray(threads=1, gpus=2), {"sum": partial(wait_to_be_killed, folder, 3)}, {}
    thread = threading.Thread(target=lambda: results.update(executor.each(work)))
    thread.start()
    while not list(folder.iterdir()):
        time.sleep(0.05)
    cluster.remove_node(mortal, allow_graceful=False)
    cluster.add_node(num_cpus=1, num_gpus=2)
    thread.join()
    assert results == {"sum": 6.0}


CHECKS = (
    an_ensemble_and_tasks_that_fail_have_the_bits_of_one_after_the_other,
    auto_has_the_bits_of_one_after_the_other,
    threads_cpus_and_gpus_are_asked_for_each_task,
    large_tensors_travel_once_and_each_task_has_its_own_copy,
    warnings_of_the_work_are_logged_here,
    errors_end_the_work_and_what_cannot_travel_is_lost,
    other_versions_are_refused,
    a_killed_worker_is_begun_again_and_a_task_that_always_kills_is_named,
    an_interrupted_run_keeps_what_is_done,
    work_of_a_node_that_dies_is_begun_again,
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of sockets that Ray leaves open
def test_work_on_a_cluster(cluster, tmp_path, monkeypatch, caplog):
    for number, check in enumerate(CHECKS):
        folder = tmp_path / str(number)
        folder.mkdir()
        caplog.clear()
        with monkeypatch.context() as patch:
            check(cluster, folder, patch, caplog)


def test_bad_arguments_are_refused():
    for wrong, said in (
        (lambda: Ray(workers=0), "Ray.workers must be a positive whole number"),
        (lambda: Ray(threads=0), "Ray.threads must be"),
        (lambda: Ray(cpus=0.0), "Ray.cpus must be a positive"),
        (lambda: Ray(gpus=-1.0), "Ray.gpus must be a positive"),
        (lambda: Ray(retries=-1), "Ray.retries must be"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()


def test_tensors_of_work_that_cannot_be_sent_are_not_kept(monkeypatch):
    monkeypatch.setattr(scale, "_ray", lambda: SimpleNamespace(put=len))
    store, common, own = scale._Store(), torch.zeros(scale.SHARED), torch.ones(scale.SHARED)
    _, keys = store.pack([common])
    with pytest.raises(TypeError, match="cannot pickle"):
        store.pack([common, own, threading.Lock()])
    assert [tensor.data_ptr() for tensor, _ in store.kept.values()] == [common.data_ptr()]
    store.release(keys)
    assert not store.kept
    assert not store.users
