"""Splits: by the corpus' own table, or by a hash of the patient; and the proof that they do not overlap."""

import hashlib
from collections.abc import Iterable, Mapping

from medvl.errors import ConfigError, SplitError

DEFAULT_FRACTIONS: Mapping[str, float] = {"train": 0.8, "validate": 0.1, "test": 0.1}


def check_fractions(fractions: Mapping[str, float]) -> None:
    """Raises ConfigError unless the fractions are positive and sum to one."""
    if not fractions or any(fraction <= 0 for fraction in fractions.values()):
        raise ConfigError(f"split fractions must all be above zero, got {dict(fractions)}")
    if abs(sum(fractions.values()) - 1.0) > 1e-9:
        raise ConfigError(f"split fractions must sum to 1, got {dict(fractions)} with sum {sum(fractions.values()):g}")


def hash_split(patient: str, fractions: Mapping[str, float] = DEFAULT_FRACTIONS) -> str:
    """The split of a patient, decided by a hash of the (already hashed) patient id alone.

    A patient keeps its split when others join or leave the corpus, and in every corpus hashed with the same salt.
    """
    digest = hashlib.blake2b(patient.encode(), digest_size=8, person=b"medvl-split").digest()
    position = int.from_bytes(digest, "big") / 2**64
    upper = 0.0
    for name, fraction in fractions.items():
        upper += fraction
        if position < upper:
            return name
    return list(fractions)[-1]  # rounding: the fractions summed to slightly below one


def check_disjoint(patients_by_split: Mapping[str, Iterable[str]], what: str) -> None:
    """Raises SplitError when a patient stands in two splits. `what` names the corpus in the message."""
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
            f"{what}: splits share patients: {detail}. Every image of a patient must be in one split: "
            "mend the split table, or drop its column and let medvl split by patient hash."
        )
