"""The controls: what a picker must not take, what it must find, and what it must not be fooled by."""

from __future__ import annotations

import math
import statistics

from contest.field import UNDELAYED, Field, Pad
from contest.plan import gemm, key_at
from contest.rounds import Board, Contest, check_board, pick_board
from fibc import stats
from fibc.bench import session_seed
from fibc.schema.candidate import NATIVE
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Arm
from fibc.schema.feature import FeatureKey
from fibc.turn import time_pair

HIDDEN, PLANTED, WRONG = "hidden", "planted", "wrong"
"""Names of the controls' boards."""

CALIBRATION_PAIRS = 32

NS_PER_S = 1e9

CYCLES_PER_S = 1.98e9
"""Clock of an H200 that is busy (nvidia-smi, 2026-10-28). Where another GPU's differs the plant is worth a little more
or less, which the referee says."""


def hidden(contest: Contest) -> Board:
    """Hide native under many names among the candidates: whoever picks one claims a speedup that is not there."""
    plan = contest.plan
    names = tuple(f"{NATIVE} {index + 1}" for index in range(plan.num_hidden))
    size = plan.sizes[len(plan.sizes) // 2]
    board = Board(HIDDEN, contest.entries[0].definition, {key_at(size): names}, plan.num_control_repeats)
    pick_board(contest, board)
    return board


def planted(contest: Contest) -> Board:
    """Delay native by some percent, and enter native without the delay as a candidate: a winner of known worth."""
    plan = contest.plan
    weight, size = plan.planted_place
    definition, key = gemm(weight), key_at(size)
    pad = _pad(contest, definition, key)
    board = Board(PLANTED, definition, {key: (UNDELAYED,)}, plan.num_control_repeats, pad, (UNDELAYED,))
    pick_board(contest, board)
    return board


def wrong(contest: Contest) -> Board:
    """Enter kernels that leave out a part of K: fast, and to be rejected."""
    entry = contest.entries[0]
    board = Board(WRONG, entry.definition, {contest.plan.keys[0]: entry.wrong}, num_repeats=1)
    check_board(contest, board)
    pick_board(contest, board, fibc=False)
    return board


def _pad(contest: Contest, definition: Definition, key: FeatureKey) -> Pad:
    """Return the delay that makes native slower by what the plan asks for, measured once."""
    for record in contest.log.of("pad", definition=definition.name):
        return Pad(record["amount"])
    contest.begin(f"calibrate the delay of {definition.name} M={key}")
    with contest.fields.open(definition) as field:
        native_s, _ = _compare(field, key, contest.plan.seed)
    wanted_s = (contest.plan.planted - 1) * native_s
    if contest.plan.target == "cpu":
        amount = round(wanted_s * NS_PER_S)
    else:
        with contest.fields.open(definition, Pad(1)) as field:
            _, effect = _compare(field, key, contest.plan.seed)
        launch_s = math.expm1(effect) * native_s
        amount = round((wanted_s - launch_s) * CYCLES_PER_S)
    amount = max(1, amount)
    contest.log.append(
        {"kind": "pad", "definition": definition.name, "key": str(key), "amount": amount, "native_us": 1e6 * native_s}
    )
    return Pad(amount)


def _compare(field: Field, key: FeatureKey, seed: int) -> tuple[float, float]:
    """Return native's seconds per call, and the log speedup of native without its delay, where it has one."""
    arm = Arm(str(key), 0, UNDELAYED)
    with field.bench([arm], fresh=True).session(session_seed(seed, "calibrate", 0)) as session:
        pairs = [time_pair(session, 0, turn, flip=False) for turn in range(CALIBRATION_PAIRS)]
    return statistics.median(pair.native_s for pair in pairs), stats.session_effect(pairs)
