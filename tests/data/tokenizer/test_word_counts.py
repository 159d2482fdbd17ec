"""Word counts in bounded memory, and the comparison of vocabularies."""

import random
from pathlib import Path

import pytest

from medvl.cli import main as cli
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.documents import Document
from medvl.data.corpora.text import plan_documents
from medvl.data.privacy import Deidentifier
from medvl.data.tokenizer.tokenizer import load_tokenizer, train_wordpiece
from medvl.data.tokenizer.wordpiece import count_words

RNG = random.Random(0)
TEXTS = [
    " ".join(f"Gene{RNG.randrange(40)}-{RNG.randrange(9)},x" for _ in range(20)) for _ in range(30)
] + ["___ seen"]


def test_counts_do_not_depend_on_the_memory() -> None:
    expected, count = count_words(TEXTS)
    assert count == 31
    assert expected["gene3"] > 0
    assert "___" not in expected
    for held in (1, 7, 50):
        assert count_words(iter(TEXTS), held=held) == (expected, count)
    most = sorted(expected, key=lambda word: (-expected[word], word))[:5]
    assert (
        list(count_words(TEXTS, held=7, kept=5)[0]) == list(count_words(TEXTS, kept=5)[0]) == most
    )
    assert "Gene3" in count_words(TEXTS, lowercase=False)[0]


def test_vocabularies_are_compared_on_one_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deid = Deidentifier(b"s" * 32)
    documents = [Document(text="no left effusion is seen, normal heart")]
    write_shards(
        plan_documents(documents, deid, fractions={"train": 1.0}),
        deid,
        ShardRun(out=tmp_path / "out", workers=1),
    )
    train_wordpiece(
        ["heart and effusion seen with letters f r m k"], vocab_size=40, min_frequency=1
    ).save(tmp_path / "b")
    options = ["--size", "200", "--min-frequency", "1", "--compare", str(tmp_path / "b")]
    cli.main(
        ["vocab", "--data", str(tmp_path / "out/train"), "--out", str(tmp_path / "a"), *options]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "8 words, 8 of them different"
    own, other = (line.split() for line in lines[3:])
    assert own[2:] == ["1.000", "100.0%", "0.00%"]
    pieces = load_tokenizer(tmp_path / "b").pieces_per_word({"heart": 3, "seen": 1, "zzz": 1})
    assert pieces[0] > 1
    assert pieces[2] == 0.2
    assert float(other[2]) > 1
