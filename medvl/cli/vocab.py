"""`medvl vocab`: a WordPiece vocabulary of a corpus."""

import filecmp
from pathlib import Path
from tempfile import TemporaryDirectory

from medvl.errors import ConfigError


def vocab(shards: Path, out: Path, *, size: int = 8000, min_frequency: int = 2, max_tokens: int = 128) -> str:
    """Train a WordPiece vocabulary on the text of a folder of shards.

    Args:
        shards: folder with a manifest, usually the training split.
        out: new output folder of the tokenizer; an equal tokenizer may be there already.
        size: maximum number of entries.
        min_frequency: minimum frequency of a piece.
        max_tokens: length at which the tokenizer truncates texts.
    """
    from medvl.data.shards.source import ShardSource
    from medvl.data.tokenizer.tokenizer import train_wordpiece

    source = ShardSource(shards)
    studies: dict[str, list[str]] = {}  # images of one study share their report: count it once
    for position in range(len(source)):
        sample = source.sample(position)
        studies.setdefault(sample.study, list(sample.sections.values()))
    texts = [text for sections in studies.values() for text in sections]
    tokenizer = train_wordpiece(texts, vocab_size=size, min_frequency=min_frequency, max_tokens=max_tokens)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        tokenizer.save(folder)
        new = {path.name: path for path in Path(folder).iterdir()}
        equal, _, _ = filecmp.cmpfiles(out, folder, new, shallow=False)
        other = sorted({path.name for path in out.iterdir()} - set(equal))
        if other:
            message = f"{out} holds another vocabulary or other files (first {other[0]}); give a new folder"
            raise ConfigError(message, "exists", field="out")
        for path in new.values():
            path.replace(out / path.name)
    return f"Wrote {out}: {tokenizer.vocab_size} entries from {len(studies)} reports"
