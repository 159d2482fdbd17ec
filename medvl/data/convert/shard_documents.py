"""Report sections of shards as text documents."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from medvl.data.corpora.common.documents import Document
from medvl.data.privacy import Deidentifier
from medvl.data.reports.sentences import join_texts
from medvl.data.shards.format import split_folders
from medvl.data.shards.source import ShardSource
from medvl.errors import SplitError


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
