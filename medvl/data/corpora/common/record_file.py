"""Records of a corpus in a temporary file, so that planning and conversion use constant memory
per corpus.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, overload

from medvl.data.corpora.common.tables import Record
from medvl.data.volumes.options import VolumeFile
from medvl.errors import CorpusError
from medvl.schema import FilePart, PackedPage, Sample

_FIELDS = tuple(field.name for field in dataclasses.fields(Sample) if field.name != "image")


class Records(Sequence[Record]):
    """Records in the order in which they were added; eight bytes of memory per record.

    They are stored in an unnamed file of the temporary folder ($TMPDIR), which the operating system
    removes with the process. `Sample.extra` must contain JSON values only; records read back equal
    those added.

    Raises CorpusError when the temporary folder cannot hold them.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._file = _unnamed_file()
        self._ends = array("q", [0])
        self._flushed = 0
        for record in records:
            self.append(record)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            with contextlib.suppress(OSError):  # a full disk was reported when the record was added
                self._file.close()

    def append(self, record: Record) -> None:
        """Add a record at the end."""
        line = _to_json(record)
        with _storage_errors():
            self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]  # resolves negative indices, or raises IndexError
        start = self._ends[number]
        end = self._ends[number + 1]
        if end > self._flushed:
            with _storage_errors():
                self._file.flush()
            self._flushed = self._ends[-1]
        return _from_json(os.pread(self._file.fileno(), end - start, start))


def _unnamed_file() -> IO[bytes]:
    with _storage_errors():
        return tempfile.TemporaryFile()


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "free some space there, or set $TMPDIR to another folder"
        folder = tempfile.gettempdir()
        raise CorpusError(
            f"{folder} cannot hold the plan ({error.strerror}): {advice}", "unreadable"
        ) from error


def _to_json(record: Record) -> bytes:
    """Encode a record; sections keep their order."""
    values = {
        name: value for name in _FIELDS if (value := getattr(record.sample, name)) not in (None, {})
    }
    image = record.sample.image
    place = dataclasses.astuple(image) if isinstance(image, FilePart) else _text(image)
    masks = {label: str(path) for label, path in record.masks.items()}
    volume = None if record.volume is None else dataclasses.asdict(record.volume)
    content = [values, place, _text(record.report), masks, volume]
    return json.dumps(content, separators=(",", ":")).encode()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _from_json(data: bytes) -> Record:
    values, place, report, masks, volume = json.loads(data)
    image: Path | FilePart | None = Path(place) if isinstance(place, str) else None
    if isinstance(place, list):
        file, name, offset, size, page = place
        image = FilePart(file, name, offset, size, None if page is None else PackedPage(*page))
    sample = Sample(**values, image=image)
    return Record(
        sample,
        None if report is None else Path(report),
        {label: Path(masks[label]) for label in masks},
        None if volume is None else _volume_file(volume),
    )


def _volume_file(values: dict[str, Any]) -> VolumeFile:
    sides = {
        name: tuple(values[name]) for name in ("spacing", "rescale") if values[name] is not None
    }
    return VolumeFile(**{**values, **sides})
