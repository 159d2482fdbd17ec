"""Splits: assignment by a hash of the patient, and checks that splits share no patient."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence

from medvl.errors import ConfigError, SplitError

DEFAULT_FRACTIONS: Mapping[str, float] = {"train": 0.8, "validate": 0.1, "test": 0.1}


def check_name(name: str, field: str) -> None:
    """Raise ConfigError unless a name can be (part of) the name of a file or folder."""
    if not re.fullmatch(r"\w[\w .+-]{0,99}", name):
        message = (
            f"expected {field} of letters, digits, spaces and ._+- that begins with a "
            f"letter or digit, got {name!r}"
        )
        raise ConfigError(message, "malformed", field=field)


def parse_fractions(items: Sequence[str]) -> dict[str, float]:
    """Return name -> fraction of splits given as NAME=FRACTION.

    Raises ConfigError for other items, and as `check_fractions`.
    """
    try:
        fractions = {name: float(value) for name, value in named_values(items, "splits").items()}
    except ValueError:
        message = f"expected --splits as NAME=FRACTION, got {' '.join(items)}"
        raise ConfigError(message, "malformed", field="splits") from None
    check_fractions(fractions)
    return fractions


def named_values(items: Sequence[str], field: str) -> dict[str, str]:
    """Return NAME -> VALUE of items NAME=VALUE. Raises ConfigError ("malformed") for others, which
    names the option `field`.
    """
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            option = f"--{field.replace('_', '-')}"
            message = f"expected {option} as NAME=VALUE, got {item!r}"
            raise ConfigError(message, "malformed", field=field)
        pairs[name] = value
    return pairs


def check_fractions(fractions: Mapping[str, float]) -> None:
    """Raise ConfigError unless the fractions are positive and sum to 1, and their names can be
    those of folders.
    """
    for name in fractions:
        check_name(name, "splits")
    if not fractions or not all(fraction > 0 for fraction in fractions.values()):
        raise ConfigError(
            f"expected split fractions above 0, got {dict(fractions)}",
            "out_of_range",
            field="splits",
        )
    total = sum(fractions.values())
    if abs(total - 1.0) > 1e-9:
        raise ConfigError(
            f"expected split fractions with sum 1, got {dict(fractions)} with sum {total:g}",
            "out_of_range",
            field="splits",
        )


def hash_split(patient: str, fractions: Mapping[str, float] = DEFAULT_FRACTIONS) -> str:
    """Return the split of a patient, determined by a hash of the (already hashed) patient id alone.

    A patient keeps its split when others are added or removed, and in every corpus hashed with the
    same salt.
    """
    digest = hashlib.blake2b(patient.encode(), digest_size=8, person=b"medvl-split").digest()
    position = int.from_bytes(digest, "big") / 2**64
    upper = 0.0
    for name, fraction in fractions.items():
        upper += fraction
        if position < upper:
            return name
    return list(fractions)[-1]  # the fractions may sum to slightly below 1


def check_disjoint(patients_by_split: Mapping[str, Iterable[str]], name: str) -> None:
    """Raise SplitError when a patient is in two splits. `name` is the name of the corpus, for
    the message.
    """
    owner: dict[str, str] = {}
    shared: dict[tuple[str, str], list[str]] = {}
    for split, patients in patients_by_split.items():
        for patient in set(patients):
            first = owner.setdefault(patient, split)
            if first != split:
                shared.setdefault((first, split), []).append(patient)
    if shared:
        detail = "; ".join(
            f"{len(patients)} in both {first} and {second} (first by hash: {min(patients)})"
            for (first, second), patients in sorted(shared.items())
        )
        raise SplitError(
            f"{name}: splits share patients: {detail}; correct the split table so that each "
            "patient is in one split, or remove its column to split by patient hash",
            "leak",
        )
