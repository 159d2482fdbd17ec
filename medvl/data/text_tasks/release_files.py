"""Files of original releases: regular files inside the release's folder, with errors that name file and line.

Only files of at most `MAX_FILE_BYTES` whose real path is inside the release's folder are read: links and names with
`../` cannot lead out of it.
"""

import contextlib
import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

from medvl.common.text_files import decode_text
from medvl.common.untrusted import InputFolders, read_limited
from medvl.data.text_tasks.tasks import SPLITS, Split
from medvl.errors import CorpusError

MAX_FILE_BYTES = 1 << 28
"""Largest accepted file of a release, which is read whole; the largest of BLURB's has 40 MB."""
_SPLIT_NAMES: Mapping[Split, tuple[str, ...]] = {
    "train": ("train",),
    "dev": ("dev", "devel", "valid"),
    "test": ("test",),
}
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError, csv.Error, ElementTree.ParseError)


@contextlib.contextmanager
def at(place: Path | str) -> Iterator[None]:
    """Raise CorpusError naming `place` for unexpected content. Values are not quoted: they may be from a note."""
    try:
        yield
    except _MALFORMED as error:
        reason = f"there is no field {error}" if isinstance(error, KeyError) else "this is not as published"
        message = f"{place}: {reason}; compare it with data_cards/blurb.md"
        raise CorpusError(message, "malformed", field="data") from error


def read_text(path: Path, folder: Path) -> str:
    """Return the text of a file of the release in `folder`, with universal newlines."""
    try:
        with InputFolders.of(folder).open(path, CorpusError) as file:
            text = decode_text(read_limited(file, MAX_FILE_BYTES, CorpusError), path, CorpusError, field="data")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise CorpusError(f"cannot read {path} ({error})", "unreadable", field="data") from error


def read_lines(path: Path, folder: Path) -> list[str]:
    """Return the lines of a file; other separators (U+2028, U+0085) are characters of their text."""
    return read_text(path, folder).removesuffix("\n").split("\n")


def read_rows(path: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (place, cells) of the lines of a table that are not empty, place being "FILE, line N"."""
    lines = read_lines(path, folder)
    with at(path):
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    yield from ((f"{path}, line {number}", row) for number, row in enumerate(rows, start=1) if row)


def split_file(folder: Path, split: Split, pattern: str, without: str | None = None) -> Path | None:
    """Return the file of a split; `pattern` has {} for its name, names with `without` do not count. None: no file."""
    found = (path for name in _SPLIT_NAMES[split] for path in sorted(folder.glob(pattern.format(name))))
    return next((path for path in found if without is None or without not in path.name), None)


def listed(folder: Path, kind: str) -> dict[Split, list[str]]:
    """Return the ids of each split from `train_KIND.tsv`, `dev_KIND.tsv`, `test_KIND.tsv`."""
    lists: dict[Split, list[str]] = {}
    for split in SPLITS:
        path = folder / f"{split}_{kind}.tsv"
        if not path.is_file():
            message = f"expected {path}, the list of the {split} split; BLURB publishes it"
            raise CorpusError(message, "not_found", field="data")
        lists[split] = [name for name in re.split(r"[,\s]+", read_text(path, folder)) if name]
    return lists
