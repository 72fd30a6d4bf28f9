"""What a `kill` does to the command line; to a fit: see test_fit.py."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from joblib.externals.loky import ProcessPoolExecutor as ProcessPoolExecutorOfLoky

from posterity.cli.start import as_interrupt
from posterity.inference.infer import Interrupt


@pytest.fixture(autouse=True)
def ctrl_c_as_usual():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def killed():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def killed_while_another_works(executor):
    with executor(1) as pool:
        waiting = pool.submit(time.sleep, 60)
        while not waiting.running():
            time.sleep(0.01)
        killed()


def test_a_kill_is_a_keyboard_interrupt_and_only_inside():
    with pytest.raises(KeyboardInterrupt), as_interrupt():
        killed()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("executor", [ProcessPoolExecutor, ProcessPoolExecutorOfLoky], ids=["standard", "loky"])
def test_those_who_work_for_the_process_do_not_keep_it_waiting(executor):
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), as_interrupt():
        killed_while_another_works(executor)
    assert time.monotonic() - begun < 30


def test_a_handler_of_somebody_else_stays():
    def theirs(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, theirs)
    try:
        with as_interrupt():
            assert signal.getsignal(signal.SIGTERM) is theirs
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_leaves_signals_alone():
    found = []

    def inside():
        with as_interrupt():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


@pytest.fixture
def start():
    """A function that starts Python in a process of its own, which is ended with the test."""
    begun = []

    def call(*words):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        begun.append(subprocess.Popen([sys.executable, *map(str, words)], env=environment, **pipes))
        return begun[-1]

    yield call
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["typer", "torch", "posterity.cli.main"])
def test_a_signal_while_a_module_is_imported_ends_in_one_line(start, tmp_path, number, module):
    """The signal comes from the process itself when it looks for the module, so that no test depends on the clock."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from posterity.cli.start import main\n"
        f"sys.argv = ['posterity', 'fit', 'sine', '--out', {str(tmp_path / 'run')!r}]\n"
        "sys.exit(main())\n"
    )
    process = start(script)
    assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 130


STUCK = """
import hashlib, os, signal, sys, threading, time
import posterity.cli.start as start

start.GRACE, start.AT_ONCE = 0.5, 0.2
class Run:
    came = 0
    def __call__(self, number, frame):  # as a run that wants to finish its step
        self.came += 1

def step():
    print("begun", flush=True)
    {step}

with start.as_interrupt():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, Run())
    step()
"""


@pytest.mark.parametrize(
    "step", ["time.sleep(60)", "hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)"], ids=["Python", "C"]
)
@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)]
)
def test_a_step_that_does_not_end_is_left(start, step, signals):
    process = start("-c", STUCK.format(step=step))
    assert process.stdout.readline() == "begun\n"
    begun = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    assert process.communicate(timeout=30)[1] == "interrupted\n"
    assert process.returncode == 130
    assert time.monotonic() - begun < 20


def test_one_interrupt_of_a_step_waits_for_it(start):
    process = start("-c", STUCK.format(step="time.sleep(1.5); print('ended', flush=True)"))
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("ended\n", "")
    assert process.returncode == 0


def test_a_run_takes_over_a_signal_that_stops_runs():
    def theirs(number, frame):
        raise AssertionError

    theirs.stops_runs = True
    before = signal.signal(signal.SIGTERM, theirs)
    try:
        with Interrupt(wanted=True) as interrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupt.came
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is theirs
        del theirs.stops_runs
        with Interrupt(wanted=True):
            assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)
