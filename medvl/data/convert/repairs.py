"""Find skipped images that may be readable by now, so that a resumed conversion reads them again."""

from collections.abc import Iterable
from pathlib import Path

from medvl.data.convert.note import ShardNote
from medvl.data.corpora.common.tables import Record


def has_repairs(note: ShardNote, records: Iterable[Record], since: float) -> bool:
    """Return whether a skipped image of a shard was added, changed, or is now expected under another path.

    Args:
        note: note of the finished shard.
        records: records of the shard.
        since: time at which the note was written, in seconds since the epoch.
    """
    skipped = {key: (reason, message) for key, reason, message in note.skipped}
    return any(
        _is_repaired(record, *skipped[record.sample.key], since) for record in records if record.sample.key in skipped
    )


def _is_repaired(record: Record, reason: str, message: str, since: float) -> bool:
    files = [path for path in (record.sample.image, record.report, *record.masks.values()) if path is not None]
    if not any(str(path) in message for path in files):
        return True  # the message names the file that was read then, so the path is another one now
    if reason.endswith("_missing"):
        return all(path.exists() for path in files)
    return any(_change_time(path) > since for path in files)


def _change_time(path: Path) -> float:
    """Return when a file, or a link to it, was last changed or put in its place; 0 where there is none."""
    try:
        return max(path.stat().st_ctime, path.lstat().st_ctime)
    except OSError:
        return 0.0
