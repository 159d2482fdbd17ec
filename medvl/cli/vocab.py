"""`medvl vocab`: a vocabulary of a corpus."""

import filecmp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from medvl.errors import ConfigError


def vocab(
    shards: Path,
    out: Path,
    *,
    kind: Literal["wordpiece", "words", "r2gen"] = "wordpiece",
    size: int = 8000,
    min_frequency: int = 2,
    max_tokens: int = 128,
    sections: tuple[str, ...] = (),
) -> str:
    """Train a vocabulary on the text of a folder of shards.

    Args:
        shards: folder with a manifest, usually the training split.
        out: new output folder of the tokenizer; an equal tokenizer may be there already.
        kind: wordpiece; words, for models that write complete words (R2Gen); or r2gen, words cleaned as in its released
            code, which removes decimal points.
        size: maximum number of entries of a WordPiece vocabulary.
        min_frequency: minimum frequency of a piece or word.
        max_tokens: length at which the tokenizer truncates texts.
        sections: only these sections, such as findings; default all.
    """
    from medvl.data.shards.source import ShardSource
    from medvl.data.tokenizer.tokenizer import train_wordpiece, train_words

    studies = list(ShardSource(shards).texts_by_study(sections))
    texts = [text for of_study in studies for text in of_study]
    options = {"min_frequency": min_frequency, "max_tokens": max_tokens}
    if kind == "wordpiece":
        tokenizer = train_wordpiece(texts, vocab_size=size, **options)
    else:
        tokenizer = train_words(texts, cleaning="r2gen" if kind == "r2gen" else "report", **options)
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
