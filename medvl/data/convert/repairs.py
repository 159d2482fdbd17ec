"""Search for skipped images that may have become readable, so that a resumed conversion reads them again."""

from collections.abc import Iterable
from pathlib import Path

from medvl.data.convert.note import ShardNote, SkippedImage
from medvl.data.corpora.common.tables import Record


def has_repairs(note: ShardNote, records: Iterable[Record], since: float) -> bool:
    """Return whether a skipped image of a shard was added, changed, or is now expected under another path.

    Args:
        note: note of the finished shard.
        records: records of the shard.
        since: time at which the note was written, in seconds since the epoch.
    """
    skipped = {image.key: image for image in note.skipped}
    return any(
        _is_repaired(record, skipped[record.sample.key], since) for record in records if record.sample.key in skipped
    )


def _is_repaired(record: Record, skipped: SkippedImage, since: float) -> bool:
    if tuple(map(str, record.files)) != skipped.files:
        return True
    if skipped.reason.endswith("_missing"):
        return all(path.exists() for path in record.files)
    return any(_change_time(path) > since for path in record.files)


def _change_time(path: Path) -> float:
    """Return the time of the last change of a file, or of a link to it; 0 if it does not exist."""
    try:
        return max(path.stat().st_ctime, path.lstat().st_ctime)
    except OSError:
        return 0.0
