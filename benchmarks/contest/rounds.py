"""The rounds of a contest: check, pick and judge, in units that are logged when they are done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from contest.candidates import Entry
from contest.field import Checked, Fields, Pad, Spent
from contest.log import Log, Record
from contest.pickers import FIBC, RULES, Pick, pick_as_fibc, time_in_turn
from contest.plan import Plan
from fibc import measure
from fibc.bench import session_seed
from fibc.clock import now
from fibc.schema import codec
from fibc.schema.candidate import NATIVE
from fibc.schema.decision import Decision
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Arm, Status
from fibc.schema.feature import FeatureKey

KEYS = "keys"
"""Name of the boards of the contest itself; controls have names of their own."""

LOG_CHARS = 500
"""Tail of a failed validation's log that is kept."""


class LimitReachedError(Exception):
    """The time of this command is spent; the next one goes on."""


@dataclass
class Contest:
    """One contest, on a machine or in a simulation.

    Attributes:
        entries: One per weight.
        limit_s: No unit is begun after so many seconds of ``clock``.
        say: Told of every unit that begins.
    """

    plan: Plan
    entries: Sequence[Entry]
    fields: Fields
    log: Log
    limit_s: float = math.inf
    say: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def begin(self, line: str) -> None:
        """Begin a unit.

        Raises:
            LimitReachedError: If it is too late for that.
        """
        elapsed = self.clock() - self._began
        if elapsed > self.limit_s:
            raise LimitReachedError(f"after {elapsed:.0f} s, before: {line}")
        self.say(f"{elapsed:6.0f} s  {line}")


@dataclass(frozen=True)
class Board:
    """Keys of one definition that are picked for together.

    Attributes:
        name: ``KEYS``, or a control's.
        candidates: Of each key.
        num_repeats: Of every picker.
        pad: What native's calls have in addition.
        always_judged: What the referee measures, whoever picks it: native against itself, by default.
    """

    name: str
    definition: Definition
    candidates: Mapping[FeatureKey, tuple[str, ...]]
    num_repeats: int
    pad: Pad | None = None
    always_judged: tuple[str, ...] = (NATIVE,)

    def fields(self, key: FeatureKey, **more: Any) -> Record:
        """Return the fields by which records of a key are found."""
        return {"board": self.name, "definition": self.definition.name, "key": str(key), **more}

    def title(self, key: FeatureKey | None = None) -> str:
        """Return what people read."""
        at = "" if key is None else f" M={key}"
        return f"{self.name} {self.definition.name}{at}"

    def seed(self, plan: Plan, *parts: object) -> int:
        """Return the seed of a unit."""
        return session_seed(plan.seed, " ".join(map(str, (self.name, self.definition.name, *parts))), 0)


# ---- which candidates take part


def check(contest: Contest) -> None:
    """Validate every candidate at every key, once for all pickers.

    One whose repeats differ is left out: processes that did not validate it could not check it after timing.
    """
    for entry in contest.entries:
        check_board(contest, _board(contest, entry, {key: entry.candidates[str(key)] for key in contest.plan.keys}))


def check_board(contest: Contest, board: Board) -> None:
    """Validate the candidates of a board."""
    unchecked = {
        key: [name for name in names if not contest.log.has("checked", **board.fields(key, candidate=name))]
        for key, names in board.candidates.items()
    }
    if not any(unchecked.values()):
        return
    with contest.fields.open(board.definition) as field:
        if not contest.log.has("facts"):
            contest.log.append({"kind": "facts", "facts": dict(field.facts)})
        for key, candidates in unchecked.items():
            if candidates:
                contest.begin(f"check {board.title(key)}: {len(candidates)} candidates")
            for candidate in candidates:
                contest.log.append(_checked(board, key, candidate, field.check(candidate, key)))


def _checked(board: Board, key: FeatureKey, candidate: str, seen: Checked) -> Record:
    return {
        "kind": "checked",
        **board.fields(key, candidate=candidate),
        "status": str(seen.status),
        "deterministic": seen.deterministic,
        "log": seen.log[-LOG_CHARS:],
    }


def boards(contest: Contest) -> list[Board]:
    """Return one board per weight, of the candidates that are right."""
    admitted: dict[tuple[str, str], list[str]] = {}
    for record in contest.log.of("checked", board=KEYS):
        if record["status"] == Status.PASSED and record["deterministic"]:
            admitted.setdefault((record["definition"], record["key"]), []).append(record["candidate"])
    return [
        _board(
            contest,
            entry,
            {key: tuple(admitted.get((entry.definition.name, str(key)), ())) for key in contest.plan.keys},
        )
        for entry in contest.entries
    ]


def _board(contest: Contest, entry: Entry, candidates: Mapping[FeatureKey, tuple[str, ...]]) -> Board:
    return Board(KEYS, entry.definition, candidates, contest.plan.num_repeats)


# ---- picks


def pick_board(contest: Contest, board: Board, *, fibc: bool = True) -> None:
    """Let every picker pick at every key of a board, in every repeat."""
    plan, log = contest.plan, contest.log

    def missing(kind: str, repeat: int) -> list[FeatureKey]:
        return [key for key in board.candidates if not log.has(kind, **board.fields(key, repeat=repeat))]

    todo = [
        (repeat, missing("timings", repeat), missing("fibc", repeat) if fibc else [])
        for repeat in range(board.num_repeats)
    ]
    if not any(untimed or unpicked for _, untimed, unpicked in todo):
        return
    with contest.fields.open(board.definition, board.pad) as field:
        for repeat, untimed, unpicked in todo:
            for key in untimed:
                contest.begin(f"time {board.title(key)}, repeat {repeat + 1}")
                seed = board.seed(plan, "in turn", key, repeat)
                timings, spent = time_in_turn(field, key, board.candidates[key], plan.policy, seed)
                log.append(_timings(board, key, repeat, timings, spent))
            if unpicked:
                contest.begin(f"fibc {board.title()}, repeat {repeat + 1}, {len(unpicked)} keys")
                seed = board.seed(plan, FIBC, repeat)
                picked = pick_as_fibc(field, {key: board.candidates[key] for key in unpicked}, plan.policy, seed)
                log.append(*(_picked(board, key, repeat, *picked[str(key)]) for key in unpicked))


def _timings(
    board: Board, key: FeatureKey, repeat: int, timings: Mapping[str, Sequence[float]], spent: Spent
) -> Record:
    return {
        "kind": "timings",
        **board.fields(key, repeat=repeat),
        "date": now(),
        "num_timings": spent.num_timings,
        "seconds": spent.seconds,
        "us": {kernel: [_rounded(1e6 * second) for second in seconds] for kernel, seconds in timings.items()},
    }


def _picked(board: Board, key: FeatureKey, repeat: int, pick: Pick, decision: Decision, spent: Spent) -> Record:
    return {
        "kind": "fibc",
        **board.fields(key, repeat=repeat),
        "date": now(),
        "num_timings": spent.num_timings,
        "seconds": spent.seconds,
        "pick": codec.to_plain(pick),
        "decision": codec.to_plain(decision),
    }


def _rounded(value: float) -> float:
    """Return five digits of ``value``: no timer has more."""
    return float(f"{value:.5g}")


@dataclass(frozen=True)
class Row:
    """One pick, as logged.

    Attributes:
        seconds: That its timings lasted.
    """

    picker: str
    board: str
    definition: str
    key: str
    repeat: int
    pick: Pick
    num_timings: int
    seconds: float


def rows(log: Log, board: str) -> list[Row]:
    """Return every pick of the boards of a name, those of the rules made anew from the logged timings."""
    found: list[Row] = []

    def add(picker: str, record: Record, pick: Pick) -> None:
        where = (record["board"], record["definition"], record["key"], record["repeat"])
        found.append(Row(picker, *where, pick, record["num_timings"], record["seconds"]))

    for record in log.of("timings", board=board):
        for rule in RULES:
            add(rule.name, record, rule.pick(record["us"]))
    for record in log.of("fibc", board=board):
        add(FIBC, record, codec.from_plain(Pick, record["pick"]))
    return found


# ---- the referee


def judge(contest: Contest, judged: Sequence[Board]) -> None:
    """Measure every pick of the boards anew, in other processes and with other seeds.

    Parts are the outer loop: that spaces the sessions of a pick in time.
    """
    for part in range(contest.plan.num_parts):
        for board in judged:
            _judge_part(contest, board, part)


def _judge_part(contest: Contest, board: Board, part: int) -> None:
    plan, log = contest.plan, contest.log
    todo = [
        (key, candidate)
        for key in board.candidates
        for candidate in _picked_at(log, board, key)
        if not log.has("judged", **board.fields(key, candidate=candidate, part=part))
    ]
    if not todo:
        return
    contest.begin(f"judge {board.title()}: {len(todo)} picks, part {part + 1} of {plan.num_parts}")
    arms = [Arm(str(key), 0, candidate) for key, candidate in todo]
    policy = replace(plan.policy, fixed_sessions=plan.part_sessions)
    with contest.fields.open(board.definition, board.pad) as field:
        seen = measure.assess(
            field.bench(arms, fresh=True), arms, policy, board.seed(plan, "referee", part), f"referee {part}"
        )
    failed = {failure.arm: str(failure.status) for failure in seen.failures}
    log.append(
        *(
            {
                "kind": "judged",
                **board.fields(key, candidate=candidate, part=part),
                "date": now(),
                "effects": [] if estimate is None else list(estimate.effects),
                "num_pairs": 0 if estimate is None else estimate.num_pairs,
                "native_us": 0.0 if estimate is None else _rounded(1e6 * estimate.native_s),
                "failed": failed.get(arm, ""),
            }
            for arm, (key, candidate), estimate in zip(arms, todo, seen.estimates, strict=True)
        )
    )


def _picked_at(log: Log, board: Board, key: FeatureKey) -> list[str]:
    """Return what the referee measures at a key: what anybody picked, and what it always does."""
    here = [row for row in rows(log, board.name) if (row.definition, row.key) == (board.definition.name, str(key))]
    return sorted({*board.always_judged, *(row.pick.candidate for row in here if row.pick.replaces)})
