"""The blocks of a page, and the fibc commands in them as the command line's own parser sees them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from fibc.cli import app

ROOT = Path(__file__).parent.parent

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What the parser raises; typer has a copy of click in newer versions, so that it has no other name in all of them."""

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(?P<word>\w+)\1(?P<rest>[^\n]*)\n.*?\n[ \t]*(?P=word)(?=\n|$)", re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\([^()]*\)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SEPARATOR = re.compile(r"[;&|]+")
_DESCRIPTOR = re.compile(r"(?<=\s)\d(>&\d|(?=[<>]))")
"""``2>&1``, and the 2 of ``2>``: what remains of a redirection is its sign and a file."""
_INLINE = re.compile(r"(?<!`)`(?P<code>[^`\n]+)`(?!`)")

PREFIXES = ("srun", "exec", "nohup", "time", "sudo", "env")
"""Words that may stand before a command."""


@dataclass(frozen=True)
class Block:
    """Code of a page.

    Attributes:
        page: Relative to the repository.
        line: Of its first line, from 1.
        fence: Language of a fenced block; empty for an indented one.
    """

    page: str
    line: int
    text: str
    fence: str = ""

    @property
    def first(self) -> str:
        """Its first line."""
        return self.text.partition("\n")[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.first}"


def read_blocks(page: str) -> tuple[Block, ...]:
    """Return the indented and the fenced blocks of a page of the repository."""
    return find_blocks((ROOT / page).read_text(), page)


def find_blocks(text: str, page: str = "page.md") -> tuple[Block, ...]:
    """Return the blocks of ``text``: lines indented by four after an empty line, and what is between fences."""
    lines = text.splitlines()
    found: list[Block] = []
    index = 0
    while index < len(lines):
        line, before = lines[index], lines[index - 1] if index else ""
        if line.startswith("```"):
            end = next((n for n in range(index + 1, len(lines)) if lines[n].startswith("```")), len(lines))
            found.append(Block(page, index + 2, "\n".join(lines[index + 1 : end]), line[3:].strip() or "text"))
            index = end + 1
        elif line.startswith("    ") and not before.strip():
            inside = list(itertools.takewhile(lambda item: item.startswith("    ") or not item.strip(), lines[index:]))
            found.append(Block(page, index + 1, "\n".join(item[4:] for item in inside).rstrip()))
            index += len(inside)
        else:
            index += 1
    return tuple(found)


def inline_commands(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the fibc commands with arguments that stand in running text."""
    for match in _INLINE.finditer(text):
        yield from (command for command in find_commands(match["code"]) if command[1:])


def find_commands(shell: str) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of each fibc command in ``shell``: in lists, pipes, behind ``srun`` and in ``sh -c '...'``.

    Raises:
        ValueError: If a quote does not end.
    """
    text = _HEREDOC.sub(r"\g<rest>\n", shell.replace("\\\n", " "))
    for line in text.splitlines():
        yield from _of_line(line)


def _of_line(line: str) -> Iterator[tuple[str, ...]]:
    lexer = shlex.shlex(_DESCRIPTOR.sub("", _SUBSTITUTION.sub("X", line)), posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for token in itertools.chain(lexer, [";"]):
        if not _SEPARATOR.fullmatch(token):
            words.append(token)
            continue
        yield from _of_command(words)
        words = []


def _of_command(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("<", ">", ">>"):
            next(rest, None)
        else:
            kept.append(word)
    while kept and (kept[0] in PREFIXES or _ASSIGNMENT.match(kept[0])):
        kept.pop(0)
    if not kept:
        return
    name = Path(kept[0]).name
    if name == "fibc":
        yield tuple(kept[1:])
    elif name in ("sh", "bash") and "-c" in kept[:-1]:
        yield from find_commands(kept[kept.index("-c") + 1])


def misuse(arguments: Sequence[str]) -> str:
    """Return what the command line says against ``arguments``; empty where it takes them. Nothing is run."""
    group = typer.main.get_command(app)
    name, *rest = arguments or ("",)
    commands = getattr(group, "commands", {})
    if name not in commands:
        return f"no such command: {name}"
    try:
        commands[name].make_context(name, list(rest))
    except UsageError as error:
        return f"fibc {name}: {getattr(error, 'message', '') or error}"
    except typer.Exit:  # --help
        return ""
    return ""


def option_names(command: str) -> frozenset[str]:
    """Return the options of a command, as they are written."""
    parameters = getattr(typer.main.get_command(app), "commands")[command].params  # noqa: B009  typed differently by version
    names = [name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)]
    return frozenset(name for name in names if name.startswith("--"))
