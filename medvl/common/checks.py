"""Checks of options that configurations, corpora and models share."""

from collections.abc import Collection

from medvl.errors import ConfigError


def check_choice(value: object, choices: Collection[str], field: str) -> None:
    """Raise ConfigError naming the field unless its value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{field} must be one of {', '.join(choices)}, got {value!r}", "unknown_name", field=field)
