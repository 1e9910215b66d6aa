"""One run at a time works in an --out directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fibc.errors import InputError
from fibc.lock import lock_out
from fibc.paths import OutLayout

OWNER = """
import subprocess, sys
from pathlib import Path
from fibc.lock import lock_out
from fibc.paths import OutLayout
with lock_out(OutLayout(Path(sys.argv[1])), wait_s=0, say=print):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    input()
"""


def never(text: str) -> None:
    pytest.fail(f"nothing to wait for, but said: {text}")


def start_owner(out: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a process that holds the lock, with a child that outlives it, and return both."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    return owner, int(owner.stdout.readline())


def end(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.wait()
    for stream in (owner.stdin, owner.stdout):
        assert stream is not None
        stream.close()


def test_a_second_run_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    owner, _ = start_owner(tmp_path)
    try:
        with (
            pytest.raises(InputError, match=r"--out: .* is in use by another run \(wait"),
            lock_out(OutLayout(tmp_path), wait_s=0, say=never),
        ):
            pytest.fail("two runs at once")
    finally:
        end(owner)


def test_the_lock_dies_with_its_owner_even_where_the_owners_child_lives_on(tmp_path: Path) -> None:
    owner, child = start_owner(tmp_path)
    held_open = os.pidfd_open(child)
    end(owner)
    try:
        with lock_out(OutLayout(tmp_path), wait_s=0, say=never):
            pass
    finally:
        signal.pidfd_send_signal(held_open, signal.SIGKILL)
        os.close(held_open)


def test_a_second_run_says_that_it_waits_and_goes_on_when_the_first_ends(tmp_path: Path) -> None:
    layout = OutLayout(tmp_path)
    first_may_end = threading.Event()
    first_holds = threading.Event()

    def first() -> None:
        with lock_out(layout, wait_s=0, say=never):
            first_holds.set()
            first_may_end.wait()

    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        first_may_end.set()

    thread = threading.Thread(target=first)
    thread.start()
    try:
        first_holds.wait()
        with lock_out(layout, wait_s=60, say=say):
            pass
    finally:
        first_may_end.set()
        thread.join()
    assert said == [f"{tmp_path}: another run works here; waiting up to 60 s for it"]


def test_an_error_inside_releases_the_lock(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), lock_out(OutLayout(tmp_path), wait_s=0, say=never):
            raise KeyboardInterrupt
