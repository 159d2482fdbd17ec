"""Text documents in files, and report sections of shards as documents: a corpus of texts."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from medvl.data.corpora.common.documents import (
    Document,
    DocumentFormat,
    HeldOutTexts,
    document_files,
    read_documents,
    read_texts,
)
from medvl.data.corpora.common.tables import Plan
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.corpora.text import TextOptions, plan_documents
from medvl.data.privacy import Deidentifier
from medvl.data.reports.sentences import join_texts
from medvl.data.shards.format import MANIFEST, split_folders
from medvl.data.shards.source import ShardSource
from medvl.data.splits import named_values, parse_fractions
from medvl.errors import SplitError


@register_corpus("text")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Corpus):
    """Convert text documents, PubMed's XML, or the reports of shards, for pretraining text
    encoders.
    """

    has_images: ClassVar[bool] = False

    sources: tuple[Path, ...]
    """files or folders of .txt, .jsonl or .xml (PubMed baseline), also as .gz; or folders of
    shards.
    """
    name: str = "text"
    """name of the corpus."""
    sections: tuple[str, ...] = ()
    """sections of the reports of shards, such as findings; default all."""
    held_out: tuple[str, ...] = ()
    """evaluation sets as NAME=PATH (file or folder): documents that share a run of 12 words with
    one of them are left out and counted.
    """
    splits: tuple[str, ...] = ("train=0.98", "validate=0.01", "test=0.01")
    """fractions of the splits, by document; reports of shards keep their split."""
    selection: TextOptions
    """selection of documents, and their division into blocks."""
    format: DocumentFormat
    """format of the files."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the blocks of the documents, as `plan_documents`."""
        sets = {
            name: read_texts(Path(path))
            for name, path in named_values(self.held_out, "held_out").items()
        }
        return plan_documents(
            itertools.chain.from_iterable(self._documents(source, deid) for source in self.sources),
            deid,
            name=self.name,
            options=self.selection,
            held_out=HeldOutTexts(sets) if sets else None,
            fractions=parse_fractions(self.splits),
        )

    def _documents(self, source: Path, deid: Deidentifier) -> Iterator[Document]:
        if any((folder / MANIFEST).is_file() for folder in split_folders(source)):
            return read_shard_documents(source, deid, self.sections)
        return itertools.chain.from_iterable(
            read_documents(path, self.format) for path in document_files(source)
        )


def read_shard_documents(
    folder: Path, deid: Deidentifier, sections: Sequence[str] = ()
) -> Iterator[Document]:
    """Yield the text of each study of a folder of shards (or of its splits), all or some sections,
    joined.

    Documents keep the patient and the split of their samples, so that no patient crosses a split.
    Raises ShardError when a shard is damaged, SplitError when it was hashed with another salt.
    """
    for split in split_folders(folder):
        source = ShardSource(split)
        if source.manifest.salt != deid.fingerprint:
            message = f"{split} was hashed with another salt; give its --salt-file"
            raise SplitError(message, "mismatch", field="salt")
        seen: set[str] = set()
        for sample in map(source.sample, range(len(source))):
            if sample.study in seen:  # images of one study share their report
                continue
            seen.add(sample.study)
            texts = [
                sample.sections[name]
                for name in sections or sample.sections
                if sample.sections.get(name)
            ]
            yield Document(text=join_texts(texts, "\n"), patient=sample.patient, split=sample.split)
