"""A key's study: what it asks for, what it never asks for, when it stops, and what a later run finds."""

from __future__ import annotations

import itertools
import math
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fibc.errors import InputError, RecordError
from fibc.schema.evaluation import Status
from fibc.schema.space import Constraint, Space, Start, Tunable
from fibc.search.pruning import count_valid
from fibc.search.space import Config, ConfigSpace
from fibc.search.store import StudyStore, Trial
from fibc.search.study import DESIGN_TRIALS_PER_TEMPLATE, HOPELESS, LEFT_BEHIND, KeyStudy, Proposal, open_study

Place = tuple[str, Config]
Objective = Callable[[str, Config], float | None]

MATVEC = Space(
    "gemm/matvec",
    (Tunable("rows", (4, 1, 2, 8)), Tunable("unroll", (1, 2, 4)), Tunable("prefetch", (False, True))),
    (Constraint("rows * unroll <= 16", "accumulators do not fit the registers"),),
    {"N": 4096},
)
TILE = Space(
    "gemm/tile",
    (Tunable("block_m", (4, 8, 16)), Tunable("block_n", (32, 64, 128)), Tunable("order", ("rows", "columns"))),
    (Constraint("block_m * block_n <= 1024", "accumulators do not fit the registers"),),
    {"N": 4096},
)
SPACES = (MATVEC, TILE)
NUM_VALID = count_valid(MATVEC) + count_valid(TILE)


def objective(template: str, config: Config) -> float:
    """A made-up landscape with its peak at gemm/tile(block_m=16, block_n=64, order=rows)."""
    values = dict(config)
    if template == "gemm/matvec":
        return -0.1 + 0.02 * math.log2(int(values["rows"])) + (0.02 if values["prefetch"] else 0.0)
    steps = abs(math.log2(int(values["block_n"])) - 6)
    return 0.1 * math.log2(int(values["block_m"])) - 0.1 * steps - (0.01 if values["order"] == "columns" else 0.0)


def search(study: KeyStudy, answer: Objective = objective, batch: int = 1) -> list[Place]:
    """Ask and tell until the study stops; return what it asked for."""
    asked: list[Place] = []
    while proposals := study.ask_batch(batch):
        for proposal in proposals:
            asked.append((proposal.template, proposal.config))
            value = answer(proposal.template, proposal.config)
            study.tell(proposal.number, value, Status.PASSED if value is not None else Status.COMPILE_ERROR)
    return asked


def default_of(space: Space) -> Place:
    default = ConfigSpace(space).default()
    assert default is not None
    return space.template, default


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StudyStore]:
    with StudyStore(tmp_path / "studies.db") as opened:
        yield opened


@pytest.mark.parametrize("sampler", ["tpe", "random"])
@pytest.mark.parametrize("batch", [1, 5])
def test_every_valid_config_is_asked_for_exactly_once_and_no_other(sampler: str, batch: int) -> None:
    study = open_study(None, "key", SPACES, trials=1000, sampler=sampler)
    asked = search(study, batch=batch)
    valid = {(space.template, config) for space in SPACES for config in ConfigSpace(space).configs()}
    assert len(asked) == NUM_VALID
    assert set(asked) == valid
    assert study.stopped == f"every valid config was tried ({NUM_VALID})"


@pytest.mark.parametrize("batch", [1, 3])
def test_equal_seeds_and_answers_give_equal_proposals(batch: int) -> None:
    asked = [search(open_study(None, "key", SPACES, seed=seed), batch=batch) for seed in (1, 1, 2)]
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]


def test_the_best_trials_come_first_and_failures_never() -> None:
    study = open_study(None, "key", SPACES, trials=1000)
    search(study, lambda template, config: None if dict(config).get("block_m") == 16 else objective(template, config))
    values = [trial.value for trial in study.best(NUM_VALID)]
    assert len(values) == NUM_VALID - 6 + 2  # block_m=16 is valid with block_n 32 and 64, in two orders
    assert values == sorted(values, key=lambda value: -(value or 0.0))
    assert study.best(1)[0].config == (("block_m", 8), ("block_n", 64), ("order", "rows"))


def test_the_neighbours_best_is_tried_first_and_then_every_default() -> None:
    inside: Place = ("gemm/tile", (("block_m", 16), ("block_n", 64), ("order", "columns")))
    outside: list[Place] = [
        ("gemm/tile", (("block_m", 16), ("block_n", 128), ("order", "rows"))),  # breaks a law here
        ("gemm/tile", (("block_m", 5), ("block_n", 64), ("order", "rows"))),
        ("gemm/gone", (("block_m", 5),)),
    ]
    study = open_study(None, "key", SPACES, warm_start=[*outside, inside, default_of(TILE)])
    assert search(study)[:3] == [inside, default_of(TILE), default_of(MATVEC)]


def test_every_default_is_tried_before_any_second_guess() -> None:
    guess = Start("N == 4096", (("block_m", 16),))
    elsewhere = Start("N == 1", (("rows", 8),))
    study = open_study(None, "key", [replace(MATVEC, starts=(elsewhere,)), replace(TILE, starts=(guess,))])
    guessed: Place = ("gemm/tile", (("block_m", 16), ("block_n", 32), ("order", "rows")))
    assert search(study)[:3] == [default_of(MATVEC), guessed, default_of(TILE)]


def test_every_template_gets_its_share_of_the_first_trials() -> None:
    study = open_study(None, "key", SPACES)
    first = search(study)[: study.num_design]
    assert {template: sum(place[0] == template for place in first) for template in ("gemm/matvec", "gemm/tile")} == {
        "gemm/matvec": study.num_design // 2,
        "gemm/tile": study.num_design // 2,
    }


def test_open_proposals_count_as_trials_and_are_not_proposed_again() -> None:
    study = open_study(None, "key", SPACES, trials=12)
    proposals = study.ask_batch(100)
    assert len(proposals) == 12
    assert len({(proposal.template, proposal.config) for proposal in proposals}) == 12
    assert [proposal.number for proposal in proposals] == list(range(12))
    assert study.ask() is None
    assert study.stopped is None
    for proposal in reversed(proposals):
        study.tell(proposal.number, 0.0)
    assert study.stopped == "all 12 trials are done"


def test_a_batch_is_told_in_any_order_to_the_right_configs() -> None:
    study = open_study(None, "key", SPACES, trials=12)
    proposals = study.ask_batch(12)
    for proposal in reversed(proposals):
        study.tell(proposal.number, objective(proposal.template, proposal.config))
    assert {(trial.template, trial.config): trial.value for trial in study.finished} == {
        (proposal.template, proposal.config): objective(proposal.template, proposal.config) for proposal in proposals
    }


def test_a_proposal_that_is_taken_back_is_no_trial_and_may_come_again(store: StudyStore) -> None:
    study = open_study(store, "key", (TILE,), trials=1000)
    proposals = study.ask_batch(1000)
    assert len(proposals) == count_valid(TILE)
    for proposal in proposals[1:]:
        study.tell(proposal.number, 0.0)
    study.forget(proposals[0].number)
    assert study.stopped is None
    assert search(study) == [(proposals[0].template, proposals[0].config)]
    assert len(open_study(store, "key", (TILE,)).finished) == count_valid(TILE)


def test_a_proposal_is_told_once() -> None:
    study = open_study(None, "key", SPACES)
    proposal = study.ask()
    assert isinstance(proposal, Proposal)
    study.tell(proposal.number, 0.0)
    with pytest.raises(KeyError):
        study.tell(proposal.number, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_and_the_proposal_stays_open(value: float) -> None:
    study = open_study(None, "key", SPACES)
    proposal = study.ask()
    assert proposal is not None
    with pytest.raises(ValueError, match="must be finite"):
        study.tell(proposal.number, value)
    study.tell(proposal.number, 0.0)


def test_what_is_recorded_is_known_and_never_asked_for() -> None:
    best: Place = ("gemm/tile", (("block_m", 16), ("block_n", 64), ("order", "rows")))
    record: dict[Place, float | None] = {best: objective(*best), default_of(TILE): None, ("gemm/gone", ()): 9.0}
    study = open_study(None, "key", SPACES, trials=1000, record=record)
    assert study.best(1) == (Trial(*best, objective(*best), Status.PASSED),)
    asked = search(study)
    assert not set(asked) & set(record)
    assert len(asked) == NUM_VALID - 2


def test_a_record_of_everything_leaves_nothing_to_ask() -> None:
    record: dict[Place, float | None] = {
        (space.template, config): objective(space.template, config)
        for space in SPACES
        for config in ConfigSpace(space).configs()
    }
    study = open_study(None, "key", SPACES, trials=1000, record=record)
    assert study.ask() is None
    assert study.stopped == f"every valid config was tried ({NUM_VALID})"


def test_a_key_far_behind_native_is_given_up_after_the_design() -> None:
    study = open_study(None, "key", SPACES, trials=1000)
    asked = search(study, lambda template, config: HOPELESS - 0.1)
    assert len(asked) == study.num_design == 10
    assert study.stopped == "given up after 10 trials: the best reached 0.81 of native's speed"


def test_trials_that_a_template_left_behind_does_not_get_are_no_part_of_the_design() -> None:
    study = open_study(None, "key", SPACES, trials=1000)
    asked = search(study, lambda template, config: LEFT_BEHIND - 0.1 if template == "gemm/tile" else HOPELESS - 0.1)
    assert Counter(template for template, _ in asked)["gemm/tile"] == 2
    assert len(asked) == 10 - (DESIGN_TRIALS_PER_TEMPLATE - 2)


def test_a_template_that_is_lost_at_a_near_key_is_not_tried() -> None:
    study = open_study(None, "key", SPACES, trials=6, trailing={"gemm/tile": 2})
    assert {template for template, _ in search(study, lambda template, config: 0.1)} == {"gemm/matvec"}


def test_a_limit_ends_a_study_early_and_never_later() -> None:
    study = open_study(None, "key", SPACES, trials=6)
    study.limit(100)
    study.limit(4)
    assert len(search(study, lambda template, config: 0.1)) == 4
    assert study.stopped == "all 4 trials are done"


def test_a_key_where_everything_fails_is_given_up_after_the_design() -> None:
    study = open_study(None, "key", SPACES, trials=1000)
    assert len(search(study, lambda template, config: None)) == study.num_design
    assert study.stopped == "given up after 10 trials: all failed"


def test_one_config_that_is_not_far_behind_keeps_a_key_alive() -> None:
    study = open_study(None, "key", SPACES, trials=1000)
    alive = default_of(TILE)
    asked = search(study, lambda template, config: HOPELESS + 0.01 if (template, config) == alive else HOPELESS - 0.1)
    assert len(asked) == NUM_VALID


def test_patience_ends_a_search_after_the_design_when_nothing_faster_was_found() -> None:
    fast = itertools.count()

    def flat_from_the_tenth(template: str, config: Config) -> float:
        return 0.03 * min(next(fast), 9)

    study = open_study(None, "key", SPACES, trials=20, patience=6)
    assert len(search(study, flat_from_the_tenth)) == 16
    assert study.stopped == "ended after 16 trials: the last 6 found nothing faster"
    assert len(search(open_study(None, "key", SPACES, trials=20), lambda *_: 0.1)) == 20


def test_patience_never_ends_the_design() -> None:
    study = open_study(None, "key", SPACES, trials=20, patience=1)
    assert len(search(study, lambda *_: 0.1)) == study.num_design


def test_a_key_that_no_template_matches_has_nothing_to_ask() -> None:
    study = open_study(None, "key", ())
    assert study.ask() is None
    assert study.stopped == "no template matches"
    assert study.best(3) == ()


def test_a_template_without_a_valid_config_takes_no_trial() -> None:
    never = Space("gemm/never", (Tunable("rows", (1, 2)),), (Constraint("rows > 2", "too few rows"),), {})
    asked = search(open_study(None, "key", (never, TILE), trials=1000))
    assert {template for template, _ in asked} == {"gemm/tile"}
    assert len(asked) == count_valid(TILE)


def test_the_model_finds_the_peak_sooner_than_chance() -> None:
    wide = Space(
        "wide",
        tuple(Tunable(name, (8, 1, 2, 4, 16, 32)) for name in ("a", "b", "c", "d")),
        (Constraint("a * b <= 256", "registers"),),
        {},
    )

    def value(template: str, config: Config) -> float:
        return 0.5 - 0.05 * sum((math.log2(int(size)) - 3.5) ** 2 for _, size in config)

    def mean_best(sampler: str) -> float:
        found = []
        for seed in range(8):
            study = open_study(None, "key", (wide,), seed=seed, trials=40, sampler=sampler)
            study._queue.clear()  # the default happens to lie near the peak
            search(study, value)
            found.append(study.best(1)[0].value or 0.0)
        return sum(found) / len(found)

    assert mean_best("tpe") > mean_best("random")


def test_a_resumed_study_goes_on_with_its_trials_and_repeats_none(store: StudyStore) -> None:
    first = search(open_study(store, "key", SPACES, trials=12))
    study = open_study(store, "key", SPACES, trials=20)
    assert [(trial.template, trial.config) for trial in study.finished] == first
    second = search(study)
    assert len(first) == 12
    assert len(second) == 8
    assert not set(first) & set(second)
    done = open_study(store, "key", SPACES, trials=20)
    assert done.ask() is None
    assert done.best(20) == study.best(20)


def test_a_stored_trial_is_read_back_with_its_status_and_reason(store: StudyStore) -> None:
    study = open_study(store, "key", SPACES)
    for value, status, reason in ((0.25, Status.PASSED, ""), (None, Status.CRASH, "signal 11\nin the kernel")):
        proposal = study.ask()
        assert proposal is not None
        study.tell(proposal.number, value, status, reason)
    assert open_study(store, "key", SPACES).finished == study.finished


def test_recorded_trials_are_stored_once(store: StudyStore) -> None:
    record: dict[Place, float | None] = {default_of(TILE): 0.5, default_of(MATVEC): None}
    for _ in range(2):
        study = open_study(store, "key", SPACES, record=record)
        assert len(study.finished) == 2
    assert len(open_study(store, "key", SPACES).finished) == 2


def test_a_fresh_study_forgets_and_its_neighbours_do_not(store: StudyStore) -> None:
    for name in ("key 1", "key 2"):
        search(open_study(store, name, SPACES, trials=3))
    assert open_study(store, "key 1", SPACES, fresh=True).finished == []
    assert len(open_study(store, "key 2", SPACES).finished) == 3
    assert len(open_study(store, "key 1", SPACES).finished) == 0


def test_trials_of_a_template_with_other_choices_or_another_text_are_another_study(store: StudyStore) -> None:
    search(open_study(store, "key", (TILE,), trials=3))
    wider = Space(TILE.template, (Tunable("block_m", (4, 8, 16, 32)), *TILE.tunables[1:]), TILE.constraints, {})
    edited = replace(TILE, source_digest="another")
    assert open_study(store, "key", (wider,)).finished == []
    assert open_study(store, "key", (edited,)).finished == []
    assert len(open_study(store, "key", (TILE,)).finished) == 3


def test_optunas_own_tools_see_values_as_people_write_them(store: StudyStore, tmp_path: Path) -> None:
    import optuna

    study = open_study(store, "key", SPACES, trials=1000)
    search(study)
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'studies.db'}")
    (name,) = optuna.get_all_study_names(storage)
    shown = optuna.load_study(study_name=name, storage=storage)
    assert shown.best_params == {
        "template": "gemm/tile",
        "gemm/tile.block_m": 16,
        "gemm/tile.block_n": 64,
        "gemm/tile.order": "rows",
    }
    assert len(shown.trials) == NUM_VALID
    assert shown.user_attrs["seed"] == 0
    storage.engine.dispose()


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("no url", "Could not parse"),
        ("nosuchdb://host/name", "nosuchdb"),
        ("sqlite:////dev/null/deep/studies.db", "unable to open database file"),
        ("mysql+pymysql://user:secret@host/db", "pymysql"),
    ],
)
def test_a_storage_that_cannot_be_opened_is_bad_input_with_a_remedy(url: str, seen: str) -> None:
    with pytest.raises(InputError, match=r"--storage: .* cannot be opened, got: .*accepted: sqlite:///FILE") as caught:
        StudyStore(url)
    assert seen in str(caught.value)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_path_of_a_database_may_hold_what_means_something_in_a_url(tmp_path: Path) -> None:
    path = tmp_path / "we?ird #%20 {name} ü" / "studies.db"
    path.parent.mkdir()
    for _ in range(2):
        with StudyStore(path) as store:
            search(open_study(store, "key", SPACES, trials=2))
    with StudyStore(path) as store:
        assert len(open_study(store, "key", SPACES).finished) == 2
    assert list(tmp_path.rglob("*.db")) == [path]


def test_a_file_that_is_no_database_is_bad_input_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "studies.db"
    path.write_bytes(b"precious, and no database" * 100)
    with pytest.raises(InputError, match="file is not a database"):
        StudyStore(path)
    assert path.read_bytes() == b"precious, and no database" * 100


def test_a_locked_database_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fibc.search.store.SQLITE_WAIT_S", 0)
    monkeypatch.setattr("time.sleep", lambda _: None)  # optuna's, between its tries
    with StudyStore(tmp_path / "studies.db") as store:
        study = open_study(store, "key", SPACES)
        proposal = study.ask()
        assert proposal is not None
        other = sqlite3.connect(tmp_path / "studies.db")
        try:
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(RecordError, match=r"studies\.db: a trial cannot be stored"):
                study.tell(proposal.number, 0.0)
            with pytest.raises(InputError, match=r"--storage: .* does not answer, got: .*\(end other runs"):
                open_study(store, "other", SPACES)
        finally:
            other.close()


NO_TORCH = """
import sys
sys.modules["torch"] = None
import warnings
warnings.simplefilter("error")
from fibc.schema.space import Space, Tunable
from fibc.search.study import open_study
from fibc.search import budget, pruning, replay, warm
study = open_study(None, "key", (Space("t", (Tunable("rows", (1, 2, 4)),), (), {}),), trials=50)
while proposal := study.ask():
    study.tell(proposal.number, 0.1)
print(study.stopped)
"""


def test_the_search_imports_no_torch_and_prints_and_warns_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("every valid config was tried (3)\n", "", 0)


def test_names_of_studies_may_hold_spaces_and_prefixes_of_each_other(store: StudyStore) -> None:
    names: Sequence[str] = ("gemm 1", "gemm 1 x 2", "gemm")
    for name in names:
        search(open_study(store, name, (TILE,), trials=2))
    assert open_study(store, "gemm", (TILE,), fresh=True).finished == []
    assert [len(open_study(store, name, (TILE,)).finished) for name in names] == [2, 2, 0]


def test_a_template_far_behind_gets_two_trials_and_the_other_one_the_rest() -> None:
    study = open_study(None, "key", SPACES, trials=1000)
    asked = search(study, lambda template, config: LEFT_BEHIND - 0.1 if template == "gemm/tile" else 0.1)
    assert sum(template == "gemm/tile" for template, _ in asked) == 2
    assert sum(template == "gemm/matvec" for template, _ in asked) == count_valid(MATVEC)


def test_a_template_far_behind_the_best_here_is_left_although_it_is_near_native() -> None:
    study = open_study(None, "key", SPACES, trials=1000)
    asked = search(study, lambda template, config: 0.0 if template == "gemm/tile" else math.log(2.1))
    assert sum(template == "gemm/tile" for template, _ in asked) == 2
    assert study.stopped is not None
    assert study.stopped.startswith("every valid config of the templates that are not left behind was tried")


def test_a_template_that_the_neighbour_left_behind_gets_one_trial() -> None:
    study = open_study(None, "key", SPACES, trials=1000, trailing={"gemm/tile": 1})
    asked = search(study, lambda template, config: LEFT_BEHIND - 0.1 if template == "gemm/tile" else 0.1)
    assert sum(template == "gemm/tile" for template, _ in asked) == 1


def test_a_template_that_recovers_here_is_searched_although_the_neighbour_left_it_behind() -> None:
    study = open_study(None, "key", SPACES, trials=1000, trailing={"gemm/tile": 1})
    assert len(search(study, lambda template, config: 0.1)) == NUM_VALID


def test_a_key_where_every_template_is_left_behind_is_given_up_with_its_best() -> None:
    study = open_study(None, "key", SPACES, trials=1000)
    assert len(search(study, lambda template, config: math.log(0.25))) == 4
    assert study.stopped is not None
    assert "left behind, the best reached 0.25" in study.stopped


def test_what_templates_want_tried_first_comes_turn_by_turn_before_anything_is_drawn() -> None:
    given = [tuple(ConfigSpace(space).configs()) for space in SPACES]
    listed = tuple(reversed(given[0][:5]))
    first = [tuple(Start("", config) for config in configs) for configs in (listed[:3], given[1][:2])]
    study = open_study(
        None, "first", (replace(MATVEC, configs=listed, starts=first[0]), replace(TILE, starts=first[1]))
    )
    asked = [(p.template, p.config) for p in study.ask_batch(5)]
    matvec, tile = "gemm/matvec", "gemm/tile"
    assert asked == [
        (matvec, listed[0]),
        (tile, given[1][0]),
        (matvec, listed[1]),
        (tile, given[1][1]),
        (matvec, listed[2]),
    ]
