"""The measuring protocol: screen, confirm, reconfirm, assess and the A/A gate, driven through a Bench.

Nothing here touches a device or reads a clock. Timings come from a Bench, which may be a simulated machine, and whether
time is left is asked of the caller. docs/measuring.md says why the protocol is as it is.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

from fibc import stats
from fibc.bench import ArmFailed, ArmsFailed, Bench, Session, session_seed
from fibc.errors import EvaluationError
from fibc.race import Race
from fibc.ride import TimeLeft, ride
from fibc.schema.candidate import NATIVE
from fibc.schema.evaluation import Arm, Pair, SessionSamples
from fibc.schema.evidence import ArmFailure, Assessment, Confirmation, Estimate, GateResult, Screening
from fibc.schema.policy import Policy
from fibc.series import Series
from fibc.turn import Turn, by_key, open_session, time_pair

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
    "session_seed",
]

OnSession = Callable[[int, int], None]


# ---- screen: picks finalists, claims nothing


def screen_value(pairs: Sequence[Pair]) -> float:
    """Return the median over rounds of ``ln(native / candidate)``: a trial's value, the only thing a study is told."""
    return statistics.median(stats.log_ratios(pairs))


def first_rung(session: Session, candidate: int, policy: Policy, rng: random.Random) -> tuple[Pair, ...]:
    """Time the first rung of a validated candidate: paired rounds, fewer where it is hopeless or calls are long.

    Raises:
        ArmFailed: If the candidate failed.
    """
    pairs: list[Pair] = []
    flip = rng.random() < 0.5
    while len(pairs) < policy.screen_rounds and not _hopeless(pairs, policy):
        if len(pairs) == policy.heavy_pairs and _heavy(pairs, policy):
            break
        pairs.append(time_pair(session, candidate, len(pairs), flip))
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
    lead = max((latest[arm] for arm in ranking), default=0.0)
    least = max(policy.drop_below, lead - policy.finalist_span)
    finalists = tuple(arms[arm] for arm in ranking[: policy.finalists] if latest[arm] >= least)
    num_pairs = sum(len(sample.pairs) for sample in samples)
    return Screening(finalists, tuple(latest), num_pairs, tuple(failures), tuple(samples))


def _run_rung(bench: Bench, entrants: Sequence[int], rung: int, policy: Policy, seed: int) -> Turn:
    rng = random.Random(seed)
    turn = Turn("screen", rung, seed, {arm: [] for arm in entrants})
    flips = {arm: rng.random() < 0.5 for arm in entrants}
    with open_session(bench, seed, [turn]) as session:
        running = list(entrants)
        for _ in range(policy.screen_rounds * 2**rung):
            rng.shuffle(running)
            for arm in running:
                turn.time(session, arm, flips[arm])
            running = [a for a in running if a not in turn.failures and not _hopeless(turn.pairs[a], policy)]
    return turn


def _heavy(pairs: Sequence[Pair], policy: Policy) -> bool:
    """Whether as many pairs as a session has would take too long."""
    round_s = statistics.median(pair.native_s + pair.candidate_s for pair in pairs)
    return round_s * policy.pairs_per_session > policy.heavy_s


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
    races = [Race(key, arms, indexes, policy) for key, indexes in by_key(arms).items()]
    for index in range(policy.looks[-1]):
        opened = [race for race in races if race.open]
        if not opened or not time_left():
            break
        ride(bench, opened, session_seed(seed, "confirm", index), time_left)
        on_session(index, sum(race.open for race in races))
    return {race.key: race.result() for race in races}


def replay(
    samples: Sequence[SessionSamples], failures: Sequence[ArmFailure], policy: Policy
) -> dict[str, Confirmation]:
    """Return what ``confirm`` made of its recorded samples and failures: the same verdicts from the same numbers."""
    arms = list(dict.fromkeys(sample.arm for sample in samples))
    index_of = {arm: index for index, arm in enumerate(arms)}
    races = {key: Race(key, arms, indexes, policy) for key, indexes in by_key(arms).items()}
    turns: dict[tuple[int, str], Turn] = {}
    for sample in samples:
        turn = turns.setdefault((sample.session, sample.arm.key), Turn(sample.stage, sample.session, sample.seed))
        turn.pairs[index_of[sample.arm]] = list(sample.pairs)
    for failure in failures:
        arm = index_of[failure.arm]
        last = max(session for (session, _), turn in turns.items() if arm in turn.pairs)
        turns[last, failure.arm.key].failures[arm] = ArmFailed(arm, failure.status, failure.log)
    for (_, key), turn in sorted(turns.items(), key=lambda item: item[0]):
        races[key].add(turn)
    return {key: race.result() for key, race in races.items()}


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
    every = [Series(arms, indexes, policy, stage) for indexes in by_key(arms).values()]
    for index in range(policy.fixed_sessions):
        running = [series for series in every if series.open]
        if not running or not time_left():
            break
        ride(bench, running, session_seed(seed, stage, index), time_left)
        on_session(index, len(running))
    estimates: dict[int, Estimate | None] = {}
    for series in every:
        estimates |= series.estimates()
    return Assessment(
        stage,
        tuple(arms),
        tuple(estimates[index] for index in range(len(arms))),
        tuple(failure for series in every for failure in series.failures),
        tuple(sample for series in every for sample in series.samples),
    )


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
