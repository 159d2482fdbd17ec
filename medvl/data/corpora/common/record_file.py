"""The records of a corpus on disk while it is planned and converted, so that memory does not grow with it."""

import contextlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, overload

from medvl.data.corpora.common.tables import Record
from medvl.errors import CorpusError
from medvl.schema import Sample

_FIELDS = tuple(field.name for field in fields(Sample) if field.name != "image")


class Records(Sequence[Record]):
    """Records in the order in which they were added, in memory no more than where each begins: eight bytes.

    They lie in a file of the temporary folder ($TMPDIR) that has no name and goes with the process. What is read back
    equals what was added; `Sample.extra` holds JSON values, as the schema says.

    Raises CorpusError where that folder refuses to hold them.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._file = _unnamed_file()
        self._ends = array("q", [0])
        self._written = 0
        for record in records:
            self.append(record)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            with contextlib.suppress(OSError):  # a full disk has been said before
                self._file.close()

    def append(self, record: Record) -> None:
        """Add a record behind the last."""
        line = _to_json(record)
        with _said():
            self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> Record: ...
    @overload
    def __getitem__(self, place: slice) -> list[Record]: ...
    def __getitem__(self, place: int | slice) -> Record | list[Record]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]  # counts from the end, or raises IndexError
        start, end = self._ends[number], self._ends[number + 1]
        if end > self._written:
            with _said():
                self._file.flush()
            self._written = self._ends[-1]
        return _from_json(os.pread(self._file.fileno(), end - start, start))


def _unnamed_file() -> IO[bytes]:
    with _said():
        return tempfile.TemporaryFile()


@contextlib.contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusError(
            f"{tempfile.gettempdir()} cannot hold the plan of the corpus ({error.strerror}): free some space there, or "
            "let $TMPDIR name another folder"
        ) from error


def _to_json(record: Record) -> bytes:
    """Texts keep their order, which the JSON of a shard does not need."""
    kept = {name: value for name in _FIELDS if (value := getattr(record.sample, name)) not in (None, {})}
    image, report = record.sample.image, record.report
    paths = [None if path is None else str(path) for path in (image, report)]
    return json.dumps([kept, *paths], separators=(",", ":")).encode()


def _from_json(data: bytes) -> Record:
    kept, image, report = json.loads(data)
    sample = Sample(**kept, image=None if image is None else Path(image))
    return Record(sample, None if report is None else Path(report))
