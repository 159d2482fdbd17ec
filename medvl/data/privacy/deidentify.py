"""De-identification: salted hashes of ids, capped ages, and headers of report sections that name a person.

With the salt and a list of patient ids, hashes could be matched to patients. Therefore the salt is in a separate file
(`default_salt_file`) with mode 0600, never next to the shards; the shards contain only its fingerprint, which shows
whether two corpora were hashed with the same salt.
"""

import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import SupportsFloat

from medvl.common.untrusted import read_file
from medvl.errors import ConfigError, CorpusError

_ID_BYTES = 10  # 20 hex characters: two of a million ids collide with a probability of about 4e-13
_SALT_BYTES = 32
_MAX_SALT_FILE = 4096
_MIN_SALT_BYTES, _MAX_SALT_BYTES = 16, hashlib.blake2b.MAX_KEY_SIZE

_log = logging.getLogger(__name__)

MAX_AGE = 90
"""Ages of 90 and above are one group, as HIPAA's Safe Harbor requires (45 CFR 164.514(b)(2)(i)(C))."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deidentifier:
    """Hashes ids with keyed BLAKE2b to 20 hexadecimal characters, which cannot be inverted without the salt.

    Each kind of id is hashed separately: patient 7 and image 7 have unrelated hashes. White space around an id is
    ignored (DICOM pads with it), and 7 is the same id as "7".
    """

    salt: bytes = dataclasses.field(repr=False)
    """16 to 64 random bytes, not shown in `repr`."""

    def __post_init__(self) -> None:
        if not _MIN_SALT_BYTES <= len(self.salt) <= _MAX_SALT_BYTES:
            expected = f"{_MIN_SALT_BYTES} to {_MAX_SALT_BYTES} bytes"
            raise ConfigError(f"salt must have {expected}, got {len(self.salt)}", "out_of_range", field="salt")

    @classmethod
    def from_file(cls, path: Path | str, *, create: bool = False) -> "Deidentifier":
        """Return a de-identifier with the hexadecimal salt in a file.

        With `create`, a missing file is created atomically with 32 random bytes, readable by its owner only. Processes
        that create it at the same time get the same salt.

        A warning names the mode of a file that other users can read: with it, ids can be guessed from their hashes.

        Raises ConfigError when the file is missing, no regular file, not hexadecimal, or too short.
        """
        path = Path(path)
        if create and not path.exists():
            _create_salt(path)
        try:
            content = read_file(path, _MAX_SALT_FILE, ConfigError)
        except FileNotFoundError:
            advice = "set MEDVL_SALT_FILE to the salt of this data, or let the first conversion create one"
            raise ConfigError(f"the salt file {path} does not exist: {advice}", "not_found") from None
        except ConfigError as error:
            raise error.prefixed("the salt file cannot be read: ") from None
        _warn_of_mode(path)
        try:
            return cls(bytes.fromhex(content.decode("ascii").strip()))
        except ValueError:  # from bytes.fromhex and the decoder, whose messages quote the salt
            raise ConfigError(f"the salt file {path} is not hexadecimal: not written by medvl", "malformed") from None
        except ConfigError as error:
            raise error.prefixed(f"the salt file {path} is damaged: ") from None

    @property
    def fingerprint(self) -> str:
        """8 hexadecimal characters that identify the salt without revealing it."""
        return self._hash(b"fingerprint")[:8]

    def patient(self, patient_id: str | int) -> str:
        """Return the hash of a patient's id. Raises CorpusError when it is empty."""
        return self._hash(b"patient", patient_id)

    def study(self, patient_id: str | int, study_id: str | int) -> str:
        """Return the hash of a study. Some hospitals number studies per patient, so both ids are hashed."""
        return self._hash(b"study", patient_id, study_id)

    def image(self, image_id: str | int) -> str:
        """Return the hash of an image's id, which is the key of its sample."""
        return self._hash(b"image", image_id)

    def _hash(self, kind: bytes, *ids: str | int) -> str:
        digest = hashlib.blake2b(key=self.salt, person=kind, digest_size=_ID_BYTES)
        for value in ids:
            try:
                text = str(value).strip().encode()
            except UnicodeEncodeError:
                raise CorpusError(f"a {kind.decode()} id has half of a surrogate pair", "malformed") from None
            if not text:
                raise CorpusError(f"empty {kind.decode()} id: fill in the column, or remove the row", "missing")
            digest.update(len(text).to_bytes(4, "big"))  # ("ab", "c") and ("a", "bc") must differ
            digest.update(text)
        return digest.hexdigest()


def default_salt_file() -> Path:
    """Return `$MEDVL_SALT_FILE`, or `~/.config/medvl/salt`."""
    path = os.environ.get("MEDVL_SALT_FILE")
    return Path(path) if path else Path.home() / ".config" / "medvl" / "salt"


def _warn_of_mode(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        message = (
            "the salt file %s has the mode %04o: other users can guess ids from hashes with it; run chmod 600 on it"
        )
        _log.warning(message, path, mode)


def _create_salt(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".salt-")  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(_SALT_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)  # unlike a rename, this does not replace the salt of another process
        finally:
            Path(partial).unlink()
    except OSError as error:
        message = f"the salt file {path} cannot be created ({error.strerror}): set MEDVL_SALT_FILE"
        raise ConfigError(message, "unreadable") from None


_AGE = re.compile(r"(\d{1,3}(?:[.,]\d+)?)\s*([DWMY]?)", re.IGNORECASE)
_UNITS_PER_YEAR = {"D": 365.25, "W": 365.25 / 7, "M": 12.0, "Y": 1.0, "": 1.0}


def cap_age(age: object) -> int | None:
    """Return whole years, where 90 means 90 and above.

    Accepts years as a number or text, and DICOM's age strings (`065Y`, `011M`, `003W`, `010D`). Returns None for
    anything else (None, NaN, negative, other text, lists).
    """
    if isinstance(age, str):
        match = _AGE.fullmatch(age.strip())
        years = float(match[1].replace(",", ".")) / _UNITS_PER_YEAR[match[2].upper()] if match else math.nan
    else:
        years = _to_float(age)
    return int(min(years, MAX_AGE)) if years >= 0 else None  # NaN is not


def _to_float(value: object) -> float:
    """Return a number of any type as float; NaN for other values."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    return math.nan


_IDENTITY = re.compile(
    r"\b(?:patient(?: name| id.*)?$|name\b|m\.?r\.?n\b|record (?:number|no)\b|d\.?o\.?b\b|birth|accession|account|ssn\b"
    r"|social security|address|phone|physician|doctor|radiologist|attending|resident\b|referr|dictat|transcri"
    r"|sign(?:ed|ature)|(?:read|verified|interpreted|approved|electronically) |(?:reported|reviewed|typed) by\b)",
    re.IGNORECASE,
)


_LEADING = re.compile(
    r"(?:(?:date|of|medical|report|final|hospital|ordering|requesting|primary care|digitally|patient'?s?|pt) )*",
    re.IGNORECASE,
)


def is_identifying_header(header: str, *, at_start: bool = False) -> bool:
    """Return whether a section with this header identifies the patient or the author: `MRN`, `SIGNED BY`.

    Released corpora have such lines masked; a hospital's own reports begin and end with them. With `at_start`, the
    header must begin with an identifying word (`Date of birth`, `Signed by`), as for headers that are not in capitals.
    """
    if not at_start:
        return _IDENTITY.search(header) is not None
    leading = _LEADING.match(header)
    starts = (0, leading.end() if leading else 0)
    return any(_IDENTITY.match(header, start) for start in starts)
