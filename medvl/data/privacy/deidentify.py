"""De-identification: ids become salted hashes, ages are capped, and texts are screened for what a mask has missed.

The salt is what keeps a hash from being looked up: whoever has it and a list of patient ids can tell which hash is
whose. So it lives in a file of its own (`default_salt_file`), mode 0600, never beside the shards; the shards carry
only its fingerprint, which tells whether two corpora were hashed alike.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
import re
import secrets
import tempfile
from pathlib import Path

from medvl.errors import ConfigError, CorpusError

_ID_BYTES = 10  # 20 hex characters: two of a million ids collide with a probability of about 4e-13
_SALT_BYTES = 32
_MIN_SALT_BYTES, _MAX_SALT_BYTES = 16, hashlib.blake2b.MAX_KEY_SIZE

OLDEST = 90
"""Ages of 90 and above are one group: HIPAA's Safe Harbor counts them as identifying (45 CFR 164.514(b)(2)(i)(C))."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deidentifier:
    """Turns ids into hashes that cannot be undone without the salt: keyed BLAKE2b, 20 hexadecimal characters.

    The kinds of id are kept apart, so that patient 7 and image 7 have unrelated hashes. White space around an id does
    not count (DICOM pads with it), and 7 is the same id as "7".
    """

    salt: bytes = dataclasses.field(repr=False)
    """16 to 64 random bytes, kept out of every text that this object is printed in."""

    def __post_init__(self) -> None:
        if not _MIN_SALT_BYTES <= len(self.salt) <= _MAX_SALT_BYTES:
            raise ConfigError(f"a salt has {_MIN_SALT_BYTES} to {_MAX_SALT_BYTES} bytes, this one has {len(self.salt)}")

    @classmethod
    def from_file(cls, path: Path | str, *, create: bool = False) -> "Deidentifier":
        """The de-identifier whose salt `path` holds in hexadecimal.

        With `create`, a missing file is made from 32 random bytes, readable by its owner only. It appears whole or not
        at all; of several processes that create it at once, all get the same salt.

        Raises ConfigError when the file is missing, is not hexadecimal, or is too short to be a salt.
        """
        path = Path(path)
        if create and not path.exists():
            _create_salt(path)
        try:
            text = path.read_text(encoding="ascii").strip()
            return cls(bytes.fromhex(text))
        except FileNotFoundError:
            raise ConfigError(
                f"the salt file {path} does not exist: name the one that this data was hashed with "
                "(MEDVL_SALT_FILE), or let the first conversion create one"
            ) from None
        except OSError as error:
            raise ConfigError(f"the salt file {path} cannot be read ({error.strerror})") from None
        except ValueError:  # bytes.fromhex and the ASCII decoder; their texts would quote the salt
            raise ConfigError(f"the salt file {path} is not hexadecimal: it was not written by medvl") from None
        except ConfigError as error:
            raise ConfigError(f"the salt file {path} is damaged: {error}") from None

    @property
    def fingerprint(self) -> str:
        """8 hexadecimal characters that tell two salts apart and reveal neither."""
        return self._hash(b"fingerprint")[:8]

    def patient(self, patient_id: str | int) -> str:
        """The hash of a patient's id. Raises CorpusError when it is empty: all such patients would become one."""
        return self._hash(b"patient", patient_id)

    def study(self, patient_id: str | int, study_id: str | int) -> str:
        """The hash of a study of a patient. Hospitals number studies per patient, so both ids go in."""
        return self._hash(b"study", patient_id, study_id)

    def image(self, image_id: str | int) -> str:
        """The hash of an image's id: the key of its sample."""
        return self._hash(b"image", image_id)

    def _hash(self, kind: bytes, *ids: str | int) -> str:
        digest = hashlib.blake2b(key=self.salt, person=kind, digest_size=_ID_BYTES)
        for value in ids:
            text = str(value).strip().encode()
            if not text:
                raise CorpusError(f"an empty id of a {kind.decode()}: fill the column in, or leave the row out")
            digest.update(len(text).to_bytes(4, "big"))  # ("ab", "c") and ("a", "bc") must differ
            digest.update(text)
        return digest.hexdigest()


def default_salt_file() -> Path:
    """`$MEDVL_SALT_FILE`, or `~/.config/medvl/salt`."""
    named = os.environ.get("MEDVL_SALT_FILE")
    return Path(named) if named else Path.home() / ".config" / "medvl" / "salt"


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
        raise ConfigError(f"the salt file {path} cannot be created ({error.strerror}): set MEDVL_SALT_FILE") from None


_AGE = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*([DWMY]?)", re.IGNORECASE)
_UNITS_A_YEAR = {"D": 365.25, "W": 365.25 / 7, "M": 12.0, "Y": 1.0, "": 1.0}


def cap_age(age: str | float | None) -> int | None:
    """Whole years, 90 standing for 90 and above; None where there is no age.

    Takes years as a number or a text, and DICOM's age strings (`065Y`, `011M`, `003W`, `010D`). What is no age (None,
    NaN, negative, other text) gives None.
    """
    if age is None:
        return None
    if isinstance(age, str):
        match = _AGE.fullmatch(age.strip())
        if match is None:
            return None
        years = float(match[1]) / _UNITS_A_YEAR[match[2].upper()]
    else:
        years = float(age)
    if math.isnan(years) or years < 0:
        return None
    return int(min(years, OLDEST))


_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = re.compile(
    r"\b(?:\d{1,2}[/.-]\d{1,2}[/.-](?:\d{4}|\d{2})"  # 3/14/2015, 14.03.15
    r"|\d{4}[/-]\d{1,2}[/-]\d{1,2}"  # 2015-03-14
    rf"|{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+\d{{4}}"  # March 14, 2015
    rf"|\d{{1,2}}\s+{_MONTH},?\s+\d{{4}}"  # 14 March 2015
    rf"|{_MONTH},?\s+\d{{4}})\b",  # March 2015
    re.IGNORECASE,
)
_PHONE = re.compile(r"(?<![\w-])(?:\+?1[ .-]?)?(?:\(\d{3}\)\s*|\d{3}[ .-])\d{3}[ .-]\d{4}\b")
_EMAIL = re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,64}\.\w")
_NUMBER = re.compile(r"(?<![\w.])(?:MRN\W{0,3}\d{4,}|\d{6,})(?!\w|\.\d)", re.IGNORECASE)
_DOCTOR = re.compile(r"\b(?:Drs?|Doctor|Prof)\.?\s+(?!XXXX\b)[A-Z][A-Za-z'-]+")

_SCREENS: dict[str, re.Pattern[str]] = {
    "email": _EMAIL,
    "date": _DATE,
    "phone": _PHONE,
    "number": _NUMBER,
    "doctor": _DOCTOR,
}

_IDENTITY = re.compile(
    r"\b(?:patient(?: name| id.*)?$|name\b|m\.?r\.?n\b|record (?:number|no)\b|d\.?o\.?b\b|birth|accession|account|ssn\b"
    r"|social security|address|phone|physician|doctor|radiologist|attending|resident\b|referr|dictat|transcri"
    r"|sign(?:ed|ature)|(?:read|verified|interpreted|approved|electronically) )",
    re.IGNORECASE,
)


def names_a_person(header: str) -> bool:
    """Whether a report's section of this header says who the patient is, or who wrote it: `MRN`, `SIGNED BY`.

    Released corpora have such lines masked; a hospital's own reports begin and end with them.
    """
    return _IDENTITY.search(header) is not None


def find_identifiers(text: str) -> dict[str, int]:
    """How many likely identifiers a report still holds, by kind: email, date, phone, number (as long as a record
    number), doctor. Kinds that do not occur are absent.

    A screen for warnings, with misses and false alarms; it proves nothing. Masks (`___`, `XXXX`) are not counted.
    The text itself is never returned.
    """
    found: dict[str, int] = {}
    for kind, pattern in _SCREENS.items():
        text, count = pattern.subn(" ", text)  # what one screen has counted, the next must not count again
        if count:
            found[kind] = count
    return found
