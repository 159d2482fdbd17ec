"""Conversion between config dataclasses and JSON values: the one reader and writer of every
configuration.

A field whose type is a union of dataclasses is written with the class name under `kind`. Reading
checks each value against the type of its field and converts what JSON has no type for: tuples,
paths and nested dataclasses. Errors name the field by its dotted path, and the nearest known name.
No code is evaluated and nothing is imported by name.
"""

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from medvl.errors import ConfigError, MedvlError

# Checks of settings that configurations, corpora and models share. All raise an error that names
# the field.


def check_choice(
    value: object, choices: Collection[str], field: str, *, error: type[MedvlError] = ConfigError
) -> None:
    """Raise `error` unless the value is one of the choices."""
    if value not in choices:
        raise error(
            f"{field} must be one of {', '.join(choices)}, got {value!r}",
            "unknown_name",
            field=field,
        )


def check_within(
    config: Any, interval: str, *fields: str, error: type[MedvlError] = ConfigError
) -> None:
    """Raise `error` unless these settings are None or within an interval, such as "(0, 1]" or
    "[0, inf)".
    """
    low, high = map(float, interval[1:-1].split(","))
    for name in fields:
        value = getattr(config, name)
        included = ([low] if interval[0] == "[" else []) + ([high] if interval[-1] == "]" else [])
        if value is not None and not (low < value < high or value in included):
            least = "at least" if interval[0] == "[" else "above"
            bounds = f"within {interval}" if math.isfinite(high) else f"{least} {low:g}"
            raise error(f"{name} must be {bounds}, got {value!r}", "out_of_range", field=name)


def check_multiple(config: Any, factor: int, *fields: str) -> None:
    """Raise ConfigError unless these settings are multiples of a factor."""
    for name in fields:
        if (value := getattr(config, name)) % factor:
            raise ConfigError(
                f"{name} must be a multiple of {factor}, got {value}", "out_of_range", field=name
            )


def check_weights(config: Any, *fields: str) -> None:
    """Raise ConfigError unless these weights of losses are 0 or above, and at least one of them
    is above 0.
    """
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


Config = TypeVar("Config")

_KIND = "kind"
ANY = object()
"""Constant of `former` for fields that were no settings of the class, and are left out."""


def to_dict(config: Any, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Convert a config dataclass to JSON values: nested dataclasses to objects, tuples to lists,
    paths to strings.

    Fields named in `leave_out` are omitted. Raises TypeError where a field holds a value that JSON
    cannot represent.
    """
    hints = _field_types(type(config))
    names = [field.name for field in dataclasses.fields(config) if field.name not in leave_out]
    return {name: _encode(getattr(config, name), hints[name]) for name in names}


def from_dict(cls: type[Config], data: Mapping[str, Any]) -> Config:
    """Build a config from the values that `to_dict` returned, or from Python values; missing fields
    take defaults.

    A class may list fields of earlier versions with the constants that replaced them, as `former`:
    they are left out where they hold the constant, or any value (`ANY`).

    Raises ConfigError with the dotted path in `field`: `unknown_name` (with the nearest field
    name), `missing`, `wrong_type`, `unsupported` for a former field with another value, or the code
    of the config's own checks.
    """
    return _decode_dataclass(cls, data, "")


def former_fields(cls: type) -> dict[str, Any]:
    """Return the fields of earlier versions of a config class and of its bases, with the constants
    that replaced them.
    """
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in vars(base).get("former", ())
    }


def upgrade_settings(
    stored: Mapping[str, Any], config: Any, today: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return stored settings as the present version of `config`'s class would have stored them:
    with the defaults of fields that were added since, and without former fields that hold the
    constant that replaced them.

    Compare the result with `today`: a run that was stored before a field existed equals one that
    leaves the field at its default. Settings of another class are returned unchanged.

    Args:
        stored: all or some of the values that `to_dict` returned for a config of this class.
        config: config dataclass; nested ones are upgraded by the classes of its values.
        today: what is stored of `config` today, default `to_dict(config)`; a field that it leaves
            out is not added.
    """
    if stored.get(_KIND, type(config).__name__) != type(config).__name__:
        return dict(stored)
    today = to_dict(config) if today is None else today
    former = former_fields(type(config))
    hints = _field_types(type(config))
    upgraded = {
        name: value
        for name, value in stored.items()
        if name not in former or not (former[name] is ANY or value == former[name])
    }
    for field in dataclasses.fields(config):
        name = field.name
        if name in stored:
            upgraded[name] = _upgrade(stored[name], getattr(config, name), today.get(name))
        elif name not in today:
            continue
        elif field.default_factory is not dataclasses.MISSING:
            upgraded[name] = _encode(field.default_factory(), hints[name])
        elif field.default is not dataclasses.MISSING:
            upgraded[name] = _encode(field.default, hints[name])
    return upgraded


def differences(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted path, old value, new value) of every leaf in which two trees of JSON values
    differ.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        return [
            row
            for name in names
            for row in differences(old.get(name), new.get(name), _join(path, name))
        ]
    return [] if old == new else [(path, old, new)]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an error message: the nearest known name, or all of them where none is
    near.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"


def _upgrade(stored: Any, value: Any, today: Any) -> Any:
    if isinstance(value, (list, tuple)) and isinstance(stored, list) and isinstance(today, list):
        if len(value) == len(stored) == len(today):
            return [_upgrade(*items) for items in zip(stored, value, today, strict=True)]
    elif dataclasses.is_dataclass(value) and isinstance(stored, Mapping):
        return upgrade_settings(stored, value, today if isinstance(today, Mapping) else None)
    return stored


def _encode(value: Any, hint: Any = Any) -> Any:
    if dataclasses.is_dataclass(value):
        tag = (
            {_KIND: type(value).__name__}
            if hint is not type(value) and len(_dataclasses_of(hint)) != 1
            else {}
        )
        return tag | to_dict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _encode(item, _item_hint(hint)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item, _item_hint(hint)) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"expected dataclasses, paths and JSON values in a config, got a {type(value).__name__}"
    )


def _decode(value: Any, hint: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint in (Any, object):
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(value, hint, path)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            if not isinstance(value, str):
                raise _wrong_type(path, _hint_name(hint), value)
            message = (
                f"expected one of {_hint_name(hint)}, got {value!r}; "
                f"{nearest(value, map(str, arguments))}"
            )
            raise ConfigError(f"{path}: {message}", "unknown_name", field=path)
        return value
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast(type, hint), value, path)
    if origin in (tuple, list):
        return _decode_sequence(value, origin, arguments, path)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong_type(path, "an object", value)
        return {key: _decode(item, arguments[1], _join(path, key)) for key, item in value.items()}
    return _decode_scalar(value, hint, path)


def _decode_dataclass(cls: type[Config], data: Any, path: str) -> Config:
    if isinstance(data, cls):
        return data
    if not isinstance(data, Mapping):
        raise _wrong_type(
            path or cls.__name__, f"an object with the fields of {cls.__name__}", data
        )
    hints = _field_types(cls)
    fields = {
        field.name: field for field in dataclasses.fields(typing.cast(Any, cls)) if field.init
    }
    former = former_fields(cls)
    for name in data:
        if name not in fields and name != _KIND:
            unknown = _join(path, name)
            if name in former:
                if former[name] is ANY or data[name] == former[name]:
                    continue
                message = f"{unknown}: expected {former[name]!r}, got {data[name]!r}"
                reason = f"{cls.__name__} has this value as a constant"
                raise ConfigError(f"{message}; {reason}", "unsupported", field=unknown)
            message = f"{cls.__name__} has no field {unknown!r}: {nearest(name, fields)}"
            raise ConfigError(message, "unknown_name", field=unknown)
    for name, field in fields.items():
        is_required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if is_required and name not in data:
            missing = _join(path, name)
            raise ConfigError(
                f"{cls.__name__}.{missing} is missing; give it a value", "missing", field=missing
            )
    values = {
        name: _decode(data[name], hints[name], _join(path, name)) for name in fields if name in data
    }
    try:
        return cls(**values)
    except ConfigError as error:
        if error.field is None or not path:
            raise
        raise ConfigError(f"{path}: {error}", error.code, field=_join(path, error.field)) from None


def _decode_union(value: Any, hint: Any, path: str) -> Any:
    members = typing.get_args(hint)
    if isinstance(value, Mapping) and _KIND in value:
        class_of = {cls.__name__: cls for cls in _dataclasses_of(hint)}
        kind = str(value[_KIND])
        if kind not in class_of:
            raise ConfigError(
                f"{path}: no kind {kind!r}; {nearest(kind, class_of)}", "unknown_name", field=path
            )
        return _decode_dataclass(class_of[kind], value, path)
    for member in members:
        with contextlib.suppress(ConfigError):
            return _decode(value, member, path)
    rest = [member for member in members if member is not type(None)]
    if len(rest) == 1 and value is not None:
        # raises the error of the only type that the field may have
        return _decode(value, rest[0], path)
    raise _wrong_type(path, f"one of {', '.join(map(_hint_name, members))}", value)


def _decode_sequence(value: Any, origin: type, arguments: tuple[Any, ...], path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(path, "a list", value)
    if origin is tuple and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise ConfigError(
                f"{path}: expected {len(arguments)} entries, got {len(value)}",
                "wrong_type",
                field=path,
            )
        hints: Iterable[Any] = arguments
    else:
        hints = [arguments[0]] * len(value)
    items = enumerate(zip(value, hints, strict=True))
    return origin(_decode(item, hint, f"{path}.{index}") for index, (item, hint) in items)


def _decode_scalar(value: Any, hint: Any, path: str) -> Any:
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (None, type(None)):
        if value is not None:
            raise _wrong_type(path, "null", value)
        return None
    if hint not in (bool, int, float, str, Path):
        raise ConfigError(
            f"{path}: {_hint_name(hint)} cannot be read from JSON", "unsupported", field=path
        )
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _wrong_type(path, f"type {hint.__name__}", value)
    return value


def _wrong_type(path: str, expected: str, value: Any) -> ConfigError:
    name = (
        f"{value!r}" if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
    )
    return ConfigError(f"{path}: expected {expected}, got {name}", "wrong_type", field=path)


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _field_types(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; the bound of one that is a type parameter."""
    return {
        name: hint.__bound__ if isinstance(hint, TypeVar) else hint
        for name, hint in typing.get_type_hints(cls).items()
    }


def _dataclasses_of(hint: Any) -> list[type]:
    """Return the dataclasses that a type allows: itself, or the members of a union."""
    members = (
        typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    )
    return [
        member
        for member in members
        if dataclasses.is_dataclass(member) and isinstance(member, type)
    ]


def _item_hint(hint: Any) -> Any:
    """Return the type of a container's values; Any for a tuple of several types."""
    arguments = [argument for argument in typing.get_args(hint) if argument is not Ellipsis]
    is_mixed = typing.get_origin(hint) is tuple and len(set(arguments)) > 1
    return arguments[-1] if arguments and not is_mixed else Any


def _hint_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(repr, typing.get_args(hint)))
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))
