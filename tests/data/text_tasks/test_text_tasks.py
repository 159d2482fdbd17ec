"""Data sets of text tasks: compact files, original releases, the texts of relations, damaged
files.
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises

from medvl.data.text_tasks import releases
from medvl.data.text_tasks.read import available_tasks, read_text_task
from medvl.data.text_tasks.tasks import TASKS, RelationText, TextExample, relation_text
from medvl.errors import CorpusError
from medvl.eval.text_tasks.metrics import entity_spans, summed_metric


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def test_compact_files_of_every_kind(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "bc2gm/test.jsonl.gz",
        {"id": "s1", "tokens": ["IL-2", "gene"], "tags": ["B", "I"]},
    )
    write_rows(
        tmp_path / "ebm-pico/dev.jsonl.gz",
        {"id": "p", "doc": "7", "tokens": ["rest"], "tags": ["INT"]},
    )
    write_rows(
        tmp_path / "hoc/test.jsonl.gz", {"id": "3", "sentences": ["A b.", "C."], "labels": [1, 9]}
    )
    write_rows(
        tmp_path / "biosses/dev.jsonl.gz",
        {"id": "4", "sentence1": "a", "sentence2": "b", "score": 2.5},
    )
    write_rows(
        tmp_path / "pubmedqa/train.jsonl.gz",
        {"id": "5", "question": "Is it?", "context": ["a", "b"], "label": "yes"},
    )
    words = read_text_task(tmp_path, TASKS["bc2gm"])["test"][0]
    assert (words.texts, words.label, words.document) == (("IL-2", "gene"), ("B", "I"), "s1")
    assert read_text_task(tmp_path, TASKS["ebm-pico"])["dev"][0].document == "7"
    document = read_text_task(tmp_path, TASKS["hoc"])["test"][0]
    assert document.texts == ("A b. C.",)
    assert document.label == ("avoiding immune destruction", "tumor promoting inflammation")
    assert read_text_task(tmp_path, TASKS["biosses"])["dev"][0].label == 2.5
    assert read_text_task(tmp_path, TASKS["pubmedqa"])["train"][0].texts == ("Is it?", "a b")
    assert available_tasks(tmp_path) == ["bc2gm", "ebm-pico", "biosses", "hoc", "pubmedqa"]


TEXT = "Aspirin raises warfarin levels."
RELATION = {"id": "d.p0", "doc": "d", "text": TEXT, "e1": [0, 7], "e2": [15, 23], "label": "effect"}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("dummies", "@DRUG$ raises @DRUG$ levels."),
        ("markers", "<e1>Aspirin</e1> raises <e2>warfarin</e2> levels."),
        ("original", TEXT),
    ],
)
def test_relations_show_their_mentions(tmp_path: Path, form: RelationText, expected: str) -> None:
    untyped = RELATION | {"id": "d.p1", "label": "None"}
    write_rows(tmp_path / "ddi/train.jsonl.gz", RELATION, untyped)
    (example,) = read_text_task(tmp_path, TASKS["ddi"], form)["train"]
    assert example.texts == (expected,)
    assert example.spans is not None
    shown = [expected[start:end] for start, end in example.spans]
    marked = [
        ("<e1>Aspirin</e1>", "<e2>warfarin</e2>"),
        ("Aspirin", "warfarin"),
        ("@DRUG$", "@DRUG$"),
    ]
    assert tuple(shown) in marked


def test_overlapping_mentions_are_one_dummy() -> None:
    example = TextExample(
        key="k", document="d", texts=(TEXT,), label="false", spans=((0, 7), (0, 14))
    )
    assert relation_text(example, TASKS["ddi"], "dummies")[0] == "@DRUG-DRUG$ warfarin levels."
    marked, _ = relation_text(example, TASKS["ddi"], "markers")
    assert marked == "<e1><e2>Aspirin raises</e2></e1> warfarin levels."
    with raises(CorpusError, "out_of_range", "data"):
        relation_text(
            TextExample(key="k", document="d", texts=("a",), label="false", spans=((0, 7), (8, 9))),
            TASKS["ddi"],
            "dummies",
        )


def test_releases_of_tagged_words(tmp_path: Path) -> None:
    lines = "-DOCSTART- (1)\n\nBRCA1\tB-GENE\nis\tO\n\nIL-2\tB-GENE\ngene\tI-GENE\n"
    write(tmp_path / "BC2GM-IOB/train.tsv", lines)
    write(tmp_path / "BC2GM-IOB/devel.tsv", lines)
    splits = read_text_task(tmp_path, TASKS["bc2gm"])
    assert set(splits) == {"train", "dev"}
    assert [example.label for example in splits["train"]] == [("B", "O"), ("B", "I")]
    assert len({example.document for example in splits["train"]}) == 1
    write(tmp_path / "BC2GM-IOB/test.tsv", lines.replace("(1)", "O") * 2)
    documents = [example.document for example in read_text_task(tmp_path, TASKS["bc2gm"])["test"]]
    assert (
        documents[0] == documents[1] != documents[2] == documents[3]
    )  # the same line begins every document
    write(
        tmp_path / "jnlpba/Genia4ERtask2.iob2",
        "###MEDLINE:1\n\nNF-kappa\tB-protein\nB\tI-protein\n\n",
    )
    write(tmp_path / "jnlpba/Genia4EReval2.iob2", "x\tO\n")
    assert read_text_task(tmp_path, TASKS["jnlpba"])["train"][0].label == ("B", "I")


def test_release_of_pico_keeps_the_last_element(tmp_path: Path) -> None:
    root = tmp_path / "ebm_nlp_2_00"
    write(root / "documents/1.tokens", "Men took zinc . Done .")
    spans = root / "annotations/aggregated/starting_spans"
    for element, marks in (
        ("participants", "1 0 0 0 0 0"),
        ("interventions", "0 0 1 0 0 0"),
        ("outcomes", "1 0 0 0 0 0"),
    ):
        write(spans / element / "train/1.AGGREGATED.ann", " ".join(marks.split()))
    for split, ids in (("train", "1"), ("dev", ""), ("test", "")):
        write(root / f"{split}_pmid.tsv", ids)
    first, second = read_text_task(tmp_path, TASKS["ebm-pico"])["train"]
    assert (first.label, second.texts) == (("OUT", "O", "INT", "O"), ("Done", "."))


def test_releases_of_relations(tmp_path: Path) -> None:
    sentence = (
        '<document id="D"><sentence id="s" text="a b c"><entity id="e0" '
        'charOffset="0-0"/><entity id="e1" charOffset="4-4"/>'
        '<pair id="p" e1="e1" e2="e0" ddi="true" type="effect"/></sentence></document>'
    )
    write(tmp_path / "DDICorpus/Train/x.xml", sentence)
    for split, names in (("train", "/Train/x.xml\n"), ("dev", ""), ("test", "")):
        write(tmp_path / f"DDICorpus/{split}_files.tsv", names)
    (pair,) = read_text_task(tmp_path, TASKS["ddi"], "original")["train"]
    assert (pair.texts, pair.spans, pair.label, pair.document) == (
        ("a b c",),
        ((0, 1), (4, 5)),
        "effect",
        "D",
    )
    write(tmp_path / "GAD/1/train.tsv", "".join(f"s{n} @GENE$\t{n % 2}\n" for n in range(4270)))
    write(tmp_path / "GAD/1/test.tsv", "index\tsentence\tlabel\n0\tx\t1\n")
    gad = read_text_task(tmp_path, TASKS["gad"])
    assert {split: len(rows) for split, rows in gad.items()} == {"train": 4261, "dev": 9, "test": 1}
    folder = tmp_path / "ChemProt_Corpus/chemprot_training"
    write(folder / "chemprot_training_abstracts.tsv", "1\tZinc helps.\tZinc blocks XYZ1 now.\n")
    entities = "1\tT1\tCHEMICAL\t12\t16\tZinc\n1\tT2\tGENE-Y\t24\t28\tXYZ1\n"
    write(folder / "chemprot_training_entities.tsv", entities)
    write(folder / "chemprot_training_relations.tsv", "1\tCPR:4\tY\tINHIBITOR\tArg1:T1\tArg2:T2\n")
    (chem,) = read_text_task(tmp_path, TASKS["chemprot"])["train"]
    assert (chem.texts, chem.label) == (("@CHEMICAL$ blocks @GENE$ now.",), "CPR:4")
    also = "1\tCPR:1\tN\tPART-OF\tArg1:T1\tArg2:T2\n"  # BLURB's script would make the pair "false"
    write(
        folder / "chemprot_training_relations.tsv",
        "1\tCPR:4\tY\tINHIBITOR\tArg1:T1\tArg2:T2\n" + also,
    )
    assert [pair.label for pair in read_text_task(tmp_path, TASKS["chemprot"])["train"]] == [
        "CPR:4"
    ]
    write(folder / "chemprot_training_relations.tsv", also)
    assert [pair.label for pair in read_text_task(tmp_path, TASKS["chemprot"])["train"]] == [
        "false"
    ]


def test_chemprot_of_scibert_is_a_task_beside_that_of_blurb(tmp_path: Path) -> None:
    """Compact files of both share a folder; the release has JSON lines."""
    text, task = "<< Zinc >> blocks [[ XYZ1 ]].", TASKS["chemprot-scibert"]
    row = {"id": "c-0", "marked": text, "relation": "INHIBITOR", "group": "CPR:4"}
    write_rows(tmp_path / "chemprot/scibert-train.jsonl.gz", row)
    write_rows(
        tmp_path / "chemprot/blurb-dev.jsonl.gz",
        {"id": "1.T1.T2", "doc": "1", "dummy": "a", "label": "false"},
    )
    (example,) = read_text_task(tmp_path, task)["train"]
    assert (example.key, example.texts, example.label) == ("c-0", (text,), "INHIBITOR")
    assert set(read_text_task(tmp_path, TASKS["chemprot"])) == {"dev"}
    release = json.dumps({"text": text, "label": "AGONIST", "metadata": []}) + "\n"
    write(tmp_path / "chemprot-scibert/test.txt", release * 2)
    assert [row.label for row in read_text_task(tmp_path, task)["test"]] == ["AGONIST", "AGONIST"]
    write(
        tmp_path / "chemprot-scibert/test.txt",
        release + json.dumps({"text": text, "label": "CPR:4"}),
    )
    with raises(CorpusError, "unknown_name", "label", names="CPR:4"):
        read_text_task(tmp_path, task)
    write_rows(tmp_path / "chemprot/train.jsonl.gz", {"id": "1", "dummy": "a", "label": "CPR:4"})
    (tmp_path / "chemprot/scibert-train.jsonl.gz").unlink()
    (tmp_path / "chemprot-scibert/test.txt").unlink()
    with raises(CorpusError, "not_found", "data"):  # the compact ChemProt is not SciBERT's
        read_text_task(tmp_path, task)


def test_releases_of_documents_and_questions(tmp_path: Path) -> None:
    write(tmp_path / "HoC/text/1.txt", "First.\nSecond.\n")
    labels = "< <Resisting cell death--Apoptosis AND Inducing angiogenesis<NULL "
    write(tmp_path / "HoC/labels/1.txt", labels)
    for split, ids in (("train", "1"), ("dev", ""), ("test", "")):
        write(tmp_path / f"HoC/{split}_pmid.tsv", ids)
    (document,) = read_text_task(tmp_path, TASKS["hoc"])["train"]
    assert document.label == ("inducing angiogenesis", "resisting cell death")
    answer = {"QUESTION": "Q?", "CONTEXTS": ["a", "b"], "final_decision": "no"}
    write(tmp_path / "pubmedqa/test_set.json", json.dumps({"9": answer}))
    assert read_text_task(tmp_path, TASKS["pubmedqa"])["test"][0].texts == ("Q?", "a b")
    question = {
        "id": "q",
        "type": "yesno",
        "body": "B?",
        "exact_answer": "Yes",
        "snippets": [{"text": "s"}],
    }
    write(
        tmp_path / "BioASQ/training7b.json",
        json.dumps({"questions": [question, question | {"type": "list"}]}),
    )
    for split, ids in (("train", "q"), ("dev", ""), ("test", "")):
        write(tmp_path / f"BioASQ/{split}_id.tsv", ids)
    assert read_text_task(tmp_path, TASKS["bioasq"])["train"][0].label == "yes"
    row = {"sentence1": "a", "sentence2": "b", "gold_label": "neutral", "pairID": "x"}
    write(tmp_path / "mednli/mli_train_v1.jsonl", json.dumps(row))
    assert read_text_task(tmp_path, TASKS["mednli"])["train"][0].label == "neutral"
    write(
        tmp_path / "mednli/mli_dev_v1.jsonl",
        json.dumps(row | {"sentence1": "a\u2028b\x85c"}, ensure_ascii=False),
    )
    assert read_text_task(tmp_path, TASKS["mednli"])["dev"][0].texts[0] == "a\u2028b\x85c"


def test_releases_of_similar_sentences(tmp_path: Path) -> None:
    """Three columns, with and without an empty line; BLUE's and BLURB's tables."""
    write(tmp_path / "medsts/clinicalSTS.train.txt", 'a "\u2028\tb\t3.5\n\n')
    write(
        tmp_path / "medsts/dev.tsv", "index\tsource1\tsentence1\tsentence2\tscore\n0\tx\tc\td\t2\n"
    )
    splits = read_text_task(tmp_path, TASKS["medsts"])
    found = {
        split: [(example.texts, example.label) for example in rows]
        for split, rows in splits.items()
    }
    assert found == {"train": [(('a "\u2028', "b"), 3.5)], "dev": [(("c", "d"), 2.0)]}
    write(tmp_path / "BIOSSES/test.tsv", "score\tsent1\tsent2\n1.5\te\tf\n")
    (example,) = read_text_task(tmp_path, TASKS["biosses"])["test"]
    assert (example.texts, example.label) == (("e", "f"), 1.5)
    write(tmp_path / "BIOSSES/test.tsv", "score\tfirst\tsecond\n1.5\te\tf\n")
    with raises(CorpusError, "malformed", "data"):
        read_text_task(tmp_path, TASKS["biosses"])
    write(tmp_path / "medsts/clinicalSTS.test.txt", "g\th\ni\tj\n")
    gold = write(tmp_path / "medsts/clinicalSTS.test.gs.sim.txt", "0.5\n4\n")
    assert [row.label for row in read_text_task(tmp_path, TASKS["medsts"])["test"]] == [0.5, 4.0]
    gold.write_text("0.5\n")
    with raises(CorpusError, "mismatch", "data", names="2 pairs"):
        read_text_task(tmp_path, TASKS["medsts"])
    gold.write_text("0.5\nnone\n")
    with raises(CorpusError, "malformed", "data", names=f"{gold}, line 2"):
        read_text_task(tmp_path, TASKS["medsts"])


_LISTS = {
    "ddi": ("DDICorpus", "files", "a.xml"),
    "hoc": ("HoC", "pmid", "1"),
    "bioasq": ("BioASQ", "id", "q"),
    "ebm-pico": ("ebm_nlp_2_00", "pmid", "1"),
}
_TEXT = "Secret words"


@pytest.mark.parametrize(
    ("name", "files", "place"),
    [
        ("bc2gm", {"BC2GM-IOB/train.tsv": f"a\tO\n\n{_TEXT.split()[0]}\n"}, "train.tsv, line 3"),
        ("jnlpba", {"JNLPBA/Genia4ERtask2.iob2": "a\tO\nb\n"}, "Genia4ERtask2.iob2, line 2"),
        (
            "ebm-pico",
            {
                "ebm_nlp_2_00/documents/1.tokens": _TEXT,
                "ebm_nlp_2_00/annotations/aggregated/starting_spans/outcomes/train/1.AGGREGATED.ann": "0",
            },
            "1.AGGREGATED.ann, 1 marks for 2 words of 1.tokens",
        ),
        ("gad", {"GAD/train.tsv": f"a\t1\n{_TEXT}\n"}, "train.tsv, line 2"),
        ("biosses", {"BIOSSES/dev.tsv": f"a\tb\t1\na\tb\t{_TEXT}\n"}, "dev.tsv, line 2"),
        ("medsts", {"medsts/x.test.txt": f"a\tb\t1\n\n{_TEXT}\n"}, "x.test.txt, line 3"),
        (
            "mednli",
            {"mednli/mli_dev_v1.jsonl": json.dumps({"sentence1": _TEXT})},
            "mli_dev_v1.jsonl, line 1",
        ),
        ("mednli", {"mednli/mli_dev_v1.jsonl": f'\n{{"{_TEXT}'}, "mli_dev_v1.jsonl, line 2"),
        (
            "pubmedqa",
            {"pubmedqa/test_set.json": json.dumps({"7": {"QUESTION": _TEXT}})},
            "test_set.json, entry 7",
        ),
        ("pubmedqa", {"pubmedqa/test_set.json": "[]"}, "test_set.json"),
        (
            "bioasq",
            {"BioASQ/a.json": json.dumps({"questions": [{"type": "list"}, {}]})},
            "a.json, question 2",
        ),
        (
            "ddi",
            {"DDICorpus/a.xml": '<document><sentence text="a"/><sentence/></document>'},
            "a.xml, sentence 2",
        ),
        ("ddi", {"DDICorpus/a.xml": f"<document>{_TEXT}"}, "a.xml"),
        (
            "chemprot",
            {
                "ChemProt_Corpus/chemprot_test_abstracts.tsv": "1\ta\tb\n",
                "ChemProt_Corpus/chemprot_test_entities.tsv": f"1\tT1\tGENE-Y\t0\t{_TEXT}\n",
            },
            "chemprot_test_entities.tsv, line 1",
        ),
        (
            "chemprot-scibert",
            {"chemprot-scibert/train.txt": f'{{"text": "{_TEXT}"}}'},
            "train.txt, line 1",
        ),
    ],
)
def test_damaged_rows_of_releases_are_named_and_not_quoted(
    tmp_path: Path, name: str, files: dict[str, str], place: str
) -> None:
    for file, content in files.items():
        write(tmp_path / file, content)
    if name in _LISTS:
        folder, kind, listed = _LISTS[name]
        for split in ("train", "dev", "test"):
            write(tmp_path / folder / f"{split}_{kind}.tsv", listed if split == "train" else "")
    with raises(CorpusError, "malformed", "data", names=place) as caught:
        read_text_task(tmp_path, TASKS[name])
    assert "Secret" not in str(caught.value)


def test_files_outside_of_a_release_and_endless_ones_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a name in a list, by a link, by a pipe; in compact form too."""
    xml = '<document id="d"><sentence text="a b"/></document>'
    write(tmp_path / "secret.xml", xml)
    root = tmp_path / "data/DDICorpus"
    write(root / "inside.xml", xml)
    for split in ("dev", "test"):
        write(root / f"{split}_files.tsv", "")
    (root / "link.xml").symlink_to(tmp_path / "secret.xml")
    os.mkfifo(root / "pipe.xml")
    for name, code in (
        ("../../secret.xml", "outside_folder"),
        ("link.xml", "outside_folder"),
        ("pipe.xml", "not_a_file"),
        ("none.xml", "unreadable"),
        ("train_files.tsv", "malformed"),
        ("inside.xml", "not_found"),  # it has no pairs, and so no examples
    ):
        write(root / "train_files.tsv", name)
        with raises(
            CorpusError, code, None if code in ("outside_folder", "not_a_file") else "data"
        ):
            read_text_task(root.parent, TASKS["ddi"])
    monkeypatch.setattr(releases, "MAX_FILE_BYTES", 40)
    with raises(CorpusError, "too_large"):
        read_text_task(root.parent, TASKS["ddi"])
    compact = tmp_path / "data/gad/train.jsonl.gz"
    write_rows(compact, *[{"id": 1, "dummy": "x", "label": 1}] * 50)
    with raises(CorpusError, "too_large", "data"):
        read_text_task(compact.parents[1], TASKS["gad"])
    compact.rename(tmp_path / "elsewhere.gz")
    compact.symlink_to(tmp_path / "elsewhere.gz")
    with raises(CorpusError, "outside_folder"):
        read_text_task(compact.parents[1], TASKS["gad"])


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with raises(CorpusError, "not_found", "data", names="hoc"):
        read_text_task(tmp_path, TASKS["hoc"])
    (tmp_path / "gad").mkdir()
    path = tmp_path / "gad/train.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": 1, "dummy": "x", "label": 1}\n' * 50)[:-12])
    with raises(CorpusError, "malformed", "data", names=str(path)):
        read_text_task(tmp_path, TASKS["gad"])
    write_rows(path, {"id": 1, "dummy": "x"})
    with raises(CorpusError, "malformed", "data", names=f"{path}, line 1"):
        read_text_task(tmp_path, TASKS["gad"])
    write_rows(path, {"id": 1, "dummy": "x", "label": 7})
    with raises(CorpusError, "unknown_name", "label"):
        read_text_task(tmp_path, TASKS["gad"])
    write_rows(path, {"id": 1, "dummy": "x", "label": 1})
    with raises(CorpusError, "unsupported", "relation_form"):
        read_text_task(tmp_path, TASKS["gad"], "markers")
    write_rows(tmp_path / "bc2gm/test.jsonl.gz", {"id": "s1", "tokens": ["a", "b"], "tags": ["B"]})
    with raises(CorpusError, "malformed", "data"):
        read_text_task(tmp_path, TASKS["bc2gm"])
    with raises(CorpusError, "not_found", "data", names="train_files.tsv"):
        (tmp_path / "DDICorpus").mkdir()
        read_text_task(tmp_path, TASKS["ddi"])


@pytest.mark.real
def test_counts_are_those_of_the_paper(real_data: Path) -> None:
    complete = (
        "bc5-chem",
        "ncbi-disease",
        "bc2gm",
        "jnlpba",
        "gad",
        "biosses",
        "hoc",
        "pubmedqa",
        "ddi",
    )
    for name in complete:
        task, splits = TASKS[name], read_text_task(real_data / "blurb", TASKS[name])
        counts = [len(splits[split]) for split in ("train", "dev", "test")]
        if task.kind == "entities":
            counts = [
                sum(len(entity_spans(e.label)) for e in splits[split] if isinstance(e.label, tuple))
                for split in ("train", "dev", "test")
            ]
        if name == "ddi":
            counts[0] += 1  # the interaction without a type is left out
        assert tuple(counts) == task.counts, name
    positives = read_text_task(real_data / "blurb", TASKS["chemprot-scibert"])
    assert [len(positives[split]) for split in ("train", "dev", "test")] == [4169, 2427, 3469]


@pytest.mark.real
def test_original_text_caps_relations(real_data: Path) -> None:
    """A reader that must give all pairs of a sentence one label, and knows the best one (Gu et
    al. 2021, Table 14).
    """
    test = read_text_task(real_data / "blurb", TASKS["ddi"], "original")["test"]
    by_text: dict[str, list[str]] = {}
    for example in test:
        by_text.setdefault(example.texts[0], []).append(str(example.label))
    right = sum(max(labels.count(name) for name in set(labels)) for labels in by_text.values())
    assert right / len(test) == pytest.approx(0.870, abs=5e-4)
    best, penalty, truth = 0.0, 0.5, [example.label for example in test]
    for _ in range(
        20
    ):  # F1 = 2 tp / (found + true) is largest where tp - f / 2 found is, with f the F1 itself
        chosen = {text: _best_label(labels, penalty) for text, labels in by_text.items()}
        predicted = [chosen[example.texts[0]] for example in test]
        best, penalty = summed_metric(TASKS["ddi"], truth, predicted)(), best / 2
    assert best == pytest.approx(0.550, abs=5e-4)


def _best_label(labels: list[str], penalty: float) -> str:
    gains = {name: labels.count(name) - penalty * len(labels) for name in set(labels) - {"false"}}
    name = max(gains, key=lambda each: gains[each], default="false")
    return name if gains.get(name, 0) > 0 else "false"
