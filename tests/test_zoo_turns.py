"""Workers of the zoo on one device (cli/networks/turns.py): who is timed stops the others, which go on afterwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest

from kgopt.cli.networks.case import Settings
from kgopt.cli.networks.turns import Turns
from kgopt.cli.networks.worker import DiedError, Worker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs process groups")


WAITS = -1  # a number's value, before a process is one of the workers


def count(folder, number):
    os.setpgrp()
    number.value = WAITS
    Turns(folder)
    number.value = 1
    while True:
        number.value += 1
        time.sleep(0.001)


def hold(folder, has_it):
    os.setpgrp()
    with Turns(folder).alone():
        has_it.value = 1
        time.sleep(600)


def until(is_so):
    """A process takes its time to begin, on a busy host more than one expects."""
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def started(tmp_path):
    """Starts a process with a number that it shares; all are ended."""
    spawn = multiprocessing.get_context("spawn")
    found = []

    def start(target):
        number = spawn.Value("i", 0, lock=False)
        process = spawn.Process(target=target, args=(str(tmp_path), number), daemon=True)
        process.start()
        found.append(process)
        until(lambda: number.value > 0)
        return process, number

    yield start
    for process in found:
        process.kill()
        process.join()


def stands(number):
    """Whether it does not change in a tenth of a second; what was under way may end."""
    time.sleep(0.05)
    before = number.value
    time.sleep(0.1)
    return number.value == before


def test_others_stand_still_while_one_is_timed(started, tmp_path):
    _, number = started(count)
    turns = Turns(str(tmp_path), is_worker=False)
    until(lambda: not stands(number))
    with turns.alone() as is_new:
        assert is_new
        assert stands(number)
        assert turns.holder() == os.getpid()
        with turns.alone() as is_new:
            assert not is_new
        assert stands(number)
    until(lambda: not stands(number))
    assert turns.holder() == 0


def test_others_go_on_after_an_error(started, tmp_path):
    _, number = started(count)
    with pytest.raises(RuntimeError), Turns(str(tmp_path), is_worker=False).alone():
        raise RuntimeError("of a measurement")
    until(lambda: not stands(number))


def test_others_go_on_when_the_one_is_killed(started, tmp_path):
    """A lock ends with its process; that it had stopped others is for the run to mend."""
    _, number = started(count)
    holder, _ = started(hold)
    assert stands(number)
    turns = Turns(str(tmp_path), is_worker=False)
    assert turns.holder() == holder.pid
    os.killpg(holder.pid, signal.SIGKILL)
    holder.join()
    assert stands(number)
    turns.resume(holder.pid)
    until(lambda: not stands(number))
    assert turns.holder() == 0


def test_a_worker_that_begins_waits_for_the_one(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    number = spawn.Value("i", 0, lock=False)
    process = spawn.Process(target=count, args=(str(tmp_path), number), daemon=True)
    with Turns(str(tmp_path), is_worker=False).alone():
        process.start()
        until(lambda: number.value == WAITS)
        time.sleep(0.5)
        assert number.value == WAITS
    until(lambda: number.value > 0)
    process.kill()
    process.join()


def test_time_in_which_a_worker_stands_still_does_not_count(tmp_path):
    worker = Worker(Settings("cpu", small=True, seconds=0.0, turns=str(tmp_path)))
    try:
        assert worker.facts["device"] == "cpu"
        (tmp_path / "alone").write_text("1")  # another one's process
        threading.Timer(2.0, (tmp_path / "alone").write_text, ("0",)).start()
        start = time.monotonic()
        with pytest.raises(DiedError, match="over 1 s"):
            worker._receive(1.0)
        assert 2.0 <= time.monotonic() - start < 30.0
    finally:
        worker.stop()
    assert not list(tmp_path.glob("group_*"))
