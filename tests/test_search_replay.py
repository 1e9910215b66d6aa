"""Recorded evaluations: read, replayed, and what they say about samplers."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import pytest

from fibc.errors import SchemaError
from fibc.schema.space import Constraint, Space, Tunable
from fibc.search.replay import POLICIES, Recording, load, regret, replay, save
from fibc.search.space import ConfigSpace
from fibc.search.study import HOPELESS

DATA = Path(__file__).parent / "data"
RECORDED = sorted(DATA.glob("recorded_*.json"))
BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "replay_samplers.py"

SPACE = Space(
    "gemm/tile",
    (Tunable("block_m", (4, 1, 2, 8)), Tunable("packed", (False, True)), Tunable("order", ("rows", "columns"))),
    (Constraint("block_m <= 4 or packed", "registers"),),
    {},
)


def small_recording() -> Recording:
    configs = list(ConfigSpace(SPACE).configs())
    return Recording(
        "made up",
        (SPACE,),
        {("gemm/tile", config): None if number == 3 else 0.01 * number for number, config in enumerate(configs)},
    )


def test_a_recording_is_read_back_equal(tmp_path: Path) -> None:
    save(tmp_path / "recorded.json", small_recording())
    assert load(tmp_path / "recorded.json") == small_recording()


def test_a_recording_with_a_config_missing_is_refused(tmp_path: Path) -> None:
    whole = small_recording()
    values = dict(list(whole.values.items())[1:])
    save(tmp_path / "recorded.json", Recording("made up", whole.spaces, values))
    with pytest.raises(SchemaError, match="gemm/tile: every valid config needs a value"):
        load(tmp_path / "recorded.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spaces": [1], "trials": []}', "\0"])
def test_a_malformed_recording_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "recorded.json").write_text(text)
    with pytest.raises(SchemaError, match=r"recorded\.json: is no recording"):
        load(tmp_path / "recorded.json")


def test_regret_is_the_distance_to_the_best_so_far() -> None:
    recording = small_recording()
    places = list(recording.values)
    assert recording.best == pytest.approx(0.13)
    assert regret(recording, (places[3], places[5], places[4], places[13])) == pytest.approx(
        (math.inf, 0.08, 0.08, 0.0)
    )


def test_the_grid_is_walked_in_the_order_of_the_choices() -> None:
    recording = small_recording()
    assert replay(recording, "grid", seed=0, trials=5) == tuple(recording.values)[:5]


@pytest.mark.parametrize("policy", POLICIES)
def test_replaying_is_deterministic_and_asks_nothing_twice(policy: str) -> None:
    recording = small_recording()
    asked = replay(recording, policy, seed=3, trials=100)
    assert asked == replay(recording, policy, seed=3, trials=100)
    assert len(set(asked)) == len(asked) == len(recording.values)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_evaluations_hold_every_valid_config_of_their_spaces(path: Path) -> None:
    recording = load(path)
    valid = {(space.template, config) for space in recording.spaces for config in ConfigSpace(space).configs()}
    assert set(recording.values) == valid


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_study_finds_one_of_the_best_tenth_of_what_was_recorded(path: Path) -> None:
    """By rank: how far the very best stands out of a recording is partly luck of the moment."""
    recording = load(path)
    values = [-math.inf if value is None else value for value in recording.values.values()]
    num_seeds, num_better = 8, 0
    for seed in range(num_seeds):
        asked = replay(recording, "tpe", seed=seed, trials=24)
        num_better += sum(recording.best - value < regret(recording, asked)[-1] for value in values)
    assert num_better / num_seeds <= len(values) / 10


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_no_recorded_key_with_a_winner_is_given_up(path: Path) -> None:
    recording = load(path)
    for seed in range(8):
        asked = replay(recording, "tpe", seed=seed, trials=24)
        assert recording.best < HOPELESS or len(asked) == min(24, len(recording.values))


def test_the_benchmark_prints_a_line_for_every_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "recorded.json", small_recording())
    monkeypatch.setattr(
        sys, "argv", ["replay_samplers.py", str(tmp_path / "recorded.json"), "--trials", "14", "--seeds", "2"]
    )
    runpy.run_path(str(BENCHMARK), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recorded.json: made up"
    assert lines[1] == "14 configs, 1 failed, best 1.139 of native's speed"
    assert [line.split()[0] for line in lines[3:6]] == list(POLICIES)
    assert all(line.split()[-1] == "0.00" for line in lines[3:6])
