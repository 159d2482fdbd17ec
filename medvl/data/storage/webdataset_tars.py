"""Tars that other projects wrote for webdataset (`.jpg .txt .json`, no manifest), grouped into
samples as it does.

They are given by path or address, with webdataset's braces: `pmc/{00000..00042}.tar`. Remote tars
are read as shards are, no command is run (`pipe:` is refused), and members that would fill the
memory (sparse files, extended headers of gigabytes, compressed tars) never reach Python's tarfile.
"""

import dataclasses
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from medvl.common.config_io import check_choice
from medvl.common.untrusted import decode_text, parse_json
from medvl.data.storage.location import Location, RemotePath, is_address, locate
from medvl.data.storage.store import map_threads
from medvl.errors import ConfigError, ShardError
from medvl.schema import FilePart

_MAX_TARS = 1_000_000
_MAX_MEMBER_BYTES = 256 * 2**20
_MAX_EXTENDED_BYTES = 2**20
_BLOCK = 512
_PLAIN = b"\x00057"
_EXTENDED = b"xgLK"
"""Types of members: files and folders; extended headers."""
_SHOWN = 8
_MAX_SUFFIXES = 1000
_HIDDEN = "hidden or without a suffix"
_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TarFields:
    """Names of the members of a sample."""

    image: str = "jpg;jpeg;png"
    """Suffixes of the image, in order of preference."""
    text: str = "txt;json:caption"
    """Suffixes of the text; json:NAME takes a field of the JSON."""
    key_end: Literal["first-dot", "last-dot"] = "first-dot"
    """Dot of a file name at which the key of the sample ends: the first one, as in webdataset, or
    the last one, for names such as 1.2.840.113.jpg.
    """

    where: tuple[str, ...] = ()
    """Conditions on fields of the JSON that samples meet, such as
    json:image_primary_label='Clinical Imaging': the field is the value, or a list with it. Values
    of one field are alternatives; all fields must fit.
    """

    def __post_init__(self) -> None:
        check_choice(self.key_end, ("first-dot", "last-dot"), "key_end")
        self.conditions()

    def conditions(self) -> dict[tuple[str, str], set[str]]:
        """Return (suffix, field) -> allowed values. Raises ConfigError for other forms."""
        values_of: dict[tuple[str, str], set[str]] = {}
        for condition in self.where:
            name, equals, value = condition.partition("=")
            suffix, colon, field = name.partition(":")
            if not (suffix and colon and field and equals):
                message = f"expected json:FIELD=VALUE, got {condition!r}"
                raise ConfigError(message, "malformed", field="where")
            values_of.setdefault((suffix.lower(), field), set()).add(value)
        return values_of

    def unmet(self, members: Mapping[str, Any]) -> str | None:
        """Return "FIELD=VALUE" of the first condition that a sample does not meet; None if it meets
        all. Raises ValueError where its JSON is damaged.
        """
        for (suffix, field), allowed in self.conditions().items():
            content = parse_json(members[suffix]) if suffix in members else None
            value = content.get(field) if isinstance(content, dict) else None
            values = [str(each) for each in (value if isinstance(value, list) else [value])]
            if not allowed & set(values):
                return f"{field}={'+'.join(values) if value is not None else 'missing'}"
        return None

    @property
    def text_suffixes(self) -> set[str]:
        """Suffixes of the members that may have the text."""
        return {name.partition(":")[0].lower() for name in self.text.split(";")}

    def split_name(self, name: str) -> tuple[str | None, str]:
        """Return key and suffix, in lower case, of a member's name; None for hidden files and
        names without a dot.
        """
        folder, slash, file = name.rpartition("/")
        first = file.find(".")
        last = file.rfind(".")
        if first < 1:
            return None, ""
        end = first if self.key_end == "first-dot" else last
        return f"{folder}{slash}{file[:end]}", file[end + 1 :].lower()

    @property
    def image_suffixes(self) -> list[str]:
        """Suffixes of the image, in order of preference."""
        return self.image.lower().split(";")

    def image_of(self, members: Mapping[str, Any]) -> Any:
        """Return the encoded image of a sample, or its place; None where it has none."""
        return next((members[name] for name in self.image_suffixes if name in members), None)

    def texts_of(self, members: Mapping[str, Any]) -> Iterator[str]:
        """Yield the texts of a sample in order of preference. Raises ValueError at one that
        cannot be read.
        """
        for name in self.text.split(";"):
            value = member_value(members, name)
            if value is not None:
                yield value

    def suffixes(self, *others: str | None) -> set[str]:
        """Return the suffixes of the members to read; `others` are further members or fields."""
        names = [*self.image.split(";"), *self.text.split(";"), *(name for name in others if name)]
        names += self.where
        return {name.partition(":")[0].lower() for name in names}


def member_value(members: Mapping[str, Any], name: str) -> str | None:
    """Return the text of a member, or of a field of its JSON (`json:NAME`). Raises ValueError
    where it is damaged.
    """
    suffix, _, field = name.partition(":")
    suffix = suffix.lower()
    if suffix not in members:
        return None
    if not field:
        return decode_text(members[suffix])
    content = parse_json(members[suffix])
    value = content.get(field) if isinstance(content, dict) else None
    if isinstance(value, list | dict):
        raise ValueError("a list or an object is not a text")
    return None if value is None else str(value)


def is_tar_pattern(location: object) -> bool:
    """Return whether a setting names tars rather than a folder of shards."""
    return str(location).endswith(".tar")


def expand_tars(patterns: Sequence[str | Path]) -> list[Location]:
    """Return the tars that patterns with braces name, in order.

    Raises ConfigError for commands (`pipe:`), other schemes, more than a million names, and none.
    """
    import braceexpand  # webdataset's own

    tars: list[Location] = []
    for pattern in map(str, patterns):
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:|.*::", pattern) and not is_address(pattern):
            message = (
                "expected tars by path or address (s3://, https://, ...); commands "
                "(pipe:) are never run"
            )
            raise ConfigError(message, "unsupported", field="tars")
        names = 1
        for first, last in _RANGE.findall(pattern):
            names *= max(1, int(last) - int(first) + 1)
        if names > _MAX_TARS:
            raise ConfigError(
                f"expected at most {_MAX_TARS} tars, got {names}", "too_large", field="tars"
            )
        tars += [locate(name) for name in braceexpand.braceexpand(pattern)]
    if not tars:
        raise ConfigError("expected one or more tars, got none", "missing", field="tars")
    return tars


@dataclasses.dataclass(slots=True)
class TarCounts:
    """Counts of the tars that were read."""

    samples: int = 0
    """Samples with at least one member, whatever its suffix."""
    unread: Counter[str] = dataclasses.field(default_factory=Counter)
    """Suffix -> number of members with it that no field names."""

    @property
    def nested(self) -> int:
        """Members that were not read with a suffix of several parts, such as the masks
        `a.seg.png` beside `a.jpg`.
        """
        return sum(count for suffix, count in self.unread.items() if "." in suffix)

    def __str__(self) -> str:
        """Return the most frequent suffixes that no field names."""
        shown = ", ".join(f"{count} {suffix}" for suffix, count in self.unread.most_common(_SHOWN))
        return f"members that were not read: {shown or 'none'}"


def read_tar(
    tar: Location,
    fields: TarFields,
    *others: str | None,
    counts: TarCounts | None = None,
    places: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar: `__key__`, and the bytes of each member by suffix, in lower case.

    The members of a sample follow each other, as webdataset requires. Key and suffix of a name are
    webdataset's, or as `fields.key_end` chooses. Hidden files, such as those of macOS (`._a.jpg`),
    and folders are ignored.

    Args:
        tar: path or address.
        fields: suffixes of image and text.
        others: further members or fields (`json:NAME`) to read.
        counts: counts that are added to.
        places: yield a `FilePart` in place of the bytes of an image.

    Raises:
        ShardError: the tar is missing, damaged or compressed, has a link or a member over 256 MiB,
            the members of a sample are apart, or a name has dots such that an image or a text would
            be missed.
        StorageError: a remote store cannot be reached.
    """
    counts = TarCounts() if counts is None else counts
    placed = fields.image_suffixes if places else ()
    try:
        with tar.open("rb") as stream:
            checked = _CheckedStream(stream, str(tar))
            source: Any = checked  # tarfile needs no more of it than `read`
            with tarfile.open(fileobj=source, mode="r|") as archive:
                suffixes = fields.suffixes(*others)
                yield from _group(archive, str(tar), fields, suffixes, placed, counts)
            checked.require_end()
    except FileNotFoundError:
        raise ShardError(f"{tar} does not exist", "not_found") from None
    except (tarfile.TarError, EOFError) as error:
        raise ShardError(
            f"{tar} is damaged or ends early ({type(error).__name__}); copy it again", "truncated"
        ) from None
    except OSError as error:
        raise ShardError(f"cannot read {tar} ({error.strerror})", "unreadable") from None


def _group(
    archive: Any,
    where: str,
    fields: TarFields,
    suffixes: set[str],
    placed: Sequence[str],
    counts: TarCounts,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of an open tar that have a member with one of the suffixes."""
    sample: dict[str, Any] = {}
    unread: list[str] = []
    seen: set[int] = set()
    for entry in archive:
        archive.members = []  # a tarfile.TarFile keeps all headers otherwise
        key, suffix = fields.split_name(entry.name)
        if not entry.isfile():
            continue
        if key is None:
            counts.unread[_HIDDEN] += 1
            continue
        if key != sample.get("__key__"):
            if sample:
                _check_names(where, fields, sample, unread)
                if len(sample) > 1:
                    yield sample
            if hash(key) in seen:
                advice = (
                    "repack it with sorted names (tar --sort=name), and give each sample "
                    "another name"
                )
                state = (
                    f"the members of sample {key!r} are not next to each other, or two "
                    f"samples have this name"
                )
                raise ShardError(f"{where}: {state}; {advice}", "conflict", field="key")
            seen.add(hash(key))
            counts.samples += 1
            sample = {"__key__": key}
            unread = []
        if suffix not in suffixes:
            counts.unread[suffix if len(counts.unread) < _MAX_SUFFIXES else "..."] += 1
            unread.append(suffix)
            continue
        if suffix in sample:
            raise ShardError(
                f"{where} has two members {key}.{suffix}; repack it without one", "malformed"
            )
        if suffix in placed:
            name = "".join(letter if letter.isprintable() else "?" for letter in entry.name)
            sample[suffix] = FilePart(where, f"member {name}", entry.offset_data, entry.size)
        else:
            sample[suffix] = archive.extractfile(entry).read()
    if sample:
        _check_names(where, fields, sample, unread)
        if len(sample) > 1:
            yield sample


def _check_names(
    where: str, fields: TarFields, sample: Mapping[str, Any], unread: Sequence[str]
) -> None:
    """Raise ShardError where a member that is not read is probably the image or text of a sample
    with dots in its key.

    webdataset ends a key at the first dot: `1.2.840.jpg` is the member `2.840.jpg` of a sample `1`.
    """
    parts = [tuple(suffix.rpartition(".")[::2]) for suffix in unread if "." in suffix]
    images = {middle for middle, last in parts if last in fields.image.lower().split(";")}
    texts = {middle for middle, last in parts if last in fields.text.lower().split(";")}
    missed = (images & texts) | {
        middle for middle in images | texts if middle.replace(".", "").isdecimal()
    }
    if fields.image_of(sample) is None:
        missed |= images
    if not fields.text_suffixes & sample.keys():
        missed |= texts
    if missed:
        middle = min(missed)
        suffix = next(suffix for suffix in unread if suffix.rpartition(".")[0] == middle)
        name = f"{sample['__key__']}.{suffix}"
        state = (
            f"{where}: {name!r} has several dots: its key is {sample['__key__']!r}, its "
            f"suffix {suffix!r}"
        )
        advice = (
            "use --key-end last-dot (in training --data.fields.key-end) if the dots belong "
            "to the key"
        )
        advice = f"{advice}; else name the suffix for the image or the text"
        raise ShardError(f"{state}; {advice}", "conflict", field="key_end")


class _CheckedStream:
    """Stream of a tar file that checks every header before tarfile sees it."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self._stream = stream
        self._where = where
        # bytes until the next header; the part of it that was seen
        self._content = 0
        self._header = b""
        self._extended: bytearray | None = None
        self._ended = False

    def require_end(self) -> None:
        """Raise ShardError unless the end of the archive was read: tarfile accepts a tar that
        ends after any member.
        """
        if not self._ended:
            raise self._refused("it ends early; copy it again", "truncated")

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes of the tar file. Raises ShardError when a header among them
        is not allowed.
        """
        data = self._stream.read(size)
        place = 0
        while place < len(data):
            if self._content:
                step = min(self._content, len(data) - place)
                if self._extended is not None:
                    self._extended += data[place : place + step]
                self._content -= step
            else:
                if self._extended is not None:
                    self._check_extended()
                step = min(_BLOCK - len(self._header), len(data) - place)
                self._header += data[place : place + step]
                if len(self._header) == _BLOCK:
                    self._check_header()
                    self._header = b""
            place += step
        return data

    def _check_header(self) -> None:
        if not self._header.strip(b"\0"):
            self._ended = True
            return
        kind = self._header[156:157]
        digits = self._header[124:136].strip(b"\0 ")
        if not re.fullmatch(rb"[0-7]{1,12}", digits):
            raise self._refused(
                "its header is damaged, or it is compressed: unpack it first", "malformed"
            )
        size = int(digits, 8)
        if kind in b"12":
            advice = "repack it with tar --dereference --hard-dereference"
            raise self._refused(f"a member is a link; {advice}", "unsupported")
        if kind not in _PLAIN and kind not in _EXTENDED:
            raise self._refused("a member is not a regular file", "unsupported")
        if size > (_MAX_EXTENDED_BYTES if kind in _EXTENDED else _MAX_MEMBER_BYTES):
            raise self._refused(f"a member of {size} bytes is over the limit", "too_large")
        self._content = -(-size // _BLOCK) * _BLOCK if kind != b"5" else 0
        self._extended = bytearray() if kind in b"xg" else None

    def _check_extended(self) -> None:
        assert self._extended is not None
        if b"GNU.sparse" in self._extended or re.search(rb"(?:^|\n)[0-9]+ size=", self._extended):
            raise self._refused(
                "a member is a sparse file, or its size is hidden in an extended header",
                "unsupported",
            )
        self._extended = None

    def _refused(self, problem: str, code: str) -> ShardError:
        return ShardError(f"{self._where}: {problem}", code)


def describe_tars(tars: Sequence[Location]) -> str:
    """Return the first and the last of some tars, for messages."""
    return str(tars[0]) if len(tars) == 1 else f"{tars[0]} ... {tars[-1]} ({len(tars)} tars)"


def check_tars(tars: Sequence[Location]) -> None:
    """Raise ShardError where a tar does not exist, StorageError where a store cannot be reached."""

    def exists(tar: Location) -> bool:
        return tar.exists()

    is_remote = any(isinstance(tar, RemotePath) for tar in tars)
    for tar, is_there in zip(
        tars, map_threads(exists, tars) if is_remote else map(exists, tars), strict=True
    ):
        if not is_there:
            raise ShardError(f"{tar} does not exist", "not_found")
