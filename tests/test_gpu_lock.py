"""One run at a time measures on a physical GPU, whichever user and process it belongs to."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fibc import gpu_lock
from fibc.errors import EvaluationError, InputError
from fibc.gpu_lock import lock_device, lock_devices, lock_gpu
from fibc.schema.silicon import CudaValidity, Gpu

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"

OWNER = """
import subprocess, sys
from pathlib import Path
from fibc.gpu_lock import lock_gpu
with lock_gpu(sys.argv[2], wait_s=0, say=print, directories=(Path(sys.argv[1]),)):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    input()
"""


def never(text: str) -> None:
    pytest.fail(f"nothing to wait for, but said: {text}")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    tmp_path.chmod(0o1777)
    return tmp_path


def start_owner(directory: Path, uuid: str = UUID) -> tuple[subprocess.Popen[str], int]:
    """Start a process that holds the lock, with a child that outlives it, and return both."""
    command = [sys.executable, "-c", OWNER, str(directory), uuid]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, int(owner.stdout.readline())


def end(owner: subprocess.Popen[str], child: int) -> None:
    held_open = os.pidfd_open(child)
    owner.kill()
    owner.wait()
    for stream in (owner.stdin, owner.stdout):
        assert stream is not None
        stream.close()
    signal.pidfd_send_signal(held_open, signal.SIGKILL)
    os.close(held_open)


def test_a_second_run_is_refused_and_told_what_to_do(shared: Path) -> None:
    owner, child = start_owner(shared)
    try:
        with (
            pytest.raises(InputError, match=rf"gpu {UUID}: another run measures there \(wait until"),
            lock_gpu(UUID, wait_s=0, say=never, directories=(shared,)),
        ):
            pytest.fail("two runs at once")
        with lock_gpu("GPU-other", wait_s=0, say=never, directories=(shared,)):
            pass  # another GPU is free
    finally:
        end(owner, child)


def test_the_lock_dies_with_its_owner_even_where_the_owners_child_lives_on(shared: Path) -> None:
    owner, child = start_owner(shared)
    owner.kill()
    owner.wait()
    with lock_gpu(UUID, wait_s=0, say=never, directories=(shared,)):
        pass
    end(owner, child)


def test_a_second_run_says_that_it_waits_and_goes_on_when_the_first_ends(shared: Path) -> None:
    first_may_end, first_holds = threading.Event(), threading.Event()

    def first() -> None:
        with lock_gpu(UUID, wait_s=0, say=never, directories=(shared,)):
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
        with lock_gpu(UUID, wait_s=60, say=say, directories=(shared,)):
            pass
    finally:
        first_may_end.set()
        thread.join()
    assert said == [f"gpu {UUID}: another run measures there; waiting up to 60 s for it"]


def test_the_thread_that_holds_the_lock_may_take_it_again_and_no_other_one_may(shared: Path) -> None:
    refused: list[str] = []

    def other() -> None:
        with pytest.raises(InputError) as raised, lock_gpu(UUID, wait_s=0, say=never, directories=(shared,)):
            pytest.fail("two at once")
        refused.append(str(raised.value))

    with lock_gpu(UUID, wait_s=0, say=never, directories=(shared,)):
        with lock_gpu(UUID, wait_s=0, say=never, directories=(shared,)):
            pass
        thread = threading.Thread(target=other)  # the inner block's end has given nothing back
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert refused[0].startswith(f"gpu {UUID}: another run measures there (wait until it has ended")
    end(*start_owner(shared))  # another process takes it, now that it is free


def test_slices_of_one_gpu_share_its_lock_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    validity = CudaValidity("sm_90a", 90, 16, 15 << 20, 1 << 34)
    whole = Gpu(0, UUID, "0000:1b:00.0", "NVIDIA H200", "", "580.1", 232448, validity)
    slices = [replace(whole, uuid=f"MIG-{number}", mig="1g.18gb") for number in (1, 2)]
    assert whole.physical == UUID
    assert slices[0].physical == slices[1].physical == "0000:1b:00.0"
    monkeypatch.setattr(gpu_lock, "lock_gpu", partial(lock_gpu, directories=(shared,)))
    with lock_device(slices[1], wait_s=0, say=never), lock_device(None, wait_s=0, say=never):
        (file,) = shared.iterdir()
        assert file.name.startswith("fibc-0000_1b_00.0-")


def test_several_gpus_are_locked_in_one_order_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    validity = CudaValidity("sm_90a", 90, 16, 15 << 20, 1 << 34)
    whole = Gpu(0, "GPU-b", "0000:1b:00.0", "NVIDIA H200", "", "580.1", 232448, validity)
    half = replace(whole, uuid="MIG-1", mig="1g.18gb")
    taken: list[str] = []

    @contextlib.contextmanager
    def lock(uuid: str, *, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
        taken.append(uuid)
        yield
        taken.remove(uuid)

    monkeypatch.setattr(gpu_lock, "lock_gpu", lock)
    gpus = [whole, None, replace(whole, uuid="GPU-a"), half, replace(half, uuid="MIG-2")]
    with lock_devices(gpus, wait_s=0, say=never):
        assert taken == ["0000:1b:00.0", "GPU-a", "GPU-b"]
    assert not taken


def test_every_user_can_open_the_file_and_nobody_needs_to_own_it(shared: Path) -> None:
    before = os.umask(0o077)
    try:
        with lock_gpu(UUID, wait_s=0, say=never, directories=(shared,)):
            pass
    finally:
        os.umask(before)
    (file,) = shared.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    file.chmod(0o400)
    with lock_gpu(UUID, wait_s=0, say=never, directories=(shared,)):
        pass
    assert stat.S_IMODE(file.stat().st_mode) == 0o400  # it was opened as it is, not made anew


def test_a_file_that_is_removed_while_it_is_locked_does_not_lock(shared: Path) -> None:
    handle = gpu_lock._open(shared / "x.lock")
    (shared / "x.lock").unlink()
    assert gpu_lock._try(shared / "x.lock") is not None
    os.close(handle)


def test_a_symbolic_link_in_the_shared_directory_is_not_followed(shared: Path, tmp_path: Path) -> None:
    (shared / f"fibc-{UUID}.lock").symlink_to(tmp_path / "victim")
    with (
        pytest.raises(EvaluationError, match="must be a file that can be read"),
        lock_gpu(UUID, wait_s=0, say=never, directories=(shared,)),
    ):
        pytest.fail("followed")
    assert not (tmp_path / "victim").exists()


def test_a_directory_that_is_not_everybodys_is_passed_over(shared: Path) -> None:
    private = shared / "private"
    private.mkdir(mode=0o755)
    with lock_gpu(UUID, wait_s=0, say=never, directories=(shared / "absent", private, shared)):
        assert [path.name for path in shared.iterdir() if path.is_file()] == [f"fibc-{UUID}.lock"]
    with (
        pytest.raises(EvaluationError, match="mode 1777"),
        lock_gpu(UUID, wait_s=0, say=never, directories=(private,)),
    ):
        pytest.fail("locked where others cannot")


def test_an_error_inside_releases_the_lock(shared: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), lock_gpu(UUID, wait_s=0, say=never, directories=(shared,)):
            raise KeyboardInterrupt


def test_the_directories_of_this_machine_hold_a_lock() -> None:
    uuid = f"GPU-test-{os.getpid()}"
    with lock_gpu(uuid, wait_s=0, say=never):
        (path,) = [p for d in gpu_lock.DIRECTORIES if (p := d / f"fibc-{uuid}.lock").exists()]
    path.unlink()
