"""The report of a contest: every number as JSON, a table as markdown, the plot, and the promises that must hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from contest import controls
from contest.field import UNDELAYED
from contest.log import Log
from contest.pickers import FIBC, PICKERS, RULES
from contest.plan import Plan
from contest.plot import draw
from contest.rounds import KEYS, Row, rows
from contest.score import WORTH, Claim, Refereed, Score, SelfCheck, claims, refereed, score, self_check, winners
from fibc.schema.candidate import NATIVE
from fibc.schema.evaluation import Status

CLAIM_BIAS = 0.005
COVERAGE = 0.9
OTHER_VERDICTS = 0.05
"""What fibc promises: claims within half a percent on average, 95 % intervals that cover in nine rows of ten, and at
most one key in twenty whose verdict changes from repeat to repeat."""


@dataclass(frozen=True)
class Promise:
    """A promise, and whether the numbers keep it; None where they are not there yet."""

    text: str
    kept: bool | None

    def __str__(self) -> str:
        state = {True: "kept", False: "BROKEN", None: "open"}[self.kept]
        return f"{state}: {self.text}"


@dataclass(frozen=True)
class Report:
    """Results of a contest.

    Attributes:
        facts: How and where it was held, printable.
        picks: Of the contest itself.
        seen: By the referee.
        control_picks: By control.
        planted: What the referee saw of the planted winner; None where it did not yet.
        wrong: Status of each wrong kernel.
        complete: Every unit is done.
    """

    plan: Plan
    facts: Mapping[str, str]
    picks: Sequence[Row]
    seen: Refereed
    control_picks: Mapping[str, Sequence[Row]]
    planted: Refereed
    wrong: Sequence[str]
    complete: bool

    @staticmethod
    def of(log: Log, plan: Plan, facts: Mapping[str, str], *, complete: bool) -> Report:
        """Return the report of what is logged."""
        return Report(
            plan=plan,
            facts=facts,
            picks=rows(log, KEYS),
            seen=refereed(log, KEYS, plan.num_sessions),
            control_picks={n: rows(log, n) for n in (controls.HIDDEN, controls.PLANTED, controls.WRONG)},
            planted=refereed(log, controls.PLANTED, plan.num_sessions),
            wrong=[record["status"] for record in log.of("checked", board=controls.WRONG)],
            complete=complete,
        )

    @property
    def scores(self) -> list[Score]:
        return score(self.picks, self.seen, self.plan.policy.fixed_sessions)

    @property
    def self_check(self) -> SelfCheck:
        return self_check(self.seen)

    def promises(self) -> list[Promise]:
        """Return what fibc promises, with what was seen."""
        fibc = next(item for item in self.scores if item.picker == FIBC)
        some = fibc.num_replaced > fibc.num_unjudged
        unjudged = f", {fibc.num_unjudged} not refereed" if fibc.num_unjudged else ""
        agree = fibc.num_agree / max(fibc.num_intervals, 1)
        changed = fibc.num_other_verdict / max(fibc.num_keys, 1)
        hidden = [row for row in self.control_picks[controls.HIDDEN] if row.picker == FIBC]
        planted = [row for row in self.control_picks[controls.PLANTED] if row.picker == FIBC]
        won, found = (sum(row.pick.replaces for row in group) for group in (hidden, planted))
        rejected = sum(status == Status.INCORRECT_NUMERICAL for status in self.wrong)
        return [
            Promise(
                f"no replaced row below 1.00: {fibc.num_slower} of {fibc.num_replaced}{unjudged}",
                fibc.num_slower == fibc.num_unjudged == 0 if some else None,
            ),
            Promise(
                f"claims within {CLAIM_BIAS:.1%} on average: {fibc.claim_bias:+.2%}",
                abs(fibc.claim_bias) <= CLAIM_BIAS if some else None,
            ),
            Promise(
                f"95 % intervals cover in at least {COVERAGE:.0%} of rows: {agree:.0%}",
                agree >= COVERAGE if some else None,
            ),
            Promise(
                f"at most {OTHER_VERDICTS:.0%} of keys change their verdict between repeats: {changed:.0%}",
                changed <= OTHER_VERDICTS if self.plan.num_repeats > 1 and fibc.num_picks else None,
            ),
            Promise(
                f"native under {self.plan.num_hidden} names wins nothing: {won} of {len(hidden)} times",
                won == 0 if hidden else None,
            ),
            Promise(
                f"a planted winner of {self.plan.planted - 1:.0%} is found: {found} of {len(planted)} times",
                found == len(planted) if planted else None,
            ),
            Promise(
                f"kernels that are wrong and fast are rejected: {rejected} of {len(self.wrong)}",
                rejected == len(self.wrong) if self.wrong else None,
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return every number but raw timings, which the log has."""
        return {
            "facts": dict(self.facts),
            "complete": self.complete,
            "plan": asdict(self.plan),
            "promises": [asdict(promise) for promise in self.promises()],
            "scores": [asdict(item) for item in self.scores],
            "self_check": asdict(self.self_check),
            "picks": [_pick_json(row, self.seen) for row in self.picks],
            "refereed": _seen_json(self.seen),
            "controls": {name: [_pick_json(row, {}) for row in made] for name, made in self.control_picks.items()},
            "planted": _seen_json(self.planted),
            "wrong": list(self.wrong),
        }

    def svg(self) -> str:
        """Return the plot."""
        by_picker: dict[str, list[Claim]] = {}
        for claim in claims(self.picks, self.seen):
            by_picker.setdefault(claim.row.picker, []).append(claim)
        hardware = self.facts.get("hardware", self.plan.target)
        return draw(by_picker, f"Claimed against refereed speedup of picks that replace native, {hardware}")

    def markdown(self, plot: str = "") -> str:
        """Return the tables.

        Args:
            plot: Name of the SVG's file; empty for none.
        """
        plan, check = self.plan, self.self_check
        lines = [
            "# The referee",
            "",
            ", ".join(f"{name} {value}" for name, value in self.facts.items()),
            "",
            *([] if self.complete else ["NOT COMPLETE: the same command goes on.", ""]),
            *([f"![claimed against refereed speedup]({plot})", ""] if plot else []),
            f"{len({(row.definition, row.key) for row in self.picks})} keys, at most {plan.num_candidates} candidates "
            f"each, {plan.num_repeats} repeats. The referee: {plan.num_sessions} sessions of "
            f"{plan.policy.pairs_per_session} pairs for each pick; on native against itself it reads {check.bias:+.2%} "
            f"on average over {check.num_keys} keys, {check.worst:.2%} at most. {len(winners(self.seen))} keys have a "
            f"winner: a pick that it finds faster than {WORTH:g}x beyond doubt.",
            "",
            *_table(SCORE_COLUMNS, [_score_cells(item) for item in self.scores]),
            "",
            LEGEND,
            "",
            "fibc promises:",
            "",
            *(f"- {promise}" for promise in self.promises()),
            "",
            "## Keys",
            "",
            *_table(("key", "native us", *(_head(s.picker) for s in self.scores)), self._key_rows()),
            "",
            f"Refereed speedup of the pick in each repeat; {NATIVE} serves where there is a dash.",
            "",
            "## Controls",
            "",
            *_table(("control", "truth", *(_head(s.picker) for s in self.scores)), self._control_rows()),
            "",
            f"What is claimed in each repeat; {NATIVE} serves where there is a dash.",
            "",
            "",
        ]
        return "\n".join(lines)

    def _key_rows(self) -> list[tuple[str, ...]]:
        found = []
        scores = self.scores
        for place in dict.fromkeys((row.definition, row.key) for row in self.picks):
            native = self.seen.get((place, NATIVE))
            cells = [
                " ".join(self._shown(row) for row in self.picks if _where(row) == (*place, item.picker))
                for item in scores
            ]
            found.append((f"{place[0]} M={place[1]}", f"{native.native_us:.1f}" if native else "", *cells))
        return found

    def _shown(self, row: Row) -> str:
        if not row.pick.replaces:
            return "-"
        seen = self.seen.get(((row.definition, row.key), row.pick.candidate))
        return "?" if seen is None else f"{seen.speedup:.3f}"

    def _control_rows(self) -> list[tuple[str, ...]]:
        planted = next((item for (_, name), item in self.planted.items() if name == UNDELAYED), None)
        low, high = planted.interval if planted else (math.nan, math.nan)
        truths = {
            controls.HIDDEN: "1.000 by construction",
            controls.PLANTED: f"{planted.speedup:.3f} ({low:.3f} - {high:.3f})" if planted else "not refereed yet",
            controls.WRONG: "validation: " + ", ".join(self.wrong),
        }
        names = {
            controls.HIDDEN: f"native under {self.plan.num_hidden} names",
            controls.PLANTED: f"planted {self.plan.planted - 1:.0%} winner",
            controls.WRONG: "wrong kernels, without validation",
        }
        return [
            (names[name], truths[name], *(_claimed(made, picker) for picker in PICKERS))
            for name, made in self.control_picks.items()
        ]


LEGEND = (
    "*Slower than native*: by the referee's estimate, in brackets beyond its 95 % bound. *Claim bias*: claimed over "
    "refereed speedup, less 1. *Winners kept*: picks of a truly faster candidate where there is a winner. *Served*: "
    "geometric mean of what serves, native counting as 1. *Verdict changes*: keys at which some repeats replace native "
    "and others do not. *Covered*: 95 % intervals that agree with the referee, allowing for its own error; in "
    "brackets, that hold its bare estimate. Seconds are those of timings; the four rules' native halves are free."
)

SCORE_COLUMNS = (
    "picker",
    "as in",
    "replaced",
    "slower than native",
    "claim bias",
    "largest overclaim",
    "winners kept",
    "served",
    "verdict changes",
    "pick changes",
    "covered",
    "timings a pick",
    "device seconds a pick",
)


def _score_cells(item: Score) -> tuple[str, ...]:
    none = item.num_replaced == 0
    return (
        _head(item.picker),
        next((rule.as_in for rule in RULES if rule.name == item.picker), "fibc tune"),
        f"{item.num_replaced} of {item.num_picks}",
        f"{item.num_slower} ({item.num_surely_slower})",
        "-" if none else f"{item.claim_bias:+.2%}",
        "-" if none else f"{item.worst_claim:+.2%}",
        f"{item.num_kept} of {item.num_winner}",
        f"{item.served:.3f}",
        f"{item.num_other_verdict} of {item.num_keys}",
        f"{item.num_other_pick} of {item.num_keys}",
        f"{item.num_agree} of {item.num_intervals} ({item.num_contain})" if item.num_intervals else "-",
        f"{item.num_timings:.0f}",
        f"{item.seconds:.2f}",
    )


def _where(row: Row) -> tuple[str, str, str]:
    return row.definition, row.key, row.picker


def _claimed(made: Sequence[Row], picker: str) -> str:
    picks = [row.pick for row in made if row.picker == picker]
    return " ".join(f"{pick.claimed:.3f}" if pick.replaces else "-" for pick in picks)


def _head(picker: str) -> str:
    return f"**{picker}**" if picker == FIBC else picker


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(line)} |" for line in lines]


def _pick_json(row: Row, seen: Refereed) -> dict[str, Any]:
    judged = seen.get(((row.definition, row.key), row.pick.candidate))
    return {**asdict(row), "refereed": None if judged is None else judged.speedup}


def _seen_json(seen: Refereed) -> list[dict[str, Any]]:
    return [
        {
            "definition": definition,
            "key": key,
            "candidate": candidate,
            "speedup": item.speedup,
            "interval": list(item.interval),
            "native_us": item.native_us,
            "effects": list(item.effects),
        }
        for ((definition, key), candidate), item in sorted(seen.items())
    ]
