"""Checks of settings, for the `__post_init__` of configurations. All raise ConfigError naming the field."""

from collections.abc import Sequence
from typing import Any

from medvl.errors import ConfigError


def check_positive(config: Any, *fields: str) -> None:
    """Raise ConfigError unless these settings are above 0."""
    for name in fields:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name} must be above 0, got {getattr(config, name)}", "out_of_range", field=name)


def check_not_negative(config: Any, *fields: str) -> None:
    """Raise ConfigError unless these settings are 0 or more."""
    for name in fields:
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} must not be negative, got {getattr(config, name)}", "out_of_range", field=name)


def check_range(config: Any, low: float, high: float, *fields: str, low_included: bool = False) -> None:
    """Raise ConfigError unless these settings are between `low` and `high`, which is excluded."""
    for name in fields:
        value = getattr(config, name)
        if not (low < value < high or (low_included and value == low)):
            interval = f"{'[' if low_included else '('}{low}, {high})"
            raise ConfigError(f"{name} must be within {interval}, got {value}", "out_of_range", field=name)


def check_share(config: Any, *fields: str) -> None:
    """Raise ConfigError unless these settings are above 0 and at most 1."""
    for name in fields:
        if not 0 < getattr(config, name) <= 1:
            raise ConfigError(f"{name} must be within (0, 1], got {getattr(config, name)}", "out_of_range", field=name)


def check_choice(config: Any, field: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless a setting is one of the choices."""
    value = getattr(config, field)
    if value not in choices:
        raise ConfigError(f"{field} must be one of {', '.join(choices)}, got {value!r}", "unknown_name", field=field)


def check_labels(labels: Sequence[str], field: str, *, fewest: int = 1) -> None:
    """Raise ConfigError unless there are enough different labels."""
    if len(labels) < fewest or len(set(labels)) != len(labels):
        raise ConfigError(
            f"{field} must hold {fewest} or more different values, got {len(labels)}, {len(set(labels))} different",
            "out_of_range",
            field=field,
        )
