"""Removal of identifiers from texts, tables and pixels, and a screen for those that stay."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import SupportsFloat

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.common.untrusted import read_file
from medvl.errors import ConfigError, CorpusError

# Screen for identifiers in report texts: names, dates, numbers, addresses, places, ages over 89.
#
# A screen for warnings, with misses and false alarms: it finds the forms in which people write
# identifiers (`Mr. Smith`, `14-Mar-2015`), not the names themselves. Eponyms (`Kerley B`,
# `Swan-Ganz`), vertebrae, sizes and fractions are none. All patterns have bounded repetitions, so
# that the time is linear in the length of the text.

CODES = frozenset(
    {"cuis", "label_cuis", "localization_cuis", "masks", "prior", "generator", "kind"}
)
"""Extra fields of the converters that hold no free text."""

_MASK = re.compile(r"X{3,}|_{2,}")
_BETWEEN = r"[\s\-–]{1,3}"

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_MONTHS_IN_CAPITALS = (
    r"(?:Jan(?:uary)?|JAN(?:UARY)?|Feb(?:ruary)?|FEB(?:RUARY)?|Mar(?:ch)?|MAR(?:CH)?|Apr(?:il)?"
    r"|APR(?:IL)?|May|MAY|June?|JUNE?|July?|JULY?|Aug(?:ust)?|AUG(?:UST)?|Sept?(?:ember)?"
    r"|SEPT?(?:EMBER)?|Oct(?:ober)?|OCT(?:OBER)?|Nov(?:ember)?|NOV(?:EMBER)?|Dec(?:ember)?"
    r"|DEC(?:EMBER)?)"
)
_DATES = (
    # 3/14/2015, 14.03.15
    r"(?<![\d.])\b\d{1,2}(?P<between>[/.-])\d{1,2}(?P=between)(?:\d{4}|\d{2})(?!\.?\d)\b",
    r"\b\d{4}[/.-]\d{1,2}[/.-]\d{1,2}(?!\d)",  # 2015-03-14
    r"\b(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:\d{4,6})?\b",  # 20150314
    rf"(?i:\b{_MONTH}\.?,?[\s\-/]{{1,3}}\d{{1,2}}(?:st|nd|rd|th)?,?[\s\-/]{{1,3}}(?:\d{{4}}"
    rf"|'?\d{{2}})\b)",
    rf"(?i:\b{_DAY}(?:st|nd|rd|th)?(?:\s+of)?[\s\-/.]{{0,3}}{_MONTH}\.?,?[\s\-/]{{0,3}}(?:(?:19"
    rf"|20)\d{{2}}|'\d{{2}})\b)",
    rf"(?i:\b{_DAY}[\-/]{_MONTH}[\-/]\d{{2}}\b)",
    rf"(?i:\b{_MONTH}\.?,?(?:\s+of)?[\s\-/]{{1,3}}(?:(?:19|20)\d{{2}}|'\d{{2}})\b)",  # March 2015
    # March 14th
    rf"\b{_MONTHS_IN_CAPITALS}\.?\s+{_DAY}(?:st|nd|rd|th)?\b(?!\s*(?:mm|cm|MM|CM|x\b|%))",
    rf"\b{_DAY}(?:st|nd|rd|th)?(?:\s+of)?[\s\-]+{_MONTHS_IN_CAPITALS}\b",  # 14th of March
    r"(?<![\d/.\w])(?:0?[1-9]|1[0-2])/(?:19|20)\d{2}\b",  # 03/2015
    r"(?<![\d/.\w])(?:0?[1-9]|1[0-2])/(?:1[3-9]|2\d|3[01])(?![\d/.%]|\s*(?:inch|in\b|\"))",  # 3/14
    r"(?<![\d/.\w])(?:0[1-9]/[0-3]\d|[01]\d/0[1-9])(?![\d/%])",  # 03/04
    r"(?i:\b(?:on|since|dated|from|until)\s+\d{1,2}[/-]\d{1,2}(?![\d/.%-])(?!\s*(?:mm|cm|of|views?"
    r"|images?|lobes?|ribs?)\b))",
)
_PHONES = (
    r"(?<![\w-])(?:\+?1[ .-]?)?(?:\(\d{3}\)\s{0,2}|\d{3}[ .-])\d{3}[ .-]\d{4}\b",
    r"(?<!\w)\+\d{1,3}(?:[ .-]?\(?\d{1,4}\)?){2,5}\b",
    r"(?<![\w-])0\d{2,4}[ -]\d{3,4}[ -]?\d{3,4}\b",
    r"(?<![\w.-])[2-9]\d{2}-\d{4}(?![\w-])",
    r"(?i:\b(?:pager|beeper|bleep|tel|telephone|phone|fax|mobile|cell|ext"
    r"|extension)\b\.?(?:\s*(?:no|number|id))?[\s:.#]{0,4}"
    r"\d[\d .-]{2,15}\d)",
    r"(?<![\w.]\s)(?<![\w.])x\d{4,5}\b",
)
_IDS = r"(?=[\w-]{0,20}\d)[\w-]{3,30}"
_NUMBERS = (
    r"(?<![\w-])\d{3}[- ]\d{2}[- ]\d{4}(?![\w-])",  # SSN
    r"(?i:\b(?:MRN|medical record|med "
    r"rec|accession|account|acct|CSN|DEA|NPI|serial|S/?N:?|VIN|passport|chart|SSN"
    r"|social security|hosp|acc|policy|license|licence|encounter|NHS|hospital|unit "
    r"record|member|insurance|specimen|UID"
    r"|barcode|MR#)"
    rf"(?:\s{{1,3}}(?:number|num|no|nr|id|ID))?[\s:.#=]{{0,4}}(?=[\w-]{{0,20}}\d\d){_IDS})",
    r"(?i:\b(?:record|patient|pt|study|exam|case|order|visit|device|lot|ref|reference|film|x-?ray"
    r"|request|file|id)"
    rf"\s{{0,3}}(?:(?:number|num|no|nr|id)\b[\s:.#=]{{0,4}}|#[\s:]{{0,3}}"
    rf"|:\s{{0,3}})(?=[\w-]{{0,20}}\d\d\d){_IDS})",
    r"(?<![\w.])\d{1,10}(?:\.\d{1,25}){5,}",  # UID
    r"(?<![\w.])\d{6,}(?!\w|\.\d)",
    r"\b[A-Z]{1,4}-?\d{5,12}\b",
    r"\b[A-Z]{1,4}-?\d{2,4}-\d{3,10}\b",
)
_HIGH_AGE = (
    r"(?i:(?<![\d.])(?:9\d|1[01]\d)[\s-]{0,2}(?:years?|yrs?|y)[\s./-]{0,2}(?:old|o\b|of age))",
    r"(?i:\b(?:age|aged)(?:\s+of)?[\s:]{0,3}(?:9\d|1[01]\d)\b)",
    r"(?<![\d.])(?:9\d|10\d)\s?(?:[MF]|yo|YO|y/o)\b(?!\s*(?:Hz|r))",
    r"(?i:\bninety(?:[ -]\w{3,5})?[ -](?:years?|yrs?)\b)",
)
_NAME = r"(?!The\b|THE\b)[A-Z][\w'’-]{1,30}"
_TITLE = r"(?!The\b)[A-Z][a-z'’-]{1,30}"
_DOCTORS = (
    rf"\b(?:Drs?|DRS?|dr|Doctor|doctor|Prof|Professor)\b(?:\.\s{{0,3}}"
    rf"|\s{{1,3}})(?:[A-Z]\.?\s{{1,2}})?{_NAME}",
)
_CREDENTIALS = (
    r"(?:M\.?D\.?|D\.?O\.?|Ph\.?D\.?|MBBS|MBBCh|FRCR|FRCPC|FACR|R\.?N\.?|PA-C|NP|APRN|CRNP|RT)"
)
_NOT_NAMES = (
    r"(?!(?:Chest|CHEST|Abdomen|ABDOMEN|Ordering|Referring|Attending|Reading|Requesting|Primary"
    r"|ORDERING|REFERRING|ATTENDING|The|THE|Treating|Covering|Responsible)\b)"
)
_TEAMS = (
    r"(?!\w{2,30}\s{1,2}(?:Department|Team|Radiolog|Medicine|Service|Surg|Unit|Room|Cent|Care"
    r"|Physician|Staff|Nurs)|Radiolog|Chest|Clinical|Interventional|Emergency|Primary|Nursing"
    r"|Surgery|Medicine|History|Prior|Patient)"
)
_ROLES = (
    r"(?:nurse|resident|intern|technologist|attending|radiologist|physician|surgeon|clinician"
    r"|practitioner|oncologist|cardiologist)"
)
_NAMES = (
    rf"\b(?:Mr|Mrs|MRS|Ms|Miss|Mx|Herr|Frau|Mme|Senor|Señora?)\b(?:\.\s{{0,3}}"
    rf"|\s{{1,3}})(?:[A-Z]\.?\s{{1,2}})?{_NAME}",
    r"\bMR\.\s{1,3}[A-Z][\w'’-]{1,30}",
    r"\b[A-Z][\w'-]{1,30}\^[A-Z][\w'-]{0,30}",  # SMITH^JOHN
    rf"\b{_NOT_NAMES}{_NAME}(?:\s{{1,2}}[A-Z]\.?)?"
    rf"(?:\s{{1,2}}{_NAME}){{0,2}},\s{{0,3}}{_CREDENTIALS}(?![\w])",
    rf"\b{_NOT_NAMES}{_TITLE}\s{{1,2}}"
    rf"(?:[A-Z]\.?\s{{1,2}})?{_NOT_NAMES}{_TITLE}\s{{1,2}}{_CREDENTIALS}(?![\w])",
    r"(?i:\b(?:dictated|transcribed|signed|read|reported|interpreted|verified|approved"
    r"|authenticated|typed|attending|radiologist|resident|technologist|physician|name|author|reader"
    r"|signature|provider|initials|tech)"
    r"(?:\s{1,3}(?:by|physician|radiologist|of record|name))?"
    r"\s{0,2}:\s{0,3}[A-Za-z])",
    r"(?<!\w)/[Ss]/\s{0,3}[A-Z]",
    r"\b[Pp]t\s{0,2}:\s{0,3}[A-Z][a-z]",
    r"(?i:\b[a-z'-]{2,30}\s{1,2}[a-z'-]{2,30},\s{0,2}M\.?D\b)",
    rf"\b{_NOT_NAMES}(?!NOTIFIED|CALL)[A-Z]{{2,30}}\s{{1,2}}{_NOT_NAMES}"
    rf"[A-Z]{{2,30}}\s{{1,2}}M\.?D\b",
    r"(?im:^\s{0,10}cc\s{0,2}:\s{0,3}[A-Za-z])",
    rf"(?:[Dd]ictated|[Tt]ranscribed|[Ss]igned|[Rr]ead|[Rr]eported|[Ii]nterpreted|[Rr]eviewed"
    rf"|[Vv]erified|[Aa]pproved|[Tt]yped|[Pp]erformed|[Oo]rdered|[Rr]equested|[Rr]eferred"
    rf"|[Aa]uthenticated|[Dd]iscussed|[Cc]ommunicated|[Cc]onveyed|[Tt]elephoned|[Rr]elayed|[Ss]poke"
    rf"|[Cc]alled|[Nn]otified)\s{{1,3}}(?:in "
    rf"person\s{{1,2}}|electronically\s{{1,2}})?"
    r"(?:(?:by|with|to)\s{1,3})"
    rf"(?:(?:[A-Z]\.\s{{0,2}}){{1,2}}{_TITLE}|{_NOT_NAMES}{_TEAMS}{_TITLE}\s{{1,2}}"
    rf"(?:[A-Z]\.?\s{{1,2}})?{_TITLE})",
    rf"(?:[Ss]een|[Rr]eviewed|[Ii]nterpreted|[Rr]ead|[Rr]eported|[Aa]pproved"
    rf"|[Vv]erified)\s{{1,2}}by\s{{1,2}}{_TEAMS}{_TITLE}",
    r"(?:(?:[Dd]ictated|[Tt]ranscribed|[Ss]igned|[Tt]yped)\s{1,2}by\s{1,2}[A-Z][\w'’-]{1,30})",
    rf"\b{_ROLES}\s{{1,2}}(?!Radiolog|Physician|Surgeon|Nurse|(?:Drs?|Mrs?"
    rf"|Ms)\b){_TITLE}(?:\s{{1,2}}{_TITLE})?",
    rf"\b(?:RN|NP)\s{{1,2}}{_TITLE}",
    rf"\b(?:[Pp]atient|[Pp]t)\.?,?\s{{1,2}}(?:name\s{{1,2}}is\s{{1,2}})?{_TITLE}\s{{1,2}}{_TITLE}",
    rf"\b(?:wife|husband|mother|father|daughter|son|sister|brother|spouse"
    rf"|partner),?\s{{1,2}}(?:named\s{{1,2}})?{_TITLE}",
    r"(?m:^\s{0,10}(?!(?:Chest|CHEST|Abdomen|Portable|Upright|Frontal"
    r"|Ribs?)\b)[A-Z][A-Za-z'’-]{1,30},\s{1,2}[A-Z][A-Za-z'’-]{1,30}"
    r"(?:\s{1,2}[A-Z]\.?)?\s{0,3}$)",  # Smith, John
    r"(?<![\w/])(?!PA|AP|LL|RL|LAT)[A-Z]{2,3}[/:][a-zA-Z]{2,3}\s{0,3}\Z",  # JS/ab
)
_ROAD = (
    r"(?:Street|St|Avenue|Ave|Road|Rd|Boulevard|Blvd|Lane|Ln|Drive|Dr|Court|Ct|Way|Place|Pl|Square"
    r"|Sq|Terrace|Highway|Hwy|Parkway|Pkwy|Circle|STREET|AVENUE|ROAD|DRIVE|LANE|BOULEVARD|Close"
    r"|Crescent)"
)
_ADDRESSES = (
    rf"\b\d{{1,5}}[A-Za-z]?,?\s{{1,2}}(?:[NSEW]\.?\s{{1,2}})?"
    rf"(?:[A-Z0-9][\w'’-]{{0,30}}\.?\s{{1,2}}){{1,3}}{_ROAD}\b",
    r"(?i:\bP\.?\s?O\.?\s{0,2}Box\s{1,2}\d+)",
    r"(?i:\b(?:apt|apartment|suite|ste)\b\.?\s{0,2}#?\s{0,1}\d{1,5}[A-Z]?\b)",
    r"\b[A-Z]{2},?\s{1,2}\d{5}(?:-\d{4})?\b",
    r"\b\d{5}-\d{4}\b",
    r"(?i:\b(?:zip|zip ?code|postcode|postal code)[\s:]{0,3}(?=\w{0,3}\d)[\w-]{4,10})",
    r"\b[A-Z]{1,2}\d[A-Z\d]?\s\d[ABD-HJLNP-UW-Z]{2}\b",
    rf"(?i:\b(?:lives|living|resides|residing|resident)\s(?:in|at|of))\s{_TITLE}",
)
_PLACE_END = (
    r"(?:Hospital|HOSPITAL|Medical Cent(?:er|re)|MEDICAL CENTER|Infirmary|Health "
    r"Cent(?:er|re)|Healthcare|Health System"
    r"|Nursing Home|Hospice|Clinic|Rehabilitation Cent(?:er|re)|Surgery Center|Imaging "
    r"Center|Radiology Associates)"
)
_PLACES = (
    rf"\b(?!(?:The|This|Our|Outside|Local|In|At|Same|Another|Previous"
    rf"|Prior)\s{{1,2}}{_PLACE_END})(?:[A-Z][\w'’.&-]{{1,30}}\s{{1,2}}"
    rf"(?:of\s{{1,2}})?){{1,4}}{_PLACE_END}\b",
    r"(?i:\b(?:ward|room|rm|floor|bed|bay)\b[\s.:#]{0,3}(?:number"
    r"|no\.)?\s{0,2}(?=[A-Z]?-?\d)[A-Z]?-?\d{1,5}[A-Z]?\b(?!\s*(?:cm|mm)))",
    rf"(?i:\b(?:transferred|referred|admitted)\s(?:from|to))\s{_TITLE}(?=\s{_TITLE}|[.,])",
    rf"\b(?:{_TITLE}\s{{1,2}}){{1,2}}(?:Ward|Pavilion|Wing|Unit)\b",
    r"\b(?:Ward|Pavilion|Wing)\s{1,2}[A-Z][a-z]{2,30}\b",
    r"\bUniversity of [A-Z][a-z]{1,30}\b",
)
_EMAILS = (r"\b[\w.+-]{1,64}@[\w-]{1,64}\.\w",)
_URLS = (
    r"(?i:\b(?:https?://|ftp://|www\.)[^\s]{1,300})",
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)",
)

_SCREENS = {
    kind: re.compile("|".join(patterns))
    for kind, patterns in {
        "email": _EMAILS,
        "url": _URLS,
        "date": _DATES,
        "phone": _PHONES,
        "age": _HIGH_AGE,
        "number": _NUMBERS,
        "doctor": _DOCTORS,
        "name": _NAMES,
        "place": _PLACES,
        "address": _ADDRESSES,
    }.items()
}


def find_identifiers(text: str) -> dict[str, int]:
    """Count likely identifiers in a text by kind.

    Kinds: email, url (also IP addresses), date (more precise than a year), phone, age (above 89),
    number (of a record, an account, a device), doctor, name, place (hospital, ward, room) and
    address. Masks (`___`, `XXXX`) are not counted. Kinds that do not occur are absent, and the text
    itself is never returned.
    """
    text = _MASK.sub("___", text)
    counts: dict[str, int] = {}
    for kind, pattern in _SCREENS.items():
        text, count = pattern.subn(" ", text)  # do not count a match again as another kind
        if count:
            counts[kind] = count
    return counts


_HASH = re.compile(r"[0-9a-f]{20}")


def free_texts(value: object) -> Iterator[str]:
    """Yield the texts and whole numbers in the extra fields of a sample that may have identifiers.

    Fields of medvl's own converters with codes (`CODES`) are left out: hashes, concept ids and
    masks look like numbers of records. So are 20 hexadecimal digits, a hash wherever it is: one in
    12,000 has digits alone, and numbers of records are shorter (16 characters in DICOM).
    """
    if isinstance(value, str):
        if not _HASH.fullmatch(value):
            yield value
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name not in CODES:
                yield from free_texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from free_texts(part)


# De-identification: salted hashes of ids, capped ages, and headers of report sections that name a
# person.
#
# With the salt and a list of patient ids, hashes could be matched to patients. Therefore the salt
# is in a separate file (`default_salt_file`) with mode 0600, never next to the shards; the shards
# contain only its fingerprint, which shows whether two corpora were hashed with the same salt.

_ID_BYTES = 10  # 20 hex characters: two of a million ids collide with a probability of about 4e-13
_SALT_BYTES = 32
_MAX_SALT_FILE = 4096
_MIN_SALT_BYTES = 16
_MAX_SALT_BYTES = hashlib.blake2b.MAX_KEY_SIZE

_log = logging.getLogger(__name__)

MAX_AGE = 90
"""Ages of 90 and above are one group, as HIPAA's Safe Harbor requires (45 CFR
164.514(b)(2)(i)(C)).
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Deidentifier:
    """Hashes ids with keyed BLAKE2b to 20 hexadecimal characters, which cannot be inverted without
    the salt.

    Each kind of id is hashed separately: patient 7 and image 7 have unrelated hashes. White space
    around an id is ignored (DICOM pads with it), and 7 is the same id as "7".
    """

    salt: bytes = dataclasses.field(repr=False)
    """16 to 64 random bytes, not shown in `repr`."""

    def __post_init__(self) -> None:
        if not _MIN_SALT_BYTES <= len(self.salt) <= _MAX_SALT_BYTES:
            expected = f"{_MIN_SALT_BYTES} to {_MAX_SALT_BYTES} bytes"
            raise ConfigError(
                f"salt must have {expected}, got {len(self.salt)}", "out_of_range", field="salt"
            )

    @classmethod
    def from_file(cls, path: Path | str, *, create: bool = False) -> "Deidentifier":
        """Return a de-identifier with the hexadecimal salt in a file.

        With `create`, a missing file is created atomically with 32 random bytes, readable by its
        owner only. Processes that create it at the same time get the same salt.

        A warning names the mode of a file that other users can read: with it, ids can be guessed
        from their hashes.

        Raises ConfigError when the file is missing, no regular file, not hexadecimal, or too short.
        """
        path = Path(path)
        if create and not path.exists():
            _create_salt(path)
        try:
            content = read_file(path, _MAX_SALT_FILE, ConfigError)
        except FileNotFoundError:
            advice = (
                "set MEDVL_SALT_FILE to the salt of this data, or let the first conversion "
                "create one"
            )
            raise ConfigError(
                f"the salt file {path} does not exist: {advice}", "not_found"
            ) from None
        except ConfigError as error:
            raise error.prefixed("the salt file cannot be read: ") from None
        _warn_of_mode(path)
        try:
            return cls(bytes.fromhex(content.decode("ascii").strip()))
        except ValueError:  # from bytes.fromhex and the decoder, whose messages quote the salt
            raise ConfigError(
                f"the salt file {path} is not hexadecimal: not written by medvl", "malformed"
            ) from None
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
        """Return the hash of a study. Some hospitals number studies per patient, so both ids are
        hashed.
        """
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
                raise CorpusError(
                    f"a {kind.decode()} id has half of a surrogate pair", "malformed"
                ) from None
            if not text:
                raise CorpusError(
                    f"empty {kind.decode()} id: fill in the column, or remove the row", "missing"
                )
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
            "the salt file %s has the mode %04o: other users can guess ids from hashes "
            "with it; run chmod 600 on it"
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
                # unlike a rename, this does not replace the salt of another process
                os.link(partial, path)
        finally:
            Path(partial).unlink()
    except OSError as error:
        message = f"the salt file {path} cannot be created ({error.strerror}): set MEDVL_SALT_FILE"
        raise ConfigError(message, "unreadable") from None


_AGE = re.compile(r"(\d{1,3}(?:[.,]\d+)?)\s*([DWMY]?)", re.IGNORECASE)
_UNITS_PER_YEAR = {"D": 365.25, "W": 365.25 / 7, "M": 12.0, "Y": 1.0, "": 1.0}


def cap_age(age: object) -> int | None:
    """Return whole years, where 90 means 90 and above.

    Accepts years as a number or text, and DICOM's age strings (`065Y`, `011M`, `003W`, `010D`).
    Returns None for anything else (None, NaN, negative, other text, lists).
    """
    if isinstance(age, str):
        match = _AGE.fullmatch(age.strip())
        years = (
            float(match[1].replace(",", ".")) / _UNITS_PER_YEAR[match[2].upper()]
            if match
            else math.nan
        )
    else:
        years = _to_float(age)
    return int(min(years, MAX_AGE)) if years >= 0 else None  # NaN is not


def _to_float(value: object) -> float:
    """Return a number of any type as float; NaN for other values."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    return math.nan


_IDENTITY = re.compile(
    r"\b(?:patient(?: name| id.*)?$|name\b|m\.?r\.?n\b|record "
    r"(?:number|no)\b|d\.?o\.?b\b|birth|accession|account|ssn\b"
    r"|social "
    r"security|address|phone|physician|doctor|radiologist|attending|resident\b|referr|dictat"
    r"|transcri|sign(?:ed|ature)|(?:read|verified|interpreted|approved|electronically) |(?:reported"
    r"|reviewed|typed) by\b)",
    re.IGNORECASE,
)


_LEADING = re.compile(
    r"(?:(?:date|of|medical|report|final|hospital|ordering|requesting|primary "
    r"care|digitally|patient'?s?|pt) )*",
    re.IGNORECASE,
)


def is_identifying_header(header: str, *, at_start: bool = False) -> bool:
    """Return whether a section with this header identifies the patient or the author: `MRN`,
    `SIGNED BY`.

    Released corpora have such lines masked; a hospital's own reports begin and end with them. With
    `at_start`, the header must begin with an identifying word (`Date of birth`, `Signed by`), as
    for headers that are not in capitals.
    """
    if not at_start:
        return _IDENTITY.search(header) is not None
    leading = _LEADING.match(header)
    starts = (0, leading.end() if leading else 0)
    return any(_IDENTITY.match(header, start) for start in starts)


# Screen for burned-in text: names and dates that a scanner or workstation has written over an
# image.
#
# A burned-in letter is a small, sharp patch of the brightest shade, and text is a line of many
# letters. Markers of the technologist (L, R, PA, SUPINE) are text too, but short. Only the upper
# and lower quarter are searched, where scanners write.

_LONGEST_SIDE = 1536
"""Larger images are reduced to about this size, at which readable text is preserved."""
_BAND = 0.25
_MIN_LETTERS = 9
"""Least number of letters of a line; `PORTABLE` has eight."""
_HEIGHTS = (6, 64)


def has_burned_in_text(image: NDArray[np.uint8]) -> bool:
    """Return whether the upper or lower quarter of an image has a line of at least nine letters.

    A screen for warnings, with misses (dark text on white, handwriting) and false alarms. Images
    are (H, W) or (H, W, C); the brightest channel of each pixel is used.
    """
    image_HW = image if image.ndim == 2 else image.max(axis=2)
    height = int(len(image_HW) * _BAND)
    factor = max(1, round(max(image_HW.shape) / _LONGEST_SIDE))
    bands = (image_HW[:height], image_HW[-height:]) if height >= factor else ()
    return any(_longest_line(_letters(_reduce(band, factor))) >= _MIN_LETTERS for band in bands)


def _reduce(band_HW: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Reduce by an integer factor, which takes a tenth of the time of other factors."""
    if factor == 1:
        return band_HW
    height, width = (side // factor for side in band_HW.shape)
    cropped = band_HW[: height * factor, : width * factor]
    return np.asarray(cv2.resize(cropped, (width, height), interpolation=cv2.INTER_AREA), np.uint8)


def _letters(band_HW: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return (N, 4) left, top, width, height of bright patches of letter size, from left to
    right.
    """
    bright_HW = (band_HW >= 224).view(np.uint8)
    # There are at most as many patches as bright pixels; 16-bit labels take half the time.
    numbers = cv2.CV_16U if np.count_nonzero(bright_HW) < 1 << 16 else cv2.CV_32S
    _, _, stats, _ = cv2.connectedComponentsWithStats(bright_HW, connectivity=8, ltype=numbers)
    width = stats[1:, cv2.CC_STAT_WIDTH]
    height = stats[1:, cv2.CC_STAT_HEIGHT]
    area = stats[1:, cv2.CC_STAT_AREA]
    fits = (
        (height >= _HEIGHTS[0])
        & (height <= _HEIGHTS[1])
        & (width <= 1.5 * height)
        & (area >= 0.12 * width * height)
    )
    boxes = stats[1:, :4][fits].astype(np.int32)
    return boxes[np.argsort(boxes[:, 0], kind="stable")]


def _longest_line(boxes: NDArray[np.int32]) -> int:
    """Return the letters of the longest line: of similar height, on one baseline, and close to
    each other.
    """
    length = np.ones(len(boxes), int)
    for i, (x, y, width, height) in enumerate(boxes):
        near = boxes[i + 1 : i + 64]
        follows = (
            (np.abs(near[:, 1] + near[:, 3] - y - height) <= 0.3 * height)
            & (np.abs(near[:, 3] - height) <= 0.5 * height)
            & (near[:, 0] - x - width <= 1.8 * height)
            & (near[:, 0] - x >= 0.5 * width)
        )
        later = np.flatnonzero(follows) + i + 1
        length[later] = np.maximum(length[later], length[i] + 1)
    return int(length.max(initial=0))
