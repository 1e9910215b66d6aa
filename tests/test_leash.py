"""Commands of one thread that another thread ends."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from fibc import isolation, supervisor
from fibc.leash import CutError, Leash

FAMILY = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


def test_a_cut_leash_ends_what_the_thread_runs_and_what_it_would_run_later(tmp_path: Path) -> None:
    leash, raised = Leash(), []

    def work() -> None:
        with leash.worn():
            for _ in range(2):
                try:
                    isolation.run([sys.executable, "-S", "-c", FAMILY, str(tmp_path / "pid")], timeout_s=600)
                except CutError as error:
                    raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    child = int((tmp_path / "pid").read_text())
    leash.cut()
    thread.join(timeout=isolation.GRACE_S)
    assert not thread.is_alive()
    assert len(raised) == 2
    assert child not in supervisor.descendants()


def test_a_leash_holds_only_the_threads_that_wear_it() -> None:
    leash = Leash()
    leash.cut()
    assert isolation.run([sys.executable, "-S", "-c", "print(1)"], timeout_s=60).stdout == "1\n"
    with leash.worn(), pytest.raises(CutError):
        isolation.run([sys.executable, "-S", "-c", "print(1)"], timeout_s=60)
    assert isolation.run([sys.executable, "-S", "-c", "print(1)"], timeout_s=60).ok


def test_a_command_that_ends_under_an_uncut_leash_returns_what_it_said() -> None:
    with Leash().worn():
        assert isolation.run([sys.executable, "-S", "-c", "print(1)"], timeout_s=60).stdout == "1\n"
