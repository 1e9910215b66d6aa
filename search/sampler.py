"""How Optuna sees a config: its parameters, their distributions, and the samplers that draw them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from fibc.schema.candidate import ConfigValue
from fibc.schema.space import Tunable
from fibc.search.space import Config, ConfigSpace, ordered

SAMPLERS = ("tpe", "random")

_TEMPLATE = "template"


def make_sampler(name: str, *, seed: int, num_startup: int) -> BaseSampler:
    """Return the sampler ``name``, one of SAMPLERS.

    TPE is multivariate because tunables interact (a tile's rows and columns share the registers), grouped because each
    template has tunables of its own, and takes open trials for bad ones, so that a batch spreads.

    Args:
        seed: At most 2^32 - 1.
        num_startup: Trials with a value before the model replaces uniform draws.
    """
    if name == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # our own choice of options, nothing for a user to act on
        return TPESampler(seed=seed, n_startup_trials=num_startup, multivariate=True, group=True, constant_liar=True)


def suggest(trial: optuna.Trial, spaces: Mapping[str, ConfigSpace]) -> tuple[str, Config]:
    """Draw a template, then its tunables, named ``<template>.<tunable>``; the config may break laws."""
    template = trial.suggest_categorical(_TEMPLATE, list(spaces))
    config: list[tuple[str, ConfigValue]] = []
    for tunable in spaces[template].tunables:
        name = _parameter(template, tunable)
        order = ordered(tunable)
        if order is None:
            index = tunable.choices.index(trial.suggest_categorical(name, tunable.choices))
            config.append((tunable.name, tunable.choices[index]))
        else:
            config.append((tunable.name, order[trial.suggest_int(name, 0, len(order) - 1)]))
    return template, tuple(config)


def fixed_template(template: str) -> dict[str, object]:
    """Return the parameters that fix only the template of a draw."""
    return {_TEMPLATE: template}


def parameters(space: ConfigSpace, config: Config) -> dict[str, object]:
    """Return ``config`` as Optuna's parameters: integers by their rank among the choices, so that order counts."""
    values: dict[str, object] = fixed_template(space.template)
    for tunable, (_, value) in zip(space.tunables, config, strict=True):
        order = ordered(tunable)
        values[_parameter(space.template, tunable)] = value if order is None else order.index(int(value))
    return values


def distributions(space: ConfigSpace, templates: list[str]) -> dict[str, BaseDistribution]:
    """Return the distributions of ``parameters``."""
    result: dict[str, BaseDistribution] = {_TEMPLATE: CategoricalDistribution(templates)}
    for tunable in space.tunables:
        order = ordered(tunable)
        result[_parameter(space.template, tunable)] = (
            CategoricalDistribution(tunable.choices) if order is None else IntDistribution(0, len(order) - 1)
        )
    return result


def _parameter(template: str, tunable: Tunable) -> str:
    return f"{template}.{tunable.name}"
