"""Text alone, for pretraining text encoders: documents are de-duplicated, checked, and cut into
blocks.

A sample is a block of a document, without an image. `patient` is the salted hash of the document
(of the patient, for reports from shards), so splits are disjoint by document; `study` is the study
of the block, `order` its place.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from medvl.common.config_io import check_within
from medvl.common.untrusted import ANYWHERE
from medvl.data.corpora.common.documents import (
    Document,
    HashSet,
    HeldOutTexts,
    words_of,
)
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, listed
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.privacy import Deidentifier
from medvl.data.splits import (
    DEFAULT_FRACTIONS,
    check_fractions,
    check_name,
    hash_split,
)
from medvl.errors import CorpusError
from medvl.schema import Sample

SECTION = "text"
"""Section of the samples."""
_NOT_SPACE = re.compile(r"\S+")
_SENTENCE_END = re.compile(r"[.!?][)\]\"']*$")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """Selection of documents, and their division into blocks."""

    min_words: int = 0
    """Shorter documents are left out; PubMedBERT leaves out abstracts under 128 words."""
    block_words: int = 384
    """Longer documents are cut into blocks of at most this many words, at the ends of sentences
    where possible. About 500 tokens of a biomedical vocabulary; 0 never cuts.
    """

    def __post_init__(self) -> None:
        check_within(self, "[0, inf)", "min_words", "block_words")


def plan_documents(
    documents: Iterable[Document],
    deid: Deidentifier,
    *,
    name: str = "text",
    options: TextOptions | None = None,
    held_out: HeldOutTexts | None = None,
    fractions: Mapping[str, float] = DEFAULT_FRACTIONS,
) -> Plan:
    """Read documents one by one and plan their blocks.

    Left out and counted are documents without text (`no_text`), with fewer than `options.min_words`
    words (`short`), with an id that was read before (`repeated_id`), with the words of an earlier
    document (`duplicate`), and those that share a run of 12 words with an evaluation set (`overlaps
    NAME`). Memory: 16 bytes for each document, and what planning needs for each block.

    Raises:
        ConfigError: the name or the fractions cannot be used.
        CorpusError: a file is damaged, or no document is left.
    """
    check_name(name, "name")
    check_fractions(fractions)
    reader = _Reader(deid, name, options or TextOptions(), held_out, fractions)
    records = Records(
        map(
            Record,
            itertools.chain.from_iterable(map(reader.samples, reader.rows.reading(documents))),
        )
    )
    if not records:
        detail = listed(reader.rows.excluded) or "none read"
        raise CorpusError(f"{name}: no document is left ({detail})", "empty")
    return Plan(name, records, (), reader.rows, folders=ANYWHERE)  # no files


class _Reader:
    def __init__(
        self,
        deid: Deidentifier,
        name: str,
        options: TextOptions,
        held_out: HeldOutTexts | None,
        fractions: Mapping[str, float],
    ) -> None:
        self.deid = deid
        self.name = name
        self.options = options
        self.fractions = fractions
        self.held_out = held_out
        self.rows = RowCounts("documents")
        self._ids = HashSet()
        self._texts = HashSet()

    def samples(self, document: Document) -> Iterator[Sample]:
        """Yield the blocks of a document that is kept."""
        words = words_of(document.text)
        content = _digest(" ".join(words))
        reason = self._reason(document, words, content)
        if reason is not None:
            self.rows.exclude(reason)
            return
        self.rows.kept += 1
        identity = document.id or f"text {content:016x}"
        patient = document.patient or self.deid.patient(
            f"{self.name} {identity}" if document.id else identity
        )
        split = document.split or hash_split(patient, self.fractions)
        blocks = cut(document.text, self.options.block_words)
        for order, block in enumerate(blocks):
            extra: dict[str, Any] = {"blocks": len(blocks)} if len(blocks) > 1 else {}
            source = f"{self.name} {identity} {content:016x} {order}"
            yield Sample(
                key=self.deid.image(source),
                corpus=self.name,
                split=split,
                patient=patient,
                study=self.deid.study(patient, source),
                sections={SECTION: block},
                order=order,
                extra=extra,
            )

    def _reason(self, document: Document, words: Sequence[str], content: int) -> str | None:
        """Return why a document is left out; None if it is kept."""
        if not words:
            return "no_text"
        if len(words) < self.options.min_words:
            return "short"
        if document.id is not None and not self._ids.add(_digest(document.id)):
            return "repeated_id"
        if not self._texts.add(content):
            return "duplicate"
        overlap = None if self.held_out is None else self.held_out.find(words)
        return None if overlap is None else f"overlaps {overlap}"


def cut(text: str, block_words: int) -> list[str]:
    """Return a text in as few and as even blocks of at most `block_words` words as sentences
    allow; 0 never cuts.
    """
    places = [match.span() for match in _NOT_SPACE.finditer(text)]
    if not block_words or len(places) <= block_words:
        return [text]
    blocks = []
    start = 0
    while start < len(places):
        rest = len(places) - start
        target = -(-rest // -(-rest // block_words))
        end = start + target
        if rest > block_words:
            ends = range(min(start + block_words, len(places)), start + target // 2, -1)
            stops = [n for n in ends if _SENTENCE_END.search(text[slice(*places[n - 1])])]
            end = min(stops, key=lambda n: abs(n - end), default=end)
        blocks.append(text[places[start][0] : places[end - 1][1]])
        start = end
    return blocks


def _digest(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )
