"""Children that misbehave in every way end alone, in time, and leave nothing behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fibc import isolation, supervisor

PYTHON = [sys.executable, "-S", "-c"]
SCRIPT = [sys.executable, "-S", supervisor.__file__]

PATIENCE_S = 60.0
"""What another process may take on a loaded machine."""


def _alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie that its new parent has not reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def _pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


ESCAPING_FAMILY = """
import os, sys, time
path = sys.argv[1]
def note():
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\n")
note()
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            note()
            time.sleep(600)
        note()
        time.sleep(600)
while len(open(path).read().split()) < 5:
    time.sleep(0.001)
"""


def test_a_command_returns_its_status_and_its_streams() -> None:
    done = isolation.run(
        [*PYTHON, "import sys; print(input()); print('no', file=sys.stderr); sys.exit(3)"], timeout_s=30, stdin=b"yes\n"
    )
    assert (done.returncode, done.signal, done.timed_out) == (3, None, False)
    assert (done.stdout, done.stderr_tail) == ("yes\n", "no\n")
    assert not done.ok


def test_environment_and_directory_are_the_commands(tmp_path: Path) -> None:
    done = isolation.run(
        [*PYTHON, "import os; print(os.environ['COLOUR'], os.getcwd())"],
        timeout_s=30,
        cwd=tmp_path,
        env={"COLOUR": "red"},
    )
    assert done.stdout == f"red {tmp_path.resolve()}\n"


def test_a_command_that_does_not_exist_ends_with_127_and_says_so() -> None:
    done = isolation.run(["fibc-no-such-compiler"], timeout_s=30)
    assert done.returncode == 127
    assert "fibc-no-such-compiler" in done.stderr_tail


def test_only_the_end_of_endless_output_is_kept() -> None:
    done = isolation.run([*PYTHON, "print('x' * 10_000_000); print('the end')"], timeout_s=30)
    assert done.ok
    assert len(done.stdout) == isolation.TAIL_BYTES
    assert done.stdout.endswith("x\nthe end\n")


def test_a_compiler_that_aborts_is_reported_by_its_signal() -> None:
    done = isolation.run([*PYTHON, "import os; os.abort()"], timeout_s=30)
    assert (done.returncode, done.signal) == (-signal.SIGABRT, signal.SIGABRT)


def test_a_compiler_that_never_ends_is_killed_at_its_deadline_with_children_that_left_its_group(tmp_path: Path) -> None:
    for timeout_s in (0.5, 2.0, 8.0, 32.0):  # on a loaded machine the family takes its time to appear
        noted = tmp_path / f"pids-{timeout_s}"
        done = isolation.run([*PYTHON, ESCAPING_FAMILY + "time.sleep(600)", str(noted)], timeout_s=timeout_s)
        assert done.timed_out
        if noted.exists() and len(_pids(noted)) == 5:
            break
    assert len(_pids(noted)) == 5
    assert not any(map(_alive, _pids(noted)))


def test_a_compiler_that_ignores_signals_is_killed() -> None:
    done = isolation.run(
        [*PYTHON, "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)]; time.sleep(600)"],
        timeout_s=0.5,
    )
    assert (done.timed_out, done.signal) == (True, signal.SIGKILL)


def test_children_left_behind_by_a_command_that_ended_well_are_killed(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    done = isolation.run([*PYTHON, ESCAPING_FAMILY, str(noted)], timeout_s=30)
    assert done.ok
    assert len(_pids(noted)) == 5
    assert not any(map(_alive, _pids(noted)))


def test_a_compiler_that_takes_a_hundred_gibibytes_fails_alone() -> None:
    done = isolation.run([*PYTHON, "bytearray(100 << 30)"], timeout_s=30, memory_bytes=1 << 30)
    assert done.returncode == 1
    assert "MemoryError" in done.stderr_tail


def test_no_core_is_dumped(tmp_path: Path) -> None:
    done = isolation.run(
        [*PYTHON, "import os, resource; print(resource.getrlimit(resource.RLIMIT_CORE)); os.abort()"],
        timeout_s=30,
        cwd=tmp_path,
    )
    assert done.signal == signal.SIGABRT
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_the_caller_is_killed(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    command = [*PYTHON, ESCAPING_FAMILY + "time.sleep(600)", str(noted)]
    caller = f"from fibc import isolation; isolation.run({command!r}, timeout_s=600)"
    process = subprocess.Popen([sys.executable, "-c", caller])
    while not noted.exists() or len(_pids(noted)) < 5:
        time.sleep(0.01)
    process.kill()
    process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while any(map(_alive, _pids(noted))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_alive, _pids(noted)))


def test_no_zombie_is_left() -> None:
    isolation.run(["true"], timeout_s=30)
    with isolation.start(["sleep", "600"]) as child:
        assert child.poll() is None
    assert supervisor.descendants() == []


def test_a_started_command_is_stopped_with_the_block() -> None:
    with isolation.start(["sleep", "600"]) as child:
        assert child.wait(0.01) is None
    ended = child.poll()
    assert ended is not None
    assert ended.signal == signal.SIGKILL
    assert not ended.timed_out
    assert not _alive(child.pid)


def test_an_ended_command_reports_its_status_without_being_stopped() -> None:
    with isolation.start([*PYTHON, "raise SystemExit(7)"]) as child:
        ended = child.wait(30)
    assert ended is not None
    assert ended.returncode == 7


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 5"], 5),
        (["sh", "-c", "kill -ABRT $$"], 134),
        (["fibc-no-such-compiler"], 127),
    ],
)
def test_the_script_exits_as_a_shell_would(command: list[str], status: int) -> None:
    assert (
        subprocess.run(
            [*SCRIPT, "--timeout-s", "30", "--", *command], check=False, stderr=subprocess.DEVNULL
        ).returncode
        == status
    )


def test_the_script_says_that_the_deadline_ended_its_command() -> None:
    done = subprocess.run(
        [*SCRIPT, "--timeout-s", "0.2", "--", "sleep", "600"], check=False, capture_output=True, text=True
    )
    assert done.returncode == supervisor.TIMED_OUT_STATUS
    assert "deadline of 0.2 s" in done.stderr


def test_the_script_explains_its_usage() -> None:
    done = subprocess.run([*SCRIPT, "--colour", "red"], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def test_interrupting_the_script_kills_its_command(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    process = subprocess.Popen(
        [*SCRIPT, "--timeout-s", "600", "--", *PYTHON, ESCAPING_FAMILY + "time.sleep(600)", str(noted)]
    )
    while not noted.exists() or len(_pids(noted)) < 5:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGKILL
    assert not any(map(_alive, _pids(noted)))


def test_the_script_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-X", "importtime", supervisor.__file__, "--", "true"],
        check=True,
        capture_output=True,
        text=True,
    )
    imported = {line.rsplit("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "resource" in imported
    assert not {"subprocess", "dataclasses", "typing", "argparse", "pathlib"} & imported


def test_a_real_compiler_works_under_a_memory_limit(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source = tmp_path / "x.cpp"
    source.write_text("int f() { return 1; }\n")
    assert isolation.run([compiler, "-c", source, "-o", tmp_path / "x.o"], timeout_s=60, memory_bytes=2 << 30).ok
    assert (tmp_path / "x.o").stat().st_size > 0
