"""How documented blocks that no test runs are validated: by parsing, and by the tool that reads them where it is."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from documentation import ROOT, Block, find_commands, misuse

from fibc.prometheus import METRICS

CRON_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))

SBATCH_OPTIONS = ("--job-name", "--exclusive", "--gres", "--time", "--signal")
"""Those that a page uses, held to `man sbatch` of Slurm 24.05."""

UNIT_KEYS = {
    "Unit": {"Description"},
    "Service": {"Type", "User", "Nice", "ExecStart", "ExecStopPost", "TimeoutStartSec", "KillSignal"},
    "Timer": {"OnCalendar", "RandomizedDelaySec", "Persistent"},
    "Install": {"WantedBy"},
}
"""Keys that a page uses, held to systemd.service(5) and systemd.timer(5); systemd-analyze judges where it is there."""


def check_options(block: Block) -> None:
    """Every fibc command of a shell block is one that the command line takes."""
    commands = list(find_commands(block.text))
    assert commands, f"{block}: has no fibc command"
    problems = [text for command in commands if (text := misuse(command))]
    assert not problems, f"{block}: {problems}"


def check_make(block: Block) -> None:
    """Targets exist: make says what it would do."""
    for line in block.text.splitlines():
        subprocess.run(["make", "-n", *line.split("#")[0].split()[1:]], cwd=ROOT, check=True, capture_output=True)


def check_output(block: Block) -> None:
    """Every line was printed, by the run whose file is in the results."""
    texts = [" ".join(path.read_text().split()) for path in (ROOT / "benchmarks" / "results").glob("*/*tune_*.txt")]
    lines = [" ".join(line.split()) for line in block.text.splitlines()]
    assert any(all(line in text for line in lines) for text in texts), f"{block}: no results file has all its lines"


def check_python(block: Block) -> None:
    """Python compiles it."""
    compile(block.text, str(block), "exec")


def check_alerts(block: Block) -> None:
    """Rules have names, and expressions over metrics that `fibc status --prometheus` writes."""
    rules = yaml.safe_load(block.text)
    known = {name for name, _, _ in METRICS}
    for rule in rules:
        assert set(rule) - {"for"} == {"alert", "expr"}, rule
        metrics = set(re.findall(r"fibc_\w+", rule["expr"]))
        assert metrics, rule
        assert metrics <= known, f"{block}: {rule['expr']} (known: {sorted(known)})"


def check_extra(block: Block) -> None:
    """The extra that is installed is one of the package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"fibc\[(\w+)\]", block.text)
    assert asked
    assert set(asked) <= set(extras), f"{block}: {asked}"


def check_dashboard(block: Block) -> None:
    """The dashboard reads the file that a tune writes into build/."""
    from fibc.paths import OutLayout

    storage = f"sqlite:///{OutLayout(Path('build')).studies}"
    assert f"optuna-dashboard {storage}" in block.text.splitlines()


def check_service(block: Block) -> None:
    """The unit has a command, and fibc takes it."""
    unit = _unit(block)
    assert unit["Service"]["Type"] == "oneshot"
    for command in unit_commands(block):
        check_options(Block(block.page, block.line, command))
    _systemd_verify({"fibc-retune.service": block.text}, block)


def check_timer(block: Block) -> None:
    """The timer is at a time that systemd understands."""
    unit = _unit(block)
    assert unit["Install"]["WantedBy"] == "timers.target"
    assert re.fullmatch(r"\*-\*-\* \d\d:\d\d", unit["Timer"]["OnCalendar"])
    service = "[Service]\nType=oneshot\nExecStart=/bin/true\n"
    _systemd_verify({"fibc-retune.timer": block.text, "fibc-retune.service": service}, block)


def unit_commands(block: Block) -> tuple[str, ...]:
    """Return the commands of a unit."""
    service = _unit(block)["Service"]
    return tuple(value for name, value in service.items() if name.startswith("Exec"))


def _unit(block: Block) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(block.text)
    for section in unit.sections():
        unknown = set(unit[section]) - UNIT_KEYS[section]
        assert not unknown, f"{block}: [{section}] {sorted(unknown)} (accepted: {sorted(UNIT_KEYS[section])})"
    return unit


def _systemd_verify(units: Mapping[str, str], block: Block) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        return
    with tempfile.TemporaryDirectory(prefix="fibc-units-") as name:
        for file, text in units.items():
            # It looks for the program: one that is there stands for fibc's.
            (Path(name) / file).write_text(text.replace("/opt/fibc/bin/fibc", "/bin/true"))
        done = subprocess.run(
            [program, "verify", *(str(Path(name) / file) for file in units)],
            env={**os.environ, "SYSTEMD_LOG_TARGET": "console"},
            capture_output=True,
            text=True,
            check=False,
        )
    said = [line for line in done.stderr.splitlines() if "fibc-retune" in line]  # others' units are not ours to judge
    assert (done.returncode, said) == (0, []), f"{block}: {done.stderr}"


def check_cron(block: Block) -> None:
    """Five fields in their ranges, a user, a command without the % that cron takes for a newline."""
    for line in block.text.splitlines():
        fields, user, command = cron_fields(line)
        for text, (low, high) in zip(fields, CRON_RANGES, strict=True):
            for part in text.split(","):
                number, _, step = part.partition("/")
                bounds = [] if number == "*" else number.split("-")
                assert all(low <= int(bound) <= high for bound in bounds), (
                    f"{block}: {part} (accepted: {low} to {high})"
                )
                assert not step or 1 <= int(step) <= high, f"{block}: {part}"
        assert re.fullmatch(r"[a-z_][a-z0-9_-]*", user), f"{block}: {user} is no user"
        assert "%" not in command, f"{block}: cron ends the command at %"
        check_options(Block(block.page, block.line, command))


def cron_fields(line: str) -> tuple[list[str], str, str]:
    """Return the five fields of a line of /etc/cron.d, the user, and the command."""
    *fields, user, command = line.split(None, 6)
    return fields, user, command


def check_slurm(block: Block) -> None:
    """A script that bash parses, with options of sbatch, and a command that fibc takes."""
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, capture_output=True)
    options = [word for line in block.text.splitlines() if line.startswith("#SBATCH ") for word in line.split()[1:]]
    unknown = [word for word in options if word.partition("=")[0] not in SBATCH_OPTIONS]
    assert options
    assert not unknown, f"{block}: {unknown} (accepted: {', '.join(SBATCH_OPTIONS)})"
    check_options(block)


def check_kubernetes(block: Block) -> None:
    """A CronJob whose command fibc takes, on a volume that is there."""
    job = yaml.safe_load(block.text)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob")
    spec = job["spec"]
    assert set(spec) <= {"schedule", "concurrencyPolicy", "jobTemplate", "timeZone", "successfulJobsHistoryLimit"}
    assert spec["concurrencyPolicy"] in ("Allow", "Forbid", "Replace")
    check_cron(Block(block.page, block.line, f"{spec['schedule']} pod {' '.join(pod_command(block))}"))
    pod: dict[str, Any] = spec["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure"), "a job may not restart always"
    (container,) = pod["containers"]
    assert all(isinstance(word, str) for word in container["command"]), "Kubernetes takes strings alone"
    volumes = {volume["name"] for volume in pod["volumes"]}
    (mount,) = container["volumeMounts"]
    assert mount["name"] in volumes
    assert mount["mountPath"] in container["command"], "it looks after what is mounted"
    assert all(isinstance(amount, int | str) for amount in container["resources"]["limits"].values())


def pod_command(block: Block) -> tuple[str, ...]:
    """Return the command of the one container of a CronJob."""
    (container,) = yaml.safe_load(block.text)["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    return tuple(map(str, container["command"]))


CHECKS: Mapping[str, Callable[[Block], None]] = {
    "alerts": check_alerts,
    "cron": check_cron,
    "dashboard": check_dashboard,
    "extra": check_extra,
    "kubernetes": check_kubernetes,
    "make": check_make,
    "options": check_options,
    "output": check_output,
    "python": check_python,
    "service": check_service,
    "slurm": check_slurm,
    "timer": check_timer,
}
