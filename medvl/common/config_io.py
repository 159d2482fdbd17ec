"""Config dataclasses to JSON values and back.

A field whose type is a union of dataclasses is tagged with the class name under `kind`; everything else is written as
it stands. Reading checks every value against the field's type and names what does not fit, with the nearest known
name where a key is unknown. No code is evaluated and nothing is imported by name.
"""

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from medvl.errors import ConfigError

Config = TypeVar("Config")

_KIND = "kind"


def to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as JSON values: nested dataclasses become objects, tuples lists, paths strings.

    Raises TypeError where a field holds something that JSON cannot.
    """
    hints = typing.get_type_hints(type(config))
    return {field.name: _encode(getattr(config, field.name), hints[field.name]) for field in dataclasses.fields(config)}


def from_dict(cls: type[Config], data: Mapping[str, Any]) -> Config:
    """The config that `to_dict` wrote; fields that are left out take their defaults.

    Raises ConfigError on an unknown key (naming the nearest field), a missing one and a value of another type.
    """
    return _decode_dataclass(cls, data, cls.__name__)


def differences(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted path, old value, new value) of every leaf in which two trees of JSON values differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        prefix = f"{path}." if path else ""
        return [row for name in names for row in differences(old.get(name), new.get(name), f"{prefix}{name}")]
    return [] if old == new else [(path, old, new)]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an error's text: the nearest known name where one is near, else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"


def _encode(value: Any, hint: Any = Any) -> Any:
    if dataclasses.is_dataclass(value):
        tag = {_KIND: type(value).__name__} if hint is not type(value) and len(_dataclasses_of(hint)) != 1 else {}
        return tag | to_dict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _encode(item, _item_hint(hint)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item, _item_hint(hint)) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a config holds a {type(value).__name__}: only dataclasses, paths and JSON values can be written")


def _decode(value: Any, hint: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(value, hint, path)
    if origin is Literal:
        if not any(value == known and type(value) is type(known) for known in arguments):
            raise ConfigError(f"{path} must be one of {', '.join(map(repr, arguments))}, got {value!r}")
        return value
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast(type, hint), value, path)
    if origin in (tuple, list):
        return _decode_sequence(value, origin, arguments, path)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be an object, got {_name_of(value)}")
        return {key: _decode(item, arguments[1], f"{path}.{key}") for key, item in value.items()}
    return _decode_scalar(value, hint, path)


def _decode_dataclass(cls: type[Config], data: Any, path: str) -> Config:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must be an object with the fields of {cls.__name__}, got {_name_of(data)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls)) if field.init}
    for name in data:
        if name not in fields and name != _KIND:
            raise ConfigError(f"{path} has no field {name!r}: {nearest(name, fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise ConfigError(f"{path}.{name} is missing: give it a value")
    return cls(**{name: _decode(data[name], hints[name], f"{path}.{name}") for name in fields if name in data})


def _decode_union(value: Any, hint: Any, path: str) -> Any:
    members = typing.get_args(hint)
    if isinstance(value, Mapping) and _KIND in value:
        known = {cls.__name__: cls for cls in _dataclasses_of(hint)}
        kind = str(value[_KIND])
        if kind not in known:
            raise ConfigError(f"{path} has no kind {kind!r}: {nearest(kind, known)}")
        return _decode_dataclass(known[kind], value, path)
    for member in members:
        with contextlib.suppress(ConfigError):
            return _decode(value, member, path)
    rest = [member for member in members if member is not type(None)]
    if len(rest) == 1 and value is not None:
        return _decode(value, rest[0], path)  # raises, and says what an optional field wants
    raise ConfigError(f"{path} must be one of {', '.join(map(_hint_name, members))}, got {_name_of(value)}")


def _decode_sequence(value: Any, origin: type, arguments: tuple[Any, ...], path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path} must be a list, got {_name_of(value)}")
    if origin is tuple and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise ConfigError(f"{path} must have {len(arguments)} entries, got {len(value)}")
        hints: Iterable[Any] = arguments
    else:
        hints = [arguments[0]] * len(value)
    return origin(
        _decode(item, hint, f"{path}.{index}") for index, (item, hint) in enumerate(zip(value, hints, strict=True))
    )


def _decode_scalar(value: Any, hint: Any, path: str) -> Any:
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (None, type(None)):
        if value is not None:
            raise ConfigError(f"{path} must be null, got {_name_of(value)}")
        return None
    if hint not in (bool, int, float, str, Path):
        raise ConfigError(f"{path}: a {_hint_name(hint)} cannot be read from JSON")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{path} must be of type {hint.__name__}, got {_name_of(value)}")
    return value


def _dataclasses_of(hint: Any) -> list[type]:
    """The dataclasses that a type may be: itself, or the members of a union."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [member for member in members if dataclasses.is_dataclass(member) and isinstance(member, type)]


def _item_hint(hint: Any) -> Any:
    """The type of a container's values; for a tuple of mixed types, anything."""
    arguments = [argument for argument in typing.get_args(hint) if argument is not Ellipsis]
    mixed = typing.get_origin(hint) is tuple and len(set(arguments)) > 1
    return arguments[-1] if arguments and not mixed else Any


def _hint_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(repr, typing.get_args(hint)))
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))


def _name_of(value: Any) -> str:
    return f"{value!r}" if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
