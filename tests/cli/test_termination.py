"""What a `kill` does to the command line; to a fit: see test_fit.py."""

import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from posterity.cli.main import as_interrupt


@pytest.fixture(autouse=True)
def ctrl_c_as_usual():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def killed():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def killed_while_another_works():
    with ProcessPoolExecutor(1) as pool:
        waiting = pool.submit(time.sleep, 60)
        while not waiting.running():
            time.sleep(0.01)
        killed()


def test_a_kill_is_a_keyboard_interrupt_and_only_inside():
    with pytest.raises(KeyboardInterrupt), as_interrupt():
        killed()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_those_who_work_for_the_process_do_not_keep_it_waiting():
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), as_interrupt():
        killed_while_another_works()
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
