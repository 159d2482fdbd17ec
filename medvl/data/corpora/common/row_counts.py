"""Counts of the rows of a corpus: read, kept, excluded by a rule, and skipped because they cannot be used."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

IMAGES = "images"
"""Unit of a corpus that lists one image in each row."""
MAX_MESSAGES = 10_000
"""Messages that are kept; further rows are counted only."""
_SHOWN = 10


@dataclasses.dataclass(slots=True)
class RowCounts:
    """Rows of a corpus by what became of them. `read` equals `kept` and `left_out` together.

    A corpus counts each row once while it plans; conversion, manifest and `medvl verify` repeat the counts.
    """

    unit: str = IMAGES
    """What a row is: images, questions, boxes, documents, ..."""
    read: int = 0
    kept: int = 0
    excluded: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows left out by an option or a published rule, by reason. No budget limits them."""
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows left out because they cannot be used, by reason. `--max-skipped` limits them."""
    messages: list[tuple[str, str]] = dataclasses.field(default_factory=list, compare=False)
    """Reason and message of skipped rows, where a message names file and row. Not stored in the manifest."""

    def reading(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield the rows, and count them as read."""
        for row in rows:
            self.read += 1
            yield row

    def exclude(self, reason: str, rows: int = 1) -> None:
        """Count rows as left out by an option or a rule."""
        self.excluded[reason] += rows

    def skip(self, reason: str, rows: int = 1, *, message: str = "") -> None:
        """Count rows as left out because they cannot be used; a message names file, row and problem."""
        self.skipped[reason] += rows
        if message and len(self.messages) < MAX_MESSAGES:
            self.messages.append((reason, message))

    def describe_skipped(self) -> str:
        """Return the messages of the first skipped rows and the number of the others; "" without messages."""
        shown = [message for _, message in self.messages[:_SHOWN]]
        more = self.skipped.total() - len(shown)
        return "; ".join([*shown, f"and {more} more"] if shown and more else shown)

    def excluding(self, excluded: Counter[str]) -> "RowCounts":
        """Return the counts after rows that were kept are left out by a further rule."""
        kept = max(self.kept - excluded.total(), 0)
        return dataclasses.replace(self, kept=kept, excluded=self.excluded + excluded)

    @property
    def left_out(self) -> Counter[str]:
        """All rows left out, by reason."""
        return self.excluded + self.skipped

    def __str__(self) -> str:
        """Return one line, such as `read 12 images: kept 9, left out 3 (2 view, 1 duplicate)`."""
        reasons = f" ({listed(self.left_out)})" if self.left_out else ""
        return f"read {self.read} {self.unit}: kept {self.kept}, left out {self.left_out.total()}{reasons}"

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a manifest stores them; nothing where no row was counted."""
        if not self.read:
            return {}
        skipped = {reason: count for reason, count in sorted(self.skipped.items()) if count}
        return {"unit": self.unit, "read": self.read, "kept": self.kept, "skipped": skipped}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], excluded: Mapping[str, int]) -> "RowCounts | None":
        """Return the counts of a manifest, None where it has none."""
        if not content:
            return None
        return cls(
            unit=str(content["unit"]),
            read=int(content["read"]),
            kept=int(content["kept"]),
            excluded=Counter(excluded),
            skipped=Counter(content["skipped"]),
        )


def listed(counts: Mapping[str, int]) -> str:
    """Return counts by reason as text, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in ordered if count)
