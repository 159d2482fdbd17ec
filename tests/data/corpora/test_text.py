"""`medvl shards text`: documents to blocks, duplicates, evaluation sets, splits, PubMed's XML,
reports of shards.
"""

import gzip
import json
import multiprocessing
import random
import resource
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.data.convert.shard_documents import read_shard_documents
from medvl.data.corpora.common.documents import (
    RUN,
    Document,
    DocumentFormat,
    HashSet,
    HeldOutTexts,
    document_files,
    read_documents,
    read_texts,
    run_hashes,
    words_of,
)
from medvl.data.corpora.text import TextOptions, cut, plan_documents
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.errors import ConfigError, CorpusError, SplitError

DEID = Deidentifier(b"s" * 32)
PUBMED = """<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE PubmedArticleSet SYSTEM "http://dtd.nlm.nih.gov/ncbi/pubmed/out/pubmed_250101.dtd">
<PubmedArticleSet>
<PubmedArticle><MedlineCitation Status="MEDLINE"><PMID Version="1">11</PMID><Article>
<ArticleTitle>Effect of <i>IL-2</i> on T cells.</ArticleTitle>
<Abstract><AbstractText Label="AIM">We studied H<sub>2</sub>O &lt; 3.</AbstractText>
<AbstractText>It works.</AbstractText></Abstract></Article></MedlineCitation></PubmedArticle>
<PubmedArticle><MedlineCitation><PMID Version="1">12</PMID><Article><ArticleTitle>No abstract.</ArticleTitle></Article>
</MedlineCitation></PubmedArticle>
<DeleteCitation><PMID Version="1">3</PMID></DeleteCitation>
</PubmedArticleSet>
"""


def sentences(count: int, seed: int = 0, words: int = 9) -> str:
    rng = random.Random(seed)
    return " ".join(
        " ".join(f"w{rng.randrange(5000)}" for _ in range(words)) + "." for _ in range(count)
    )


def excluded(
    documents: list[Document], options: TextOptions, held_out: HeldOutTexts | None
) -> Mapping[str, int]:
    return plan_documents(documents, DEID, options=options, held_out=held_out).excluded


def test_documents_are_left_out_by_rule_and_counted() -> None:
    kept, other = sentences(3, 1), sentences(3, 2)
    held_out = HeldOutTexts({"first": [sentences(2, 8)], "second": [sentences(2, 9)]})
    shared = words_of(sentences(2, 9))
    documents = [
        Document(text=kept),
        Document(text=kept.upper().replace(".", " ;")),  # the same words
        Document(text=""),
        Document(text="two words"),
        Document(text=other, id="a"),
        Document(text=sentences(3, 3), id="a"),
        Document(text=f"x {' '.join(shared[2 : 2 + RUN])} y"),
        Document(text=f"x {' '.join(shared[2 : 1 + RUN])} y"),  # a run of eleven words
    ]
    expected = {"duplicate": 1, "no_text": 1, "short": 1, "repeated_id": 1, "overlaps second": 1}
    assert excluded(documents, TextOptions(min_words=3), held_out) == expected
    with raises(CorpusError, "empty"):
        plan_documents([Document(text="two words")], DEID, options=TextOptions(min_words=3))
    with raises(ConfigError, "empty", "held_out"):
        HeldOutTexts({"short": ["too short"]})


def test_blocks_of_a_document_stay_together_and_lose_nothing() -> None:
    text = sentences(40, words=9)
    records = plan_documents(
        [Document(text=text)], DEID, options=TextOptions(block_words=100)
    ).records
    of_block = [record.sample for record in records]
    assert " ".join(sample.sections["text"] for sample in of_block) == text
    assert [sample.order for sample in of_block] == [0, 1, 2, 3]
    assert (
        len({sample.patient for sample in of_block})
        == len({sample.split for sample in of_block})
        == 1
    )
    assert (
        len({sample.study for sample in of_block}) == len({sample.key for sample in of_block}) == 4
    )
    for sample in of_block:
        assert 50 < len(sample.sections["text"].split()) <= 100
        assert sample.sections["text"].endswith(".")
    endless = " ".join(f"n{number}" for number in range(250))
    assert [len(block.split()) for block in cut(endless, 100)] == [84, 83, 83]
    assert cut(endless, 0) == [endless]


def test_a_document_has_one_split_in_every_corpus_and_order() -> None:
    documents = [Document(text=sentences(1, seed)) for seed in range(60)]
    fractions = {"train": 0.5, "test": 0.5}
    splits = {
        record.sample.patient: record.sample.split
        for record in plan_documents(documents, DEID, fractions=fractions).records
    }
    assert 15 < list(splits.values()).count("test") < 45
    for record in plan_documents(documents[::-1], DEID, name="other", fractions=fractions).records:
        assert splits[record.sample.patient] == record.sample.split


def test_files_of_all_kinds_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One line.\n\n  Two.\n")
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress(
            b'{"text": "Three.", "pmid": 3}\n{"text": " Four. ", "pmid": 4}\n{"text": "5", "pmid": null}'
        )
    )
    (tmp_path / "c.xml").write_text(PUBMED)
    (tmp_path / "d.pdf").write_text("no text")
    options = DocumentFormat(id_field="pmid")
    files = document_files(tmp_path)
    assert [path.name for path in files] == ["a.txt", "b.jsonl.gz", "c.xml"]
    lines, json_lines, articles = (list(read_documents(path, options)) for path in files)
    assert [document.text for document in lines] == ["One line.", "Two."]
    assert [(document.text, document.id) for document in json_lines] == [
        ("Three.", "3"),
        ("Four.", "4"),
        ("5", None),
    ]
    abstract = "Effect of IL-2 on T cells. We studied H2O < 3. It works."
    assert [(document.text, document.id) for document in articles] == [
        (abstract, "PMID 11"),
        ("", "PMID 12"),
    ]
    paragraphs = DocumentFormat(layout="paragraphs")
    (tmp_path / "p.txt").write_text("A sentence.\nAnother.\n\n\nSecond document.")
    assert [d.text for d in read_documents(tmp_path / "p.txt", paragraphs)] == [
        "A sentence.\nAnother.",
        "Second document.",
    ]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.xml", PUBMED[:600], "truncated"),
        ("a.xml", PUBMED[: PUBMED.index("<DeleteCitation>")], "truncated"),  # between two articles
        ("a.xml", "<html><body>503 Service Unavailable</body></html>", "truncated"),
        ("a.txt.gz", "", "malformed"),
        ("a.xml", PUBMED.replace("It works.", "It &bomb;"), "malformed"),
        ("a.xml", PUBMED.replace('<PMID Version="1">11</PMID>', ""), "malformed"),
        ("a.jsonl", '{"words": "a"}\n', "missing"),
        ("a.jsonl", '{"text": 3}\n', "malformed"),
        ("a.jsonl", '{"text": "a"\n', "malformed"),
        ("a.pdf", "text", "not_found"),
    ],
)
def test_damaged_files_raise(tmp_path: Path, name: str, content: str, code: str) -> None:
    (tmp_path / name).write_text(content)
    with raises(CorpusError, code):
        for path in document_files(tmp_path):
            list(read_documents(path, DocumentFormat()))


def test_pubmed_articles_that_cross_reads_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medvl.data.corpora.common.documents._CHUNK", 7)
    (tmp_path / "c.xml").write_text(PUBMED)
    assert [document.id for document in read_documents(tmp_path / "c.xml", DocumentFormat())] == [
        "PMID 11",
        "PMID 12",
    ]


def test_evaluation_sets_in_all_formats_are_found(tmp_path: Path) -> None:
    words = words_of(sentences(3, 5))
    (tmp_path / "a.jsonl").write_text(json.dumps({"tokens": words[:14], "tags": ["O"] * 14}))
    (tmp_path / "b.tsv").write_text("".join(f"{word}\tO\n" for word in words[10:24]))
    (tmp_path / "c.txt").write_text("\n".join(words[12:26]))
    (tmp_path / "d.csv").write_text(f'id,text\n1,"{" ".join(words[:13])}"\n')
    (tmp_path / "e.json").write_text(json.dumps({"data": [{"q": " ".join(words[3:17])}]}))
    quoted = ['"', *words[6:16], '"', *words[16:20]]
    (tmp_path / "f.tsv").write_text("".join(f"{word}\tO\n" for word in quoted))
    (tmp_path / "g.iob2").write_text("".join(f"{word} NN O\n" for word in words[2:16]))
    (tmp_path / "h.tokens").write_text("\n".join(words[4:16]))
    (tmp_path / "i.xml").write_text(
        f'<document><sentence text="{" ".join(words[8:20])}"><e/></sentence></document>'
    )
    (tmp_path / "j.xml").write_text(
        f"<d><t>{' '.join(words[7:13])}</t><t>{' '.join(words[13:19])}</t></d>"
    )
    starts = {
        "a.jsonl": 0,
        "b.tsv": 10,
        "c.txt": 12,
        "d.csv": 0,
        "e.json": 3,
        "f.tsv": 6,
        "g.iob2": 2,
        "h.tokens": 4,
    }
    for path, start in {**starts, "i.xml": 8, "j.xml": 7}.items():
        found = HeldOutTexts({"set": read_texts(tmp_path / path)})
        assert found.find(["before", *words[start : start + RUN], "after"]) == "set"
        assert found.find(words[start : start + RUN - 1]) is None
    assert HeldOutTexts({"set": read_texts(tmp_path)}).find(words[3:15]) == "set"
    with raises(CorpusError, "not_found", "held_out"):
        list(read_texts(tmp_path / "nothing"))


def test_hashes_of_runs_are_those_of_their_words() -> None:
    words = words_of(sentences(4, 6))
    hash_N = run_hashes(words)
    assert len(hash_N) == len(words) - RUN + 1 == len(np.unique(hash_N))
    assert all(hash_N[n] == run_hashes(words[n : n + RUN])[0] for n in range(len(hash_N)))
    assert run_hashes(words[1:13])[0] != run_hashes([words[2], words[1], *words[3:13]])[0]


def test_hash_set_matches_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medvl.data.corpora.common.documents._MERGE", 8)
    rng, compact, plain = random.Random(0), HashSet(), set[int]()
    for _ in range(300):
        number = rng.randrange(2**64 - 100, 2**64)
        assert compact.add(number) == (number not in plain)
        plain.add(number)


def test_command_writes_verified_shards_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    lines = [sentences(4, seed) for seed in range(30)]
    (tmp_path / "texts/a.txt").write_text("\n".join([*lines, lines[0]]))
    (tmp_path / "set.txt").write_text(lines[1])
    command = [
        "shards",
        "text",
        "--sources",
        str(tmp_path / "texts"),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    command += [
        "--held-out",
        f"quiz={tmp_path / 'set.txt'}",
        "--splits",
        "train=0.7",
        "validate=0.3",
        "--block-words",
        "20",
    ]
    cli.main(command)
    printed = capsys.readouterr().out
    assert "left out 2 (1 duplicate, 1 overlaps quiz)" in printed
    assert "no_image" not in printed
    manifests = {split: Manifest.read(tmp_path / "out" / split) for split in ("train", "validate")}
    assert sum(len(manifest.patients) for manifest in manifests.values()) == 29
    assert not set(manifests["train"].patients) & set(manifests["validate"].patients)
    assert dict(manifests["train"].excluded_from_corpus) == {"duplicate": 1, "overlaps quiz": 1}
    for split in manifests:
        assert verify_folder(tmp_path / "out" / split).problems == ()
    cli.main(command)  # finished shards are kept
    assert {split: Manifest.read(tmp_path / "out" / split) for split in manifests} == manifests

    cli.main(
        [
            "shards",
            "text",
            "--sources",
            str(tmp_path / "out"),
            "--out",
            str(tmp_path / "again"),
            "--workers",
            "1",
        ]
    )
    for split, manifest in manifests.items():  # reports of shards keep patient and split
        again = Manifest.read(tmp_path / "again" / split)
        assert again.patients == manifest.patients
        assert len(ShardSource(tmp_path / "again" / split)) == manifest.samples
    salt = tmp_path / "salt"
    salt.write_text("ab" * 32)
    with raises(SplitError, "mismatch", "salt"):
        list(read_shard_documents(tmp_path / "out", Deidentifier.from_file(salt)))


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Twelve shards take as much memory as two: 10 MB more of text, less than 3 MB more of
    memory.
    """
    grown = []
    for documents in (200, 1200):
        source = tmp_path / f"{documents}.txt"
        with source.open("w") as file:
            file.writelines(f"{sentences(15, seed)} {'_' * 9500}\n" for seed in range(documents))
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=_convert, args=(source, sender))
        child.start()
        sender.close()
        grown.append(receiver.recv())
        child.join()
    assert grown[1] - grown[0] < 3_000  # kilobytes


def _convert(source: Path, grown: Connection) -> None:
    """Convert a file in this process, and send the kilobytes by which its memory grew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    command = [
        "shards",
        "text",
        "--sources",
        str(source),
        "--out",
        str(source.with_suffix("")),
        "--workers",
        "1",
    ]
    cli.main([*command, "--samples-per-shard", "100"])
    grown.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.real
def test_pretraining_text_that_is_in_an_evaluation_set_is_left_out(real_data: Path) -> None:
    """HoC's abstracts are PubMed's: every document of the file overlaps; of case texts, none
    does.
    """
    held_out = HeldOutTexts({"hoc": read_texts(real_data / "blurb/hoc")})
    for name, overlapping in (("pubmed_abstracts_hoc", 1852), ("medpix2_case_text", 0)):
        documents = read_documents(real_data / f"mlm/{name}.txt.gz", DocumentFormat())
        assert (
            sum(held_out.find(words_of(document.text)) is not None for document in documents)
            == overlapping
        )
