"""The unit of work of a conversion: one shard, built by any process that can read the same files."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from medvl.common.untrusted import InputFolders
from medvl.data.convert.note import ShardNote
from medvl.data.convert.options import ShardOptions
from medvl.data.convert.record import convert_records
from medvl.data.convert.writer import write_shard
from medvl.data.corpora.common.tables import Record


@dataclasses.dataclass(frozen=True, slots=True)
class ShardTask:
    """Work of one worker: the records of a shard, and where to write it."""

    name: str
    split: str
    folder: Path
    records: tuple[Record, ...]
    options: ShardOptions
    folders: InputFolders
    """Folders that images and reports must be in."""


def build_shard(task: ShardTask, tick: Callable[[], None]) -> ShardNote:
    """Convert and write one shard; unreadable images are noted, not raised. `tick` is called after each record.

    Raises OSError when writing fails.
    """
    note = ShardNote(task.name, task.split)
    samples = convert_records(task.records, task.options, task.folders, note, tick)
    return note.complete(write_shard(task.folder, task.name, samples))
