"""One Optuna study per (definition, key, target): asked for configs worth a build, told what became of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import TrialState, create_trial

from fibc import settings
from fibc.schema.digest import digest_text
from fibc.schema.evaluation import Status
from fibc.schema.space import Space
from fibc.search.sampler import distributions, fixed_template, make_sampler, parameters, suggest
from fibc.search.space import Config, ConfigSpace
from fibc.search.store import StoredStudy, StudyStore, Trial

HOPELESS = math.log(0.9)
"""A best value (ln native / candidate) below which a key is given up once its design is done. A trial's value is a
median of a few paired rounds and off by some percent on a bad machine; a tenth is more than that and the margin."""

LEFT_BEHIND = math.log(0.5)
"""How far behind native, or the best config here where that is faster, a template is not worth more trials at a key:
twice the time is more than tunables of one template gain over its default, and its default or a neighbour's best was
tried."""

TRIALS_TO_LEAVE = 2
"""Trials of a template that must all be left behind; a neighbouring key where it was left behind counts as some."""

GAIN = math.log(1.02)
"""What counts as faster where patience ends a study: less is the noise of a trial."""

DESIGN_TRIALS = 10
DESIGN_TRIALS_PER_TEMPLATE = 4
"""Trials before the model leads, and before a key may be given up: the larger of the two counts. They hold the
neighbour's best, what every template would have tried first, and draws from every template's whole space."""


@dataclass(frozen=True)
class Proposal:
    """A config that keeps every constraint and has no value yet.

    Attributes:
        number: What ``KeyStudy.tell`` wants; counts from 0 in this process.
    """

    number: int
    template: str
    config: Config


class KeyStudy:
    """The search of one key, made by ``open_study``. One thread at a time.

    The sampler works on a study in memory, and finished trials go to the store. So a proposal costs milliseconds, what
    is refused before a build never reaches the disk, and the store holds nothing but facts.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        *,
        seed: int,
        trials: int,
        sampler: str,
        warm_start: Sequence[tuple[str, Config]],
        trailing: Mapping[str, int],
        stored: StoredStudy | None,
        patience: int | None,
    ) -> None:
        self._spaces = {space.template: ConfigSpace(space) for space in spaces}
        self._trials = trials
        self._patience = patience
        self._stored = stored
        self._trailing = dict(trailing)
        self._queue = list(warm_start)
        self._queue += by_rank(self._spaces.values())
        self.num_design = max(DESIGN_TRIALS, DESIGN_TRIALS_PER_TEMPLATE * len(self._spaces), len(self._queue))
        self._rng = random.Random(seed)
        self._sampled = optuna.create_study(
            direction="maximize", sampler=make_sampler(sampler, seed=seed, num_startup=self.num_design)
        )
        self._numbers = itertools.count()
        self._turn = itertools.cycle(self._spaces)
        self._open: dict[int, tuple[Proposal, optuna.Trial]] = {}
        self._seen: set[tuple[str, Config]] = set()
        self._empty: set[str] = set()
        self.finished: list[Trial] = []

    @property
    def stopped(self) -> str | None:
        """Why there is nothing more to ask for, or None; None as well while proposals are open."""
        return None if self._open else self._ended()

    def is_left_behind(self, template: str) -> bool:
        """Return whether ``template`` has shown that its configs are far behind here."""
        values = [t.value for t in self.finished if t.template == template and t.value is not None]
        needed = TRIALS_TO_LEAVE - self._trailing.get(template, 0)
        lead = max((t.value for t in self.finished if t.value is not None), default=0.0)
        return len(values) >= needed and max(values, default=-math.inf) < max(lead, 0.0) + LEFT_BEHIND

    def limit(self, trials: int) -> None:
        """End after ``trials`` trials, where that is fewer than before."""
        self._trials = min(self._trials, trials)

    def ask(self) -> Proposal | None:
        """Return the next config to build and time; None where the study has stopped, or waits for open proposals."""
        if self._ended() or len(self.finished) + len(self._open) >= self._trials:
            return None
        drawn = self._draw()
        if drawn is None:
            return None
        trial, template, config = drawn
        self._seen.add((template, config))
        proposal = Proposal(next(self._numbers), template, config)
        self._open[proposal.number] = proposal, trial
        return proposal

    def ask_batch(self, num: int) -> tuple[Proposal, ...]:
        """Return up to ``num`` proposals, to build side by side; the model takes open ones for bad, so they spread."""
        return tuple(itertools.islice(iter(self.ask, None), num))

    def tell(self, number: int, value: float | None, status: Status = Status.PASSED, reason: str = "") -> None:
        """Finish a proposal.

        Args:
            number: Of an open proposal.
            value: ln(native latency / candidate latency), finite; None where the candidate failed.
            status: What became of it.
            reason: Why it failed.

        Raises:
            RecordError: If the storage does not take it.
        """
        if value is not None and not math.isfinite(value):
            raise ValueError(f"a trial's value must be finite, got {value}")
        proposal, trial = self._open.pop(number)
        finished = Trial(proposal.template, proposal.config, value, status, reason)
        if value is None:
            trial.set_user_attr("status", status.value)
            trial.set_user_attr("reason", reason)
            self._sampled.tell(trial, state=TrialState.FAIL)
        else:
            self._sampled.tell(trial, value)
        self.finished.append(finished)
        if self._stored is not None:
            self._stored.add(finished, self._spaces[finished.template].space)

    def forget(self, number: int) -> None:
        """Take back an open proposal that nobody will try; it is no trial, and may be proposed again."""
        proposal, trial = self._open.pop(number)
        self._sampled.tell(trial, state=TrialState.FAIL)  # the samplers pass over failed trials
        self._seen.discard((proposal.template, proposal.config))
        self._empty.discard(proposal.template)

    def best(self, num: int = 1) -> tuple[Trial, ...]:
        """Return the ``num`` best trials, best first. A choice of what to confirm, never a claim."""
        passed = [trial for trial in self.finished if trial.value is not None]
        return tuple(sorted(passed, key=lambda trial: -_value(trial))[:num])

    def learn(self, trial: Trial, *, store: bool) -> None:
        """Take a trial that is known already as finished; it will not be proposed. Others' configs are passed over."""
        space = self._spaces.get(trial.template)
        place = trial.template, trial.config
        if space is None or place in self._seen or not space.holds(trial.config):
            return
        self._seen.add(place)
        if trial.value is not None:
            self._sampled.add_trial(
                create_trial(
                    value=trial.value,
                    params=parameters(space, trial.config),
                    distributions=distributions(space, list(self._spaces)),
                )
            )
        self.finished.append(trial)
        if store and self._stored is not None:
            self._stored.add(trial, space.space)

    def _ended(self) -> str | None:
        """Return why the search has ended as far as the finished trials say.

        Giving a key up can only keep native: the price of a wrong one is a gain that is missed, never a slower table.
        """
        if not self._spaces:
            return "no template matches"
        num = len(self.finished)
        if num >= self._trials:
            return f"all {num} trials are done"
        values = [trial.value for trial in self.finished if trial.value is not None]
        if num >= self._design_left() and max(values, default=-math.inf) < HOPELESS:
            best = f"the best reached {math.exp(max(values)):.2f} of native's speed" if values else "all failed"
            return f"given up after {num} trials: {best}"
        if self._patience is not None and num >= self._design_left() and self._is_flat(values, self._patience):
            return f"ended after {num} trials: the last {self._patience} found nothing faster"
        if all(name in self._empty or self.is_left_behind(name) for name in self._spaces):
            if all(map(self.is_left_behind, self._spaces)):
                lead = f"the best reached {math.exp(max(values, default=-math.inf)):.2f} of native's speed"
                return f"given up after {num} trials: every template is left behind, {lead}"
            if any(map(self.is_left_behind, self._spaces)):
                return f"every valid config of the templates that are not left behind was tried ({num} trials)"
            return f"every valid config was tried ({num})"
        return None

    def _is_flat(self, values: Sequence[float], num: int) -> bool:
        """Return whether the last ``num`` trials that passed found nothing faster than those before."""
        before, last = values[:-num], values[-num:]
        return bool(before) and max(last) <= max(before) + GAIN

    def _design_left(self) -> int:
        """Return how many trials make the design, less those that templates which were left behind will not get."""
        spared = 0
        for template in filter(self.is_left_behind, self._spaces):
            tried = sum(trial.template == template for trial in self.finished)
            spared += max(0, DESIGN_TRIALS_PER_TEMPLATE - tried)
        return self.num_design - spared

    def _draw(self) -> tuple[optuna.Trial, str, Config] | None:
        """Return an unseen valid config with its open trial: queued, else drawn, else the nearest to what was drawn."""
        while self._queue:
            template, config = self._queue.pop(0)
            if self._is_new(template, config) and not self.is_left_behind(template):
                return self._fix(template, config)
        turn = len(self.finished) + len(self._open) < self.num_design
        behind = {name for name in self._spaces if self.is_left_behind(name)}
        while len(self._empty | behind) < len(self._spaces):
            if turn:  # every template gets its share of the design, and one that is used up or left behind no more
                template = next(name for name in self._turn if name not in self._empty and name not in behind)
                self._sampled.enqueue_trial(fixed_template(template))
            trial = self._sampled.ask()
            template, config = suggest(trial, self._spaces)
            if template not in behind and self._is_new(template, config):
                return trial, template, config
            self._sampled.tell(trial, state=TrialState.FAIL)  # the samplers pass over failed trials
            if template in behind:
                turn = True
                continue
            for near in self._spaces[template].near(config, self._rng):
                if (template, near) not in self._seen:
                    return self._fix(template, near)
            self._empty.add(template)
            turn = True
        return None

    def _is_new(self, template: str, config: Config) -> bool:
        return (
            (template, config) not in self._seen and template in self._spaces and self._spaces[template].holds(config)
        )

    def _fix(self, template: str, config: Config) -> tuple[optuna.Trial, str, Config]:
        self._sampled.enqueue_trial(parameters(self._spaces[template], config))
        trial = self._sampled.ask()
        suggest(trial, self._spaces)
        return trial, template, config


def open_study(
    store: StudyStore | None,
    name: str,
    spaces: Sequence[Space],
    *,
    seed: int = settings.DEFAULT_SEED,
    trials: int = settings.DEFAULT_TRIALS,
    warm_start: Sequence[tuple[str, Config]] = (),
    trailing: Mapping[str, int] | None = None,
    record: Mapping[tuple[str, Config], float | None] | None = None,
    fresh: bool = False,
    sampler: str = "tpe",
    patience: int | None = None,
) -> KeyStudy:
    """Open the study ``name``, or go on with it.

    Args:
        store: Where finished trials go and come from; None keeps them in memory.
        name: Holds all that makes values comparable: definition, key, target, environment, digest of the templates.
        spaces: Of the templates that match, in a fixed order; may be empty.
        seed: Of the search. Equal seeds, spaces, records and answers give equal proposals.
        trials: Trials per key, known ones included.
        warm_start: Configs to try first, best first, for example a neighbour's; those outside ``spaces`` are dropped.
        trailing: Templates that the nearest tuned key left behind, with the trials that this counts as.
        record: What is known from elsewhere: values by (template, config), None for a candidate that failed.
        fresh: Forget the trials stored under ``name``.
        sampler: ``tpe`` or ``random``.
        patience: Once the design is done, the search ends when so many trials found nothing faster; None: never.

    Raises:
        InputError: If the storage does not answer.
        SchemaError: If a space is malformed.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # else Optuna prints a line for every study
    stored = store.open(name, spaces, fresh=fresh) if store is not None else None
    known = list(stored.trials()) if stored is not None else []
    recorded = [
        Trial(template, config, value, Status.PASSED if value is not None else Status.RUNTIME_ERROR)
        for (template, config), value in (record or {}).items()
    ]
    # A resumed search must not draw its first configs again, so what is known is part of the seed.
    drawn = int(digest_text(str(seed), name, str(len(known) + len(recorded))), 16) % 2**32
    study = KeyStudy(
        spaces,
        seed=drawn,
        trials=trials,
        sampler=sampler,
        warm_start=warm_start,
        trailing=trailing or {},
        stored=stored,
        patience=patience,
    )
    for trial in known:
        study.learn(trial, store=False)
    for trial in recorded:
        study.learn(trial, store=True)
    if stored is not None:
        stored.note("seed", seed)
    return study


def by_rank(spaces: Iterable[ConfigSpace]) -> list[tuple[str, Config]]:
    """Return what to try first of every template with its name: the default of each, then the second of each."""
    columns = [[(space.template, config) for config in space.starts()] for space in spaces]
    return [start for rank in itertools.zip_longest(*columns) for start in rank if start is not None]


def _value(trial: Trial) -> float:
    return -math.inf if trial.value is None else trial.value
