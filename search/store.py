"""Finished trials in an Optuna storage: what a later run goes on from, and what Optuna's own tools show."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import RDBStorage
from optuna.trial import TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import QueuePool

from fibc.errors import InputError, RecordError
from fibc.schema.digest import digest_json
from fibc.schema.evaluation import Status
from fibc.schema.space import Space
from fibc.search.space import Config

SQLITE_WAIT_S = 20
"""Seconds to wait for another process's transaction; ours take milliseconds."""

_TROUBLE = (SQLAlchemyError, optuna.exceptions.OptunaError, ImportError, RuntimeError, OSError, ValueError)
"""What opening a bad URL, an unreachable server or a file that is no database raises."""


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Attributes:
        value: ln(native latency / candidate latency), or None where the candidate failed.
        status: What became of it.
        reason: Why it failed; empty where it passed.
    """

    template: str
    config: Config
    value: float | None
    status: Status
    reason: str = ""

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.config)
        return f"{self.template}({values})"


class StudyStore:
    """An Optuna storage that holds the studies of a run; one for all keys, because making it takes half a second."""

    def __init__(self, where: str | Path) -> None:
        """Open or make the storage.

        Args:
            where: A URL that SQLAlchemy takes, or the path of a SQLite file.

        Raises:
            InputError: If it cannot be opened.
        """
        if isinstance(where, Path):
            # Not as a URL: Optuna formats braces in it, and ? ends its path.
            connect = partial(sqlite3.connect, where, timeout=SQLITE_WAIT_S, check_same_thread=False)
            url, options = "sqlite://", {"creator": connect, "poolclass": QueuePool}
            self.name = str(where)
        else:
            url, options = where, {"connect_args": {"timeout": SQLITE_WAIT_S}} if where.startswith("sqlite") else {}
            self.name = re.sub(r"//[^@/]*@", "//***@", where)  # no password in a message
        try:
            self._storage = RDBStorage(url, engine_kwargs=options)
        except _TROUBLE as error:
            raise InputError(
                f"--storage: {self.name} cannot be opened, got: {_first_line(error)} (accepted: sqlite:///FILE, or a "
                "URL that SQLAlchemy has a driver for; where a file is locked or damaged: end the other run, remove it)"
            ) from error

    def open(self, name: str, spaces: Sequence[Space], *, fresh: bool = False) -> StoredStudy:
        """Open the study ``name``.

        The stored name carries a digest of ``spaces``: trials of a template whose text or tunables have changed are
        of another study.

        Raises:
            InputError: If the storage does not answer.
        """
        digest = digest_json(
            [[s.template, s.source_digest, [[t.name, list(t.choices)] for t in s.tunables]] for s in spaces]
        )
        try:
            if fresh:
                for stored in optuna.get_all_study_names(self._storage):
                    if stored.rpartition(" ")[0] == name:
                        optuna.delete_study(study_name=stored, storage=self._storage)
            study = optuna.create_study(
                storage=self._storage, study_name=f"{name} {digest}", direction="maximize", load_if_exists=True
            )
        except _TROUBLE as error:
            raise InputError(
                f"--storage: {self.name} does not answer, got: {_first_line(error)} "
                "(end other runs that use it, or choose another)"
            ) from error
        return StoredStudy(study, self.name, [space.template for space in spaces])

    def close(self) -> None:
        """Close every connection."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StoredStudy:
    """The finished trials of one study, with values as people write them."""

    def __init__(self, study: optuna.Study, storage_name: str, templates: list[str]) -> None:
        self._study = study
        self._storage_name = storage_name
        self._templates = templates

    def trials(self) -> Iterator[Trial]:
        """Yield what is stored; trials that another program added and that are none of ours are passed over."""
        for frozen in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)):
            attrs = frozen.user_attrs
            if {"template", "config", "status"} <= attrs.keys():
                config = tuple((str(name), value) for name, value in attrs["config"])
                yield Trial(attrs["template"], config, frozen.value, Status(attrs["status"]), attrs.get("reason", ""))

    def add(self, trial: Trial, space: Space) -> None:
        """Store ``trial``.

        Raises:
            RecordError: If the storage does not take it; what it held is kept.
        """
        params: dict[str, Any] = {"template": trial.template}
        kinds: dict[str, BaseDistribution] = {"template": CategoricalDistribution(self._templates)}
        for tunable, (name, value) in zip(space.tunables, trial.config, strict=True):
            params[f"{trial.template}.{name}"] = value
            kinds[f"{trial.template}.{name}"] = CategoricalDistribution(tunable.choices)
        attrs = {
            "template": trial.template,
            "config": trial.config,
            "status": trial.status.value,
            "reason": trial.reason,
        }
        frozen = create_trial(
            state=TrialState.FAIL if trial.value is None else TrialState.COMPLETE,
            value=trial.value,
            params=params,
            distributions=kinds,
            user_attrs=attrs,
        )
        try:
            self._study.add_trial(frozen)
        except (SQLAlchemyError, optuna.exceptions.OptunaError) as error:
            raise RecordError(f"{self._storage_name}: a trial cannot be stored: {_first_line(error)}") from error

    def note(self, name: str, value: object) -> None:
        """Store a fact about the study, for people."""
        self._study.set_user_attr(name, value)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
