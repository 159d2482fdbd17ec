"""Checks of settings that configurations, corpora and models share. All raise an error that names the field."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from medvl.errors import ConfigError, MedvlError


def check_choice(value: object, choices: Collection[str], field: str, *, error: type[MedvlError] = ConfigError) -> None:
    """Raise `error` unless the value is one of the choices."""
    if value not in choices:
        raise error(f"{field} must be one of {', '.join(choices)}, got {value!r}", "unknown_name", field=field)


def check_within(config: Any, interval: str, *fields: str, error: type[MedvlError] = ConfigError) -> None:
    """Raise `error` unless these settings are None or within an interval, such as "(0, 1]" or "[0, inf)"."""
    low, high = map(float, interval[1:-1].split(","))
    for name in fields:
        value = getattr(config, name)
        included = ([low] if interval[0] == "[" else []) + ([high] if interval[-1] == "]" else [])
        if value is not None and not (low < value < high or value in included):
            least = "at least" if interval[0] == "[" else "above"
            allowed = f"within {interval}" if math.isfinite(high) else f"{least} {low:g}"
            raise error(f"{name} must be {allowed}, got {value!r}", "out_of_range", field=name)


def check_multiple(config: Any, factor: int, *fields: str) -> None:
    """Raise ConfigError unless these settings are multiples of a factor."""
    for name in fields:
        if (value := getattr(config, name)) % factor:
            raise ConfigError(f"{name} must be a multiple of {factor}, got {value}", "out_of_range", field=name)


def check_weights(config: Any, *fields: str) -> None:
    """Raise ConfigError unless these weights of losses are 0 or above, and at least one of them is above 0."""
    check_within(config, "[0, inf)", *fields)
    if not any(getattr(config, name) for name in fields):
        message = f"{' and '.join(fields)} are all 0: nothing would be trained"
        raise ConfigError(message, "out_of_range", field=fields[0])


def check_labels(labels: Sequence[str], field: str, *, fewest: int = 1) -> None:
    """Raise ConfigError unless there are enough different labels."""
    if len(labels) < fewest or len(set(labels)) != len(labels):
        counts = f"{len(labels)}, {len(set(labels))} different"
        message = f"{field} must hold {fewest} or more different values, got {counts}"
        raise ConfigError(message, "out_of_range", field=field)
