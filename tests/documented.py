"""What is documented to be typed, and what of it cannot run where tests do: one table, each entry with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from documentation import Block, read_blocks

README, OPERATORS, REPORT, TEMPLATES = "README.md", "docs/operators.md", "docs/report.md", "docs/templates.md"

RUN_PAGES = (README, OPERATORS, REPORT)
"""Pages whose blocks are run as a shell runs them."""

PAGES = (*RUN_PAGES, TEMPLATES)


@dataclass(frozen=True)
class Apart:
    """A block, or one line of a block, that no shell of a test runs as it stands.

    Attributes:
        start: How the block begins, or how the line does.
        kind: How it is validated instead: a name in ``documented_checks.CHECKS``.
        reason: Why it is not run.
        is_line: Only this line is left out; the rest of its block runs.
    """

    page: str
    start: str
    kind: str
    reason: str
    is_line: bool = False


APART = (
    Apart(README, "make tune", "make", "sets up an environment from an index and tunes at full size: 6 minutes"),
    Apart(README, "fused_add_rmsnorm_h4096  target cpu", "output", "what a tune printed, no command"),
    Apart(README, "gemm_bf16_n4096_k4096  target cuda", "output", "what a tune printed, no command"),
    Apart(README, "fibc tune defs/gemm.json --out build/ --target", "options", "compiles for minutes; needs a GPU"),
    Apart(OPERATORS, "import json, fibc_gemm", "python", "Python, and /var/lib is no place of a test"),
    Apart(OPERATORS, "- alert: FibcStale", "alerts", "rules for Prometheus, no command"),
    Apart(OPERATORS, "[Unit]\nDescription=Show", "service", "a systemd unit; its commands run"),
    Apart(OPERATORS, "[Unit]\nDescription=Nightly", "timer", "a systemd unit"),
    Apart(OPERATORS, "0 3 * * *", "cron", "a line of a crontab; its command runs"),
    Apart(OPERATORS, "#!/bin/sh", "slurm", "needs a Slurm cluster; its command runs"),
    Apart(OPERATORS, "apiVersion: batch/v1", "kubernetes", "needs a Kubernetes cluster; its command runs"),
    Apart(REPORT, 'pip install "fibc[report]"', "extra", "installs from an index", is_line=True),
    Apart(REPORT, "pip install optuna-dashboard", "dashboard", "installs from an index and serves until stopped"),
    Apart(
        REPORT,
        "fibc reproduce benchmarks/results/h200/tune_gemm_bf16_n4096_k4096.txt --measure",
        "options",
        "needs the GPU of the result",
        is_line=True,
    ),
    Apart(TEMPLATES, "fibc tune squared_relu_h100.json", "options", "tunes a sweep of sizes: minutes"),
)


def block_of(entry: Apart) -> Block:
    """Return the block that ``entry`` means, or a block of the one line.

    Raises:
        LookupError: If the page has no such block, or several.
    """
    found: list[Block] = []
    for block in read_blocks(entry.page):
        if not entry.is_line:
            found += [block] if block.text.startswith(entry.start) else []
            continue
        for number, line in enumerate(block.text.splitlines()):
            found += [Block(block.page, block.line + number, line)] if line.startswith(entry.start) else []
    if len(found) != 1:
        raise LookupError(
            f"{entry.page}: {len(found)} blocks begin with {entry.start!r}, the table of exceptions has one"
        )
    return found[0]


def is_apart(block: Block) -> bool:
    """Tell whether the table has the whole block."""
    return any(entry.page == block.page and not entry.is_line and block.text.startswith(entry.start) for entry in APART)


def shell_of(block: Block) -> str:
    """Return what a shell runs of ``block``: all of it but lines that the table has."""
    starts = [entry.start for entry in APART if entry.page == block.page and entry.is_line]
    return "\n".join(line for line in block.text.splitlines() if not line.startswith(tuple(starts) or ("\0",)))


def run_blocks(page: str) -> tuple[Block, ...]:
    """Return the blocks of a page that a shell runs."""
    return tuple(block for block in read_blocks(page) if not block.fence and not is_apart(block))
