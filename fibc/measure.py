"""The measuring protocol: screen, confirm, reconfirm, assess and the A/A gate, driven through a Bench.

Nothing here touches a device or reads a clock. Timings come from a Bench, which may be a simulated machine, and whether
time is left is asked of the caller. docs/measuring.md says why the protocol is as it is.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from fibc import stats
from fibc.errors import EvaluationError, FibcError
from fibc.schema.candidate import NATIVE
from fibc.schema.decision import Verdict
from fibc.schema.digest import digest_text
from fibc.schema.evaluation import Arm, Pair, SessionSamples, Status
from fibc.schema.evidence import (
    ArmFailure,
    Assessment,
    Confirmation,
    Contender,
    Estimate,
    Fate,
    GateResult,
    Screening,
)
from fibc.schema.policy import PUBLISHED_LEVEL, Policy

__all__ = [
    "ArmFailed",
    "ArmsFailed",
    "Bench",
    "Policy",
    "Session",
    "aa_gate",
    "assess",
    "confirm",
    "first_rung",
    "gate_arms",
    "reconfirm",
    "replay",
    "screen",
    "screen_value",
]

TimeLeft = Callable[[], bool]
OnSession = Callable[[int, int], None]


class ArmFailed(FibcError):  # noqa: N818 - names an outcome of a candidate, not an error of fibc
    """A candidate crashed, timed out or answered wrongly in a session, which stays usable for the other arms.

    Attributes:
        arm: Index of the arm in the bench.
        status: What happened.
        log: Tail of what the worker said.
    """

    def __init__(self, arm: int, status: Status, log: str) -> None:
        super().__init__(f"arm {arm}: {status}: {log}")
        self.arm = arm
        self.status = status
        self.log = log


class ArmsFailed(FibcError):  # noqa: N818 - as above
    """Outputs were found wrong after timing, when a session was left; its samples of these arms count for nothing."""

    def __init__(self, failures: Sequence[ArmFailed]) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = tuple(failures)


class Session(Protocol):
    """One process (or one set of fresh buffers) in which arms can be timed.

    Contract:
        * ``pair`` times both halves one directly after the other, in the order asked for: the same inputs, cores and
          thread count, equal work, equal inner counts, long enough for the timer.
        * Before an arm's first pair both halves are warmed up, untimed.
        * A candidate's fault raises ``ArmFailed`` and leaves the session usable for the other arms. Anything else that
          is raised means that the bench itself does not work.
    """

    def pair(self, candidate: int, native_first: bool) -> tuple[float, float]:
        """Return seconds per call of (native, candidate), both positive; ``candidate`` is the index of an arm."""
        ...


class Bench(Protocol):
    """Times a fixed list of arms, which it knows by index.

    Contract:
        * A session's inputs follow from ``seed``. Where inference follows (confirm and later), a session is an exec'd
          process with a memory layout of its own. One is open at a time.
        * Leaving the session checks the outputs of its arms once more, raises ``ArmsFailed`` where some are wrong, and
          ends its processes either way.
    """

    def session(self, seed: int) -> AbstractContextManager[Session]:
        """Open a session."""
        ...


def session_seed(seed: int, stage: str, index: int) -> int:
    """Return the 32-bit seed of a session, which fixes its inputs and the order of its pairs."""
    return int(digest_text(str(seed), stage, str(index))[:8], 16)


# ---- screen: picks finalists, claims nothing


def screen_value(pairs: Sequence[Pair]) -> float:
    """Return the median over rounds of ``ln(native / candidate)``: a trial's value, the only thing a study is told."""
    return statistics.median(stats.log_ratios(pairs))


def first_rung(session: Session, candidate: int, policy: Policy, rng: random.Random) -> tuple[Pair, ...]:
    """Time the first rung of a validated candidate: paired rounds, fewer where it is hopeless.

    Raises:
        ArmFailed: If the candidate failed.
    """
    pairs: list[Pair] = []
    flip = rng.random() < 0.5
    while len(pairs) < policy.screen_rounds and not _hopeless(pairs, policy):
        pairs.append(_pair(session, candidate, len(pairs), flip))
    return tuple(pairs)


def screen(bench: Bench, arms: Sequence[Arm], values: Sequence[float], policy: Policy, seed: int) -> Screening:
    """Reduce the trials of one key to finalists by successive halving.

    The best third of all trials enters the next rung, with twice as many rounds, until a third is no more than
    ``policy.finalists``; the best of the last rung are the finalists. A rung is one session; each of its rounds is a
    random permutation of the candidates, native riding with each. A candidate's value is the mean over its rungs of
    what each showed, weighted by rounds: there are too few of them to forget any.

    Args:
        bench: Holds ``arms``.
        arms: The validated candidates of the key at its screening point.
        values: ``screen_value`` of their first rungs.
        policy: Constants.
        seed: Of the rungs' sessions.
    """
    latest = list(values)
    num_rounds = [policy.screen_rounds] * len(arms)
    ranking = sorted(range(len(arms)), key=lambda arm: -latest[arm])
    failures: list[ArmFailure] = []
    samples: list[SessionSamples] = []
    rung = 1
    while (size := math.ceil(len(ranking) / policy.reduction_factor)) > policy.finalists:
        ranking = [arm for arm in ranking[:size] if latest[arm] >= policy.promote_above]
        if len(ranking) <= policy.finalists:
            break
        turn = _run_rung(bench, ranking, rung, policy, session_seed(seed, "screen", rung))
        samples += turn.samples(arms)
        failures += turn.arm_failures(arms)
        ranking = [arm for arm in ranking if arm not in turn.failures]
        for arm in ranking:
            before, now = num_rounds[arm], len(turn.pairs[arm])
            latest[arm] = (before * latest[arm] + now * stats.session_effect(turn.pairs[arm])) / (before + now)
            num_rounds[arm] += now
        ranking.sort(key=lambda arm: -latest[arm])
        rung += 1
    finalists = tuple(arms[arm] for arm in ranking[: policy.finalists] if latest[arm] >= policy.drop_below)
    num_pairs = sum(len(sample.pairs) for sample in samples)
    return Screening(finalists, tuple(latest), num_pairs, tuple(failures), tuple(samples))


def _run_rung(bench: Bench, entrants: Sequence[int], rung: int, policy: Policy, seed: int) -> _Turn:
    rng = random.Random(seed)
    turn = _Turn("screen", rung, seed, {arm: [] for arm in entrants})
    flips = {arm: rng.random() < 0.5 for arm in entrants}
    with _session(bench, seed, [turn]) as session:
        running = list(entrants)
        for _ in range(policy.screen_rounds * 2**rung):
            rng.shuffle(running)
            for arm in running:
                turn.time(session, arm, flips[arm])
            running = [a for a in running if a not in turn.failures and not _hopeless(turn.pairs[a], policy)]
    return turn


def _hopeless(pairs: Sequence[Pair], policy: Policy) -> bool:
    """Whether every round so far is behind the limit of the latest one."""
    if not pairs:
        return False
    limit = math.exp(policy.hopeless[min(len(pairs), len(policy.hopeless)) - 1])
    return all(pair.native_s < limit * pair.candidate_s for pair in reversed(pairs))


# ---- confirm: all inference, on new data only


def confirm(
    bench: Bench,
    arms: Sequence[Arm],
    policy: Policy,
    seed: int,
    *,
    time_left: TimeLeft = lambda: True,
    on_session: OnSession = lambda session, num_open: None,
) -> dict[str, Confirmation]:
    """Test the finalists of all keys at once.

    Sessions go round-robin over the keys: that spaces a key's sessions in time, and a process start is paid once for
    all keys. Bounds are looked at after ``policy.looks`` sessions only, each with error alpha / (looks x finalists).

    A finalist gets its key where its lower bound beats the margin at every point at one look. To err, it has to err at
    a point where the finalist is no better: that bound's error covers the others, and points need no correction.

    Args:
        bench: Holds ``arms``.
        arms: Every finalist of every key at every point of its key.
        policy: Constants.
        seed: Of the sessions and orders.
        time_left: Asked before each key's turn. Once it is False the test ends, with a last look in place of the next.
        on_session: Told the index of each finished session, from 0, and how many keys are still open.

    Returns:
        One Confirmation per key.
    """
    races = [_Race(key, arms, indexes, policy) for key, indexes in _by_key(arms).items()]
    for index in range(policy.looks[-1]):
        opened = [race for race in races if race.open]
        if not opened or not time_left():
            break
        turn_seed = session_seed(seed, "confirm", index)
        rng = random.Random(turn_seed)
        rng.shuffle(opened)
        turns: list[_Turn] = []
        with _session(bench, turn_seed, turns) as session:
            for race in opened:
                if not time_left():
                    break
                turns.append(race.timer.run(session, _Turn("confirm", index, turn_seed), rng))
        for race, turn in zip(opened, turns, strict=False):
            race.add(turn)
        on_session(index, sum(race.open for race in races))
    return {race.key: race.result() for race in races}


def replay(
    samples: Sequence[SessionSamples], failures: Sequence[ArmFailure], policy: Policy
) -> dict[str, Confirmation]:
    """Return what ``confirm`` made of its recorded samples and failures: the same verdicts from the same numbers."""
    arms = list(dict.fromkeys(sample.arm for sample in samples))
    index_of = {arm: index for index, arm in enumerate(arms)}
    races = {key: _Race(key, arms, indexes, policy) for key, indexes in _by_key(arms).items()}
    turns: dict[tuple[int, str], _Turn] = {}
    for sample in samples:
        turn = turns.setdefault((sample.session, sample.arm.key), _Turn(sample.stage, sample.session, sample.seed))
        turn.pairs[index_of[sample.arm]] = list(sample.pairs)
    for failure in failures:
        arm = index_of[failure.arm]
        last = max(session for (session, _), turn in turns.items() if arm in turn.pairs)
        turns[last, failure.arm.key].failures[arm] = ArmFailed(arm, failure.status, failure.log)
    for (_, key), turn in sorted(turns.items(), key=lambda item: item[0]):
        races[key].add(turn)
    return {key: race.result() for key, race in races.items()}


@dataclass
class _Turn:
    """The pairs of some arms of one key in one session."""

    stage: str
    index: int
    seed: int
    pairs: dict[int, list[Pair]] = field(default_factory=dict)
    failures: dict[int, ArmFailed] = field(default_factory=dict)

    def time(self, session: Session, arm: int, flip: bool) -> None:
        pairs = self.pairs[arm]
        try:
            pairs.append(_pair(session, arm, len(pairs), flip))
        except ArmFailed as error:
            self.failures[arm] = error

    def samples(self, arms: Sequence[Arm]) -> list[SessionSamples]:
        return [SessionSamples(arms[a], self.stage, self.index, self.seed, tuple(p)) for a, p in self.pairs.items()]

    def arm_failures(self, arms: Sequence[Arm]) -> list[ArmFailure]:
        return [ArmFailure(arms[arm], error.status, error.log) for arm, error in self.failures.items()]


@contextmanager
def _session(bench: Bench, seed: int, turns: Sequence[_Turn]) -> Iterator[Session]:
    """Open a session for ``turns``; what is found wrong when it is left becomes a failure of its turn."""
    try:
        with bench.session(seed) as session:
            yield session
    except ArmsFailed as error:
        for failed in error.failures:
            for turn in turns:
                if failed.arm in turn.pairs:
                    turn.failures[failed.arm] = failed


class _KeyTimer:
    """Times the arms of one key, with as many pairs a session as the key's cost allows.

    A session runs two pairs of every arm, one in each order, then the others. Whether these are too dear is decided by
    the first session, and anew when arms have left; a later session is never cut short by its own timings, which would
    let slow starts into the estimates.
    """

    def __init__(self, arms: Sequence[Arm], indexes: Sequence[int], policy: Policy) -> None:
        self._arms = arms
        self._policy = policy
        self._num_pairs: int | None = None
        self.active = list(indexes)

    def remove(self, candidates: Iterable[str]) -> None:
        gone = set(candidates)
        left = [arm for arm in self.active if self._arms[arm].candidate not in gone]
        if len(left) < len(self.active):
            self.active, self._num_pairs = left, None

    def run(self, session: Session, turn: _Turn, rng: random.Random) -> _Turn:
        turn.pairs = {arm: [] for arm in self.active}
        flips = {arm: rng.random() < 0.5 for arm in self.active}
        self._blocks(session, turn, flips, self._policy.heavy_pairs, rng)
        if self._num_pairs is None:
            self._num_pairs = self._affordable(turn)
        self._blocks(session, turn, flips, self._num_pairs - self._policy.heavy_pairs, rng)
        return turn

    def _affordable(self, turn: _Turn) -> int:
        round_s = sum(
            statistics.median(p.native_s + p.candidate_s for p in pairs) for pairs in turn.pairs.values() if pairs
        )
        heavy = round_s * self._policy.pairs_per_session > self._policy.heavy_s
        return self._policy.heavy_pairs if heavy else self._policy.pairs_per_session

    def _blocks(self, session: Session, turn: _Turn, flips: Mapping[int, bool], count: int, rng: random.Random) -> None:
        """Run ``count`` blocks at each point in turn; a block is one pair of every finalist, in random order."""
        by_point: dict[int, list[int]] = {}
        for arm in self.active:
            by_point.setdefault(self._arms[arm].point, []).append(arm)
        for point in rng.sample(sorted(by_point), len(by_point)):
            for _ in range(count):
                lost = {self._arms[arm].candidate for arm in turn.failures}
                for arm in rng.sample(by_point[point], len(by_point[point])):
                    if self._arms[arm].candidate not in lost:
                        turn.time(session, arm, flips[arm])


@dataclass
class _Evidence:
    """What has been seen of one arm so far."""

    effects: list[float] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def add(self, pairs: Sequence[Pair]) -> None:
        self.effects.append(stats.session_effect(pairs))
        self.pairs += pairs

    def estimate(self, arm: Arm, alpha: float) -> Estimate:
        return Estimate(
            arm=arm,
            effects=tuple(self.effects),
            mean=stats.mean(self.effects),
            sd=stats.standard_deviation(self.effects),
            lower=stats.lower_bound(self.effects, alpha),
            upper=stats.upper_bound(self.effects, alpha),
            alpha=alpha,
            num_pairs=len(self.pairs),
            native_s=statistics.median(pair.native_s for pair in self.pairs),
            candidate_s=statistics.median(pair.candidate_s for pair in self.pairs),
        )


class _Race:
    """The sequential test of one key's finalists."""

    def __init__(self, key: str, arms: Sequence[Arm], indexes: Sequence[int], policy: Policy) -> None:
        self.key = key
        self.timer = _KeyTimer(arms, indexes, policy)
        self._arms = arms
        self._policy = policy
        self._places = _places(key, arms, indexes)
        self._alpha = policy.bound_alpha(len(self._places))
        self._contenders = {digest: Contender(digest, Fate.RUNNING, (), None) for digest in self._places}
        self._evidence = {arm: _Evidence() for arm in indexes}
        self._samples: list[SessionSamples] = []
        self._num_sessions = 0
        self._last_look = 0

    @property
    def open(self) -> bool:
        return bool(self.timer.active) and self._num_sessions < self._policy.looks[-1]

    def add(self, turn: _Turn) -> None:
        """Take in a session, and look where its number says so."""
        self._samples += turn.samples(self._arms)
        self._num_sessions += 1
        for failure in turn.arm_failures(self._arms):
            self._end(failure.arm.candidate, Fate.FAILED, failure)
        for arm in self.timer.active:
            self._evidence[arm].add(turn.pairs[arm])
        if self._num_sessions in self._policy.looks:
            self._look()

    def _end(self, candidate: str, fate: Fate, failure: ArmFailure | None = None) -> None:
        self._contenders[candidate] = Contender(candidate, fate, self._contenders[candidate].estimates, failure)
        self.timer.remove([candidate])

    def _with(self, fate: Fate) -> list[Contender]:
        return [contender for contender in self._contenders.values() if contender.fate is fate]

    def _look(self) -> None:
        self._last_look = self._num_sessions
        for contender in self._with(Fate.RUNNING):
            places = self._places[contender.candidate]
            estimates = tuple(self._evidence[arm].estimate(self._arms[arm], self._alpha) for arm in places)
            self._contenders[contender.candidate] = Contender(contender.candidate, Fate.RUNNING, estimates, None)
            if (fate := self._judge(estimates)) is not Fate.RUNNING:
                self._end(contender.candidate, fate)
        best = max((contender.mean for contender in self._with(Fate.ACCEPTED)), default=math.inf)
        for contender in self._with(Fate.RUNNING):
            if contender.mean <= best < math.inf:
                self._end(contender.candidate, Fate.OUTRUN)

    def _judge(self, estimates: Sequence[Estimate]) -> Fate:
        margin = self._policy.margin
        if any(estimate.upper < margin for estimate in estimates):
            return Fate.DROPPED
        if all(estimate.lower > margin for estimate in estimates):
            return Fate.ACCEPTED
        if any(self._out_of_reach(estimate) for estimate in estimates):
            return Fate.OUT_OF_REACH
        return Fate.RUNNING

    def _out_of_reach(self, estimate: Estimate) -> bool:
        num_sessions = len(estimate.effects)
        pairs_each = estimate.num_pairs / num_sessions
        hope = stats.interval(estimate.effects, PUBLISHED_LEVEL)[1]
        sigma = stats.timing_sigma(estimate.sd, pairs_each)
        needed = stats.pairs_needed(sigma, hope, self._policy.margin, self._alpha)
        return needed > self._policy.patience * self._policy.looks[-1] * pairs_each

    def result(self) -> Confirmation:
        """End the test. Where time ran out between two looks, the next look is taken early."""
        partial = self.open
        if partial and self._num_sessions > max(self._last_look, self._policy.looks[0]):
            self._look()
        accepted = self._with(Fate.ACCEPTED)
        if accepted:
            verdict = Verdict.REPLACE
        elif all(contender.fate in {Fate.DROPPED, Fate.FAILED} for contender in self._contenders.values()):
            verdict = Verdict.KEEP_NATIVE
        else:
            verdict = Verdict.INCONCLUSIVE
        margin = self._policy.margin
        split = [c.candidate for c in self._with(Fate.DROPPED) if any(e.mean > margin for e in c.estimates)]
        return Confirmation(
            key=self.key,
            verdict=verdict,
            winner=max(accepted, key=lambda contender: contender.lower).candidate if accepted else "",
            contenders=tuple(sorted(self._contenders.values(), key=lambda contender: -contender.mean)),
            split=() if accepted else tuple(split),
            num_sessions=self._num_sessions,
            partial=partial,
            samples=tuple(self._samples),
        )


def _by_key(arms: Sequence[Arm]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for index, arm in enumerate(arms):
        groups.setdefault(arm.key, []).append(index)
    return groups


def _places(key: str, arms: Sequence[Arm], indexes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the arms of each candidate, one per point, by point."""
    grid: dict[str, dict[int, int]] = {}
    for index in indexes:
        grid.setdefault(arms[index].candidate, {})[arms[index].point] = index
    points = sorted({arms[index].point for index in indexes})
    if any(sorted(row) != points for row in grid.values()) or len(indexes) != len(points) * len(grid):
        raise ValueError(f"confirm: key {key}: needs every finalist at every point, once each")
    return {candidate: tuple(row[point] for point in points) for candidate, row in grid.items()}


# ---- a fixed number of fresh sessions


def reconfirm(
    bench: Bench,
    arms: Sequence[Arm],
    policy: Policy,
    seed: int,
    *,
    time_left: TimeLeft = lambda: True,
    on_session: OnSession = lambda session, num_open: None,
) -> Assessment:
    """Measure winners anew at every point of their keys: what is published comes from these sessions alone."""
    return assess(bench, arms, policy, seed, "reconfirm", time_left=time_left, on_session=on_session)


def assess(
    bench: Bench,
    arms: Sequence[Arm],
    policy: Policy,
    seed: int,
    stage: str,
    *,
    time_left: TimeLeft = lambda: True,
    on_session: OnSession = lambda session, num_open: None,
) -> Assessment:
    """Measure ``arms`` in a fixed number of fresh sessions, round-robin over their keys.

    Args:
        bench: Holds ``arms``.
        arms: Any candidates at any points.
        policy: Constants.
        seed: Of the sessions and orders.
        stage: ``reconfirm``, ``boundary`` or ``test``; sessions of different stages never share a seed.
        time_left: Asked before each key's turn. An arm without all its sessions has no estimate.
        on_session: Told the index of each finished session, from 0, and how many keys are measured.

    Returns:
        Estimates with one-sided bounds at 95 %.
    """
    timers = [_KeyTimer(arms, indexes, policy) for indexes in _by_key(arms).values()]
    evidence = [_Evidence() for _ in arms]
    failures: list[ArmFailure] = []
    samples: list[SessionSamples] = []
    for index in range(policy.fixed_sessions):
        running = [timer for timer in timers if timer.active]
        if not running or not time_left():
            break
        turn_seed = session_seed(seed, stage, index)
        rng = random.Random(turn_seed)
        rng.shuffle(running)
        turns: list[_Turn] = []
        with _session(bench, turn_seed, turns) as session:
            for timer in running:
                if not time_left():
                    break
                turns.append(timer.run(session, _Turn(stage, index, turn_seed), rng))
        for timer, turn in zip(running, turns, strict=False):
            samples += turn.samples(arms)
            failures += turn.arm_failures(arms)
            timer.remove(arms[arm].candidate for arm in turn.failures)
            for arm in timer.active:
                evidence[arm].add(turn.pairs[arm])
        on_session(index, len(running))
    failed = {failure.arm for failure in failures}
    complete = [len(seen.effects) == policy.fixed_sessions and arms[i] not in failed for i, seen in enumerate(evidence)]
    estimates = tuple(
        seen.estimate(arm, 1 - PUBLISHED_LEVEL) if whole else None
        for arm, seen, whole in zip(arms, evidence, complete, strict=True)
    )
    return Assessment(stage, tuple(arms), estimates, tuple(failures), tuple(samples))


def gate_arms(policy: Policy) -> tuple[Arm, ...]:
    """Return the arms of the gate; a bench for them times native, loaded a second time, as every candidate."""
    return tuple(Arm(f"gate {index}", 0, NATIVE) for index in range(policy.gate_comparisons))


def aa_gate(bench: Bench, policy: Policy, seed: int) -> GateResult:
    """Compare native with itself, many times in the same sessions, and count how often it looks faster than itself.

    It catches gross bias of a host, a timer or a bench only. A failed gate is repeated once, with other seeds.

    Args:
        bench: Holds ``gate_arms(policy)``.
        policy: Constants.
        seed: Of the sessions and orders.

    Raises:
        EvaluationError: If native failed against itself.
    """
    samples: tuple[SessionSamples, ...] = ()
    for attempt in range(2):
        seen = assess(bench, gate_arms(policy), policy, seed + attempt, "gate")
        if seen.failures:
            failure = seen.failures[0]
            raise EvaluationError(f"A/A gate: native failed against itself: {failure.status}: {failure.log}")
        lower = [estimate.lower for estimate in seen.estimates if estimate is not None]
        samples += seen.samples
        result = GateResult(
            num_comparisons=len(lower),
            replaces_at_zero=sum(bound > 0 for bound in lower),
            replaces_at_margin=sum(bound > policy.margin for bound in lower),
            repeated=attempt > 0,
            allowed=policy.gate_allowed,
            samples=samples,
        )
        if result.passed:
            break
    return result


def _pair(session: Session, arm: int, turn: int, flip: bool) -> Pair:
    """Time a pair; turns alternate their order as ABBA, so that half are native-first and drift cancels."""
    native_first = (turn % 4 in {0, 3}) != flip
    native_s, candidate_s = session.pair(arm, native_first)
    if not (0 < native_s < math.inf and 0 < candidate_s < math.inf):
        raise EvaluationError(
            f"bench: a timing must be positive and finite, got native {native_s} s, candidate {candidate_s} s"
        )
    return Pair(native_s, candidate_s, native_first)
