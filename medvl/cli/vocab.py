"""`medvl vocab`: a WordPiece vocabulary of a corpus."""

from pathlib import Path


def vocab(shards: Path, out: Path, *, size: int = 8000, min_frequency: int = 2, max_tokens: int = 128) -> str:
    """Train a WordPiece vocabulary on the text of a folder of shards.

    Args:
        shards: folder with a manifest, usually the training split.
        out: output folder of the tokenizer.
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
    tokenizer.save(out)
    return f"Wrote {out}: {tokenizer.vocab_size} entries from {len(studies)} reports"
