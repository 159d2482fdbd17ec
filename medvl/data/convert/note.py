"""The note of a finished shard: its manifest entry, and the images that were skipped or excluded."""

import dataclasses
import json
from collections import Counter
from typing import NamedTuple

from medvl.common.untrusted import parse_json
from medvl.data.shards.format import Shard


class SkippedImage(NamedTuple):
    """An image that could not be converted."""

    key: str
    reason: str
    message: str
    files: tuple[str, ...]
    """Files of its record."""


@dataclasses.dataclass(slots=True)
class ShardNote:
    """Result of converting one shard; stored in OUT-private, where a resumed run finds it."""

    name: str
    split: str
    samples: int = 0
    size: int = 0
    """Bytes of the tar."""
    sha256: str = ""
    index_sha256: str = ""
    patients: list[str] = dataclasses.field(default_factory=list)
    skipped: list[SkippedImage] = dataclasses.field(default_factory=list)
    excluded: Counter[str] = dataclasses.field(default_factory=Counter)
    warnings: Counter[str] = dataclasses.field(default_factory=Counter)

    def to_json(self) -> str:
        """Return the content of the note's file."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, data: bytes) -> "ShardNote":
        """Parse a note's file. Raises ValueError or TypeError when it is truncated or not a note."""
        note = cls(**parse_json(data))
        note.excluded, note.warnings = Counter(note.excluded), Counter(note.warnings)
        note.skipped = [SkippedImage(key, why, text, tuple(files)) for key, why, text, files in note.skipped]
        return note

    def complete(self, shard: Shard) -> "ShardNote":
        """Add the entry of the written tar. Returns the note."""
        self.samples, self.size, self.sha256 = shard.samples, shard.bytes, shard.sha256
        self.index_sha256 = shard.index_sha256
        self.patients = sorted(set(self.patients))
        return self

    @property
    def shard(self) -> Shard:
        """Manifest entry of the shard."""
        return Shard(
            name=self.name,
            samples=self.samples,
            bytes=self.size,
            sha256=self.sha256,
            index_sha256=self.index_sha256,
        )
