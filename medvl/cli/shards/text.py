"""`medvl vocab`: a vocabulary of a corpus."""

import filecmp
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.tokenizer.tokenizer import Tokenizer


def vocab(
    data: Path,
    out: Path,
    *,
    kind: Literal["wordpiece", "words", "r2gen"] = "wordpiece",
    size: int = 8000,
    min_frequency: int = 2,
    max_tokens: int = 128,
    sections: tuple[str, ...] = (),
    compare: tuple[Path, ...] = (),
    compare_on: Path | None = None,
) -> str:
    """Train a vocabulary on the text of a folder of shards, and compare it with others.

    Args:
        data: folder with a manifest, usually the training split.
        out: new output folder of the tokenizer; an equal tokenizer may be there already.
        kind: wordpiece; words, for models that write complete words (R2Gen); or r2gen, words
            cleaned as in its released code, which removes decimal points.
        size: maximum number of entries of a WordPiece vocabulary.
        min_frequency: minimum frequency of a piece or word.
        max_tokens: length at which the tokenizer truncates texts.
        sections: only these sections, such as findings; default all.
        compare: folders of other tokenizers, to print pieces per word beside the new one's.
        compare_on: folder of shards whose words are compared, such as a validation split; default
            the one above.
    """
    from medvl.data.shards.source import ShardSource
    from medvl.data.tokenizer.tokenizer import load_tokenizer, train_wordpiece, train_words

    others = {
        str(folder): load_tokenizer(folder) for folder in compare
    }  # fails before the training
    reports = 0

    def texts_of(folder: Path) -> Iterator[str]:
        nonlocal reports
        reports = 0
        for of_study in ShardSource(folder).texts_by_study(sections):
            reports += 1
            yield from of_study

    texts = texts_of(data)
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
            message = (
                f"{out} holds another vocabulary or other files (first {other[0]}); give "
                f"a new folder"
            )
            raise ConfigError(message, "exists", field="out")
        for path in new.values():
            path.replace(out / path.name)
    wrote = f"Wrote {out}: {tokenizer.vocab_size} entries from {reports} texts"
    if not compare:
        return wrote
    return f"{wrote}\n{_compare({str(out): tokenizer, **others}, texts_of(compare_on or data))}"


def _compare(tokenizers: "Mapping[str, Tokenizer]", texts: Iterable[str]) -> str:
    """Return a table of the pieces into which each vocabulary divides the words of the texts."""
    from medvl.data.tokenizer.wordpiece import count_words

    words, _ = count_words(texts, lowercase=False)
    width = max(map(len, tokenizers))
    lines = [
        f"{'vocabulary':{width}} {'entries':>8} {'pieces per word':>16} {'one piece':>10} "
        f"{'unknown':>8}"
    ]
    for name, tokenizer in tokenizers.items():
        pieces, single, unknown = tokenizer.pieces_per_word(words)
        lines.append(
            f"{name:{width}} {tokenizer.vocab_size:8} {pieces:16.3f} {single:10.1%} {unknown:8.2%}"
        )
    return "\n".join([f"{sum(words.values())} words, {len(words)} of them different", *lines])
