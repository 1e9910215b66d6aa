"""Pages name what there is: every command on them is one that fibc takes, and what no test runs is validated."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from documentation import ROOT, find_blocks, find_commands, inline_commands, misuse, option_names, read_blocks
from documented import APART, PAGES, RUN_PAGES, Apart, block_of, is_apart, run_blocks, shell_of
from documented_checks import CHECKS

from fibc.cli import app

# The checker itself ---------------------------------------------------------------------------------------------------

PAGE = """
Text with `fibc retune build/ --chekc` inside.

    fibc status build/   # a comment; fibc none

    python - <<'PY'
    fibc nothing
    PY
    fibc retune build/

```sh
fibc doctor
```

- a list
    that goes on
"""


def test_blocks_are_indented_after_an_empty_line_or_fenced() -> None:
    found = find_blocks(PAGE)
    assert [(block.line, block.fence, block.text.count("\n")) for block in found] == [(4, "", 5), (12, "sh", 0)]
    assert list(find_commands(found[0].text)) == [("status", "build/"), ("retune", "build/")]
    assert list(inline_commands(PAGE)) == [("retune", "build/", "--chekc")]


@pytest.mark.parametrize(
    ("shell", "found"),
    [
        ("A=1 B=2 fibc doctor", [("doctor",)]),
        ("/opt/fibc/bin/fibc gc build/ --keep 3 >> /var/log/x 2>&1", [("gc", "build/", "--keep", "3")]),
        ("fibc doctor > a && mv a b; fibc doctor --json | tee c", [("doctor",), ("doctor", "--json")]),
        ("/bin/sh -c 'umask 022; fibc status b --prometheus > c'", [("status", "b", "--prometheus")]),
        (
            "srun fibc retune /shared/$(hostname -s)/build --budget-s 5",
            [("retune", "/shared/X/build", "--budget-s", "5")],
        ),
        ("fibc tune a.json \\\n  --out b", [("tune", "a.json", "--out", "b")]),
        ("echo fibc nothing", []),
        ("fibc status 'a b' # --nothing", [("status", "a b")]),
    ],
)
def test_commands_are_found_wherever_a_shell_finds_them(shell: str, found: list[tuple[str, ...]]) -> None:
    assert list(find_commands(shell)) == found


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("retune build/ --chekc", "No such option: --chekc"),
        ("retune", "Missing"),
        ("retun build/", "no such command: retun"),
        ("retune build/ --budget-s soon", "number|valid float"),
        ("retune build/ more/", "unexpected extra argument"),
        ("tune defs/gemm.json --out build/ --max-age 7d", "No such option: --max-age"),
        ("tune defs/gemm.json --out build/ --max-mb", "requires an argument"),
    ],
)
def test_what_the_command_line_does_not_take_is_named(command: str, problem: str) -> None:
    assert re.search(problem, misuse(command.split())), misuse(command.split())


@pytest.mark.parametrize(
    "entry", [entry for entry in APART if entry.kind in ("service", "cron", "slurm", "kubernetes")]
)
def test_an_unknown_option_in_a_block_that_is_not_run_is_found(entry: Apart) -> None:
    block = block_of(entry)
    assert "--budget-s" in block.text
    with pytest.raises(AssertionError, match="No such option: --budget-sec"):
        CHECKS[entry.kind](replace(block, text=block.text.replace("--budget-s", "--budget-sec")))


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("service", "Nice=0", "Nicee=0"),
        ("timer", "OnCalendar=*-*-* 03:00", "OnCalendar=*-*-* 25:00"),
        ("cron", "0 3 * * *", "0 24 * * *"),
        ("cron", "  fibc  ", "  "),
        ("slurm", "--time=", "--tiem="),
        ("slurm", "$(hostname", "$((hostname"),
        ("kubernetes", '"1800"', "1800"),
        ("kubernetes", '"0 3 * * *"', '"0 3 * *"'),
        ("kubernetes", "{name: tables, mountPath", "{name: table, mountPath"),
        ("alerts", "fibc_readable", "fibc_read"),
        ("extra", "[report]", "[reports]"),
        ("dashboard", "fibc-studies.db", "studies.db"),
        ("output", "12.548", "12.549"),
        ("make", "make tune ", "make tunes "),
        ("python", "json.dump(", "json.dump"),
    ],
)
def test_a_slip_in_a_block_that_is_not_run_is_found(kind: str, right: str, wrong: str) -> None:
    entry = next(entry for entry in APART if entry.kind == kind)
    block = block_of(entry)
    assert right in block.text
    with pytest.raises(Exception) as found:  # each check has its own way to say it
        CHECKS[kind](replace(block, text=block.text.replace(right, wrong)))
    assert not isinstance(found.value, KeyError | TypeError | IndexError), found.value


# The pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", APART, ids=[f"{entry.kind}-{entry.page}" for entry in APART])
def test_what_no_test_runs_is_validated(entry: Apart) -> None:
    assert entry.reason
    CHECKS[entry.kind](block_of(entry))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_on_a_page_is_one_that_fibc_takes(page: str) -> None:
    for block in read_blocks(page):
        if not block.fence and (page in RUN_PAGES or is_apart(block)) and "ExecStart" not in block.text:
            assert not [misuse(command) for command in find_commands(block.text) if misuse(command)], str(block)
    for command in inline_commands((ROOT / page).read_text()):
        problem = misuse(command)  # running text need not name every argument
        assert not problem or ": Missing" in problem, f"{page}: `fibc {' '.join(command)}`: {problem}"


def test_every_block_that_a_shell_runs_parses_and_names_fibc() -> None:
    for page in RUN_PAGES:
        assert run_blocks(page)
        for block in run_blocks(page):
            assert "fibc" in shell_of(block), f"{block}: neither a command of fibc nor in the table of exceptions"


def test_tables_of_options_name_options_that_there_are() -> None:
    readme = (ROOT / "README.md").read_text().partition("## Options of `fibc tune`")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(--[a-z-]+)", readme)) | set(re.findall(r"`[^`]*(--[a-z-]+)`", readme))
    named |= set(re.findall(r" (--[a-z-]+)", readme))
    assert option_names("tune") | {"--out"} == named | {"--out"}, "the table of tune is whole"
    operators = (ROOT / "docs" / "operators.md").read_text().partition("| option | meaning |")[2].partition("\n\n")[0]
    named = set(re.findall(r"^\| `(--[a-z-]+)", operators, re.MULTILINE))
    assert named <= option_names("retune")
    assert option_names("retune") - {"--check", "--json"} == named


def test_every_command_is_documented() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    names = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]
    assert len(names) >= 12
    assert not [name for name in names if not re.search(rf"fibc {name}\b", text)]
