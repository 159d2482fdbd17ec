"""Original releases of the data sets of `medvl eval text`.

Splits that BLURB defines by lists are read from such lists beside the data: `train_pmid.tsv`,
`dev_pmid.tsv`, `test_pmid.tsv` (EBM PICO, HoC), `train_files.tsv`, ... (DDI) and `train_id.tsv`,
... (BioASQ), with ids or file names separated by commas or lines. data_cards/blurb.md lists the
files of each release.
"""

import contextlib
import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from medvl.common.text_files import decode_text
from medvl.common.untrusted import InputFolders, parse_json, parse_xml, read_limited
from medvl.data.reports.sentences import sentence_spans
from medvl.data.text_tasks.tasks import SPLITS, Split, TextExample, TextTask
from medvl.errors import CorpusError

# Files of original releases: regular files inside the release's folder, with errors that name
# file and line.
#
# Only files of at most `MAX_FILE_BYTES` whose real path is inside the release's folder are read:
# links and names with `../` cannot lead out of it.

MAX_FILE_BYTES = 1 << 28
"""Largest accepted file of a release, which is read whole; the largest of BLURB's has 40 MB."""
_SPLIT_NAMES: Mapping[Split, tuple[str, ...]] = {
    "train": ("train",),
    "dev": ("dev", "devel", "valid"),
    "test": ("test",),
}
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError, csv.Error, ElementTree.ParseError)


@contextlib.contextmanager
def at(place: Path | str) -> Iterator[None]:
    """Raise CorpusError naming `place` for unexpected content. Values are not quoted: they may
    be from a note.
    """
    try:
        yield
    except _MALFORMED as error:
        reason = (
            f"there is no field {error}"
            if isinstance(error, KeyError)
            else "this is not as published"
        )
        message = f"{place}: {reason}; compare it with data_cards/blurb.md"
        raise CorpusError(message, "malformed", field="data") from error


def read_text(path: Path, folder: Path) -> str:
    """Return the text of a file of the release in `folder`, with universal newlines."""
    try:
        with InputFolders.of(folder).open(path, CorpusError) as file:
            text = decode_text(
                read_limited(file, MAX_FILE_BYTES, CorpusError), path, CorpusError, field="data"
            )
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise CorpusError(f"cannot read {path} ({error})", "unreadable", field="data") from error


def read_lines(path: Path, folder: Path) -> list[str]:
    """Return the lines of a file; other separators (U+2028, U+0085) are characters of their
    text.
    """
    return read_text(path, folder).removesuffix("\n").split("\n")


def read_rows(path: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (place, cells) of the lines of a table that are not empty, place being "FILE, line
    N".
    """
    lines = read_lines(path, folder)
    with at(path):
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    yield from ((f"{path}, line {number}", row) for number, row in enumerate(rows, start=1) if row)


def split_file(folder: Path, split: Split, pattern: str, without: str | None = None) -> Path | None:
    """Return the file of a split; `pattern` has {} for its name, names with `without` do not
    count. None: no file.
    """
    paths = (
        path for name in _SPLIT_NAMES[split] for path in sorted(folder.glob(pattern.format(name)))
    )
    return next((path for path in paths if without is None or without not in path.name), None)


def listed(folder: Path, kind: str) -> dict[Split, list[str]]:
    """Return the ids of each split from `train_KIND.tsv`, `dev_KIND.tsv`, `test_KIND.tsv`."""
    lists: dict[Split, list[str]] = {}
    for split in SPLITS:
        path = folder / f"{split}_{kind}.tsv"
        if not path.is_file():
            message = f"expected {path}, the list of the {split} split; BLURB publishes it"
            raise CorpusError(message, "not_found", field="data")
        lists[split] = [name for name in re.split(r"[,\s]+", read_text(path, folder)) if name]
    return lists


# Original releases of tagging tasks: one word with its tag per line, JNLPBA's IOB2 files,
# EBM-NLP's spans.

_JNLPBA_TRAIN_LINES = 465_497
"""Lines of Genia4ERtask2.iob2 that are training data; the rest is the dev split of
MTL-Bioinformatics and BLURB.
"""


def plain_tag(tag: str, task: TextTask) -> str:
    """Return a tag in the task's scheme: B, I or O without the entity's type, or the element
    without its prefix.
    """
    if task.merge_types:
        return tag[:1]
    return tag.removeprefix("B-").removeprefix("I-")


def tagged_example(
    key: str, document: str, words: tuple[str, ...], tags: tuple[str, ...]
) -> TextExample:
    """Return an example of a tagging task. Raises ValueError if words and tags differ in number."""
    if len(words) != len(tags):
        raise ValueError(f"expected as many tags as words, got {len(tags)} and {len(words)}")
    return TextExample(key=key, document=document, texts=words, label=tags)


def read_conll(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read one word with its tag per line, an empty line after each sentence; `-DOCSTART-`
    begins a document.
    """
    files = {
        split: path
        for split in SPLITS
        if (path := split_file(folder, split, "{}.[tc]*")) is not None
    }
    return {
        split: _sentences(path, path.stem, read_lines(path, folder), task)
        for split, path in files.items()
    }


def read_jnlpba(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read Genia4ERtask2.iob2 and Genia4EReval2.iob2, or tables as `read_conll`."""
    training = folder / "Genia4ERtask2.iob2"
    test = folder / "Genia4EReval2.iob2"
    if not training.is_file():
        return read_conll(folder, task)
    lines = read_lines(training, folder)
    return {
        "train": _sentences(training, "train", lines[:_JNLPBA_TRAIN_LINES], task),
        "dev": _sentences(training, "dev", lines[_JNLPBA_TRAIN_LINES:], task, _JNLPBA_TRAIN_LINES),
        "test": _sentences(test, "test", read_lines(test, folder), task),
    }


def _sentences(
    path: Path, name: str, lines: Sequence[str], task: TextTask, before: int = 0
) -> list[TextExample]:
    """Return the sentences of lines of `path`, which come behind `before` others."""
    examples: list[TextExample] = []
    words: list[str] = []
    tags: list[str] = []
    document = ""
    documents = 0

    def close() -> None:
        if words:
            key = f"{name}-{len(examples)}"
            examples.append(tagged_example(key, document or key, tuple(words), tuple(tags)))
            words.clear()
            tags.clear()

    for number, line in enumerate(lines, start=before + 1):
        if line.startswith(("-DOCSTART-", "###MEDLINE")):
            close()
            documents += 1
            # some releases have the same line for every document
            document = f"{line.strip()} {documents}"
        elif not line.strip():
            close()
        else:
            with at(f"{path}, line {number}"):
                word, *_, tag = line.split("\t") if "\t" in line else line.split()
            words.append(word)
            tags.append(plain_tag(tag, task))
    close()
    return examples


def read_pico(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read EBM-NLP's starting spans. Where they overlap, the last of participants,
    interventions, outcomes counts.
    """
    spans = folder / "annotations" / "aggregated" / "starting_spans"
    if not spans.is_dir():
        return read_conll(folder, task)
    elements = {"participants": "PAR", "interventions": "INT", "outcomes": "OUT"}
    result: dict[Split, list[TextExample]] = {}
    for split, documents in listed(folder, "pmid").items():
        below = "test/gold" if split == "test" else "train"
        result[split] = []
        for document in documents:
            words_path = folder / "documents" / f"{document}.tokens"
            words = read_text(words_path, folder).split()
            tags = ["O"] * len(words)
            for element, tag in elements.items():
                path = next((spans / element / below).glob(f"{document}.*ann"), None)
                if path is not None:
                    marks = read_text(path, folder).split()
                    with at(
                        f"{path}, {len(marks)} marks for {len(words)} words of {words_path.name}"
                    ):
                        tags = [
                            tag if mark != "0" else old
                            for mark, old in zip(marks, tags, strict=True)
                        ]
            lines = [
                text
                for word, tag in zip(words, tags, strict=True)
                for text in _until_full_stop(word, tag)
            ]
            result[split] += _sentences(
                words_path, document, [f"-DOCSTART- {document}", *lines], task
            )
    return result


def _until_full_stop(word: str, tag: str) -> list[str]:
    return [f"{word}\t{tag}", *([""] if word == "." else [])]


_GAD_TRAIN = 4261
"""Lines of fold 1's train.tsv that BLURB trains on; the rest is its dev split."""


def read_release(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Return the examples of an original release. Raises CorpusError naming what is missing or
    malformed.
    """
    reader = _READERS.get(task.name, read_conll if task.kind in ("entities", "words") else None)
    if reader is None:
        raise CorpusError(
            f"{task.name} has no reader of an original release", "unsupported", field="data"
        )
    return reader(folder, task)


def inference_example(row: Mapping[str, Any]) -> TextExample:
    """Return an example of MedNLI's or RadNLI's JSON lines."""
    key = str(row.get("pairID") or row.get("pair_id") or row["id"])
    label = str(row.get("gold_label") or row["label"])
    return TextExample(
        key=key, document=key, texts=(str(row["sentence1"]), str(row["sentence2"])), label=label
    )


def _chemprot(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read BioCreative's tables; sentences are split by medvl, so the number of pairs differs
    slightly from BLURB's.

    Of several relations of a pair the last of the five classes counts. BLURB takes the last of all,
    and so makes a pair "false" that also has a relation of another class.
    """
    result: dict[Split, list[TextExample]] = {}
    names: Mapping[Split, str] = {"train": "training", "dev": "development", "test": "test"}
    for split, name in names.items():
        abstracts = next(iter(sorted(folder.rglob(f"chemprot_{name}_abstracts*.tsv"))), None)
        if abstracts is None:
            continue
        ending = abstracts.name.removeprefix(f"chemprot_{name}_abstracts")
        entities = _chemprot_entities(
            abstracts.with_name(f"chemprot_{name}_entities{ending}"), folder
        )
        classes = _chemprot_classes(
            abstracts.with_name(f"chemprot_{name}_relations{ending}"), folder, task
        )
        result[split] = []
        for place, row in read_rows(abstracts, folder):
            with at(place):
                document, title, abstract, *_ = row
            document_entities = entities.get(document, [])
            result[split] += _chemprot_pairs(
                document, f"{title} {abstract}", document_entities, classes
            )
    return result


def _chemprot_entities(path: Path, folder: Path) -> dict[str, list[tuple[str, str, int, int]]]:
    """Return the mentions of each document: (id, type, start, end)."""
    entities: dict[str, list[tuple[str, str, int, int]]] = {}
    for place, row in read_rows(path, folder):
        with at(place):
            document, entity, kind, start, end, *_ = row
            entities.setdefault(document, []).append((entity, kind, int(start), int(end)))
    return entities


def _chemprot_classes(path: Path, folder: Path, task: TextTask) -> dict[tuple[str, str, str], str]:
    """Return (document, chemical, gene) -> class, of the classes of the task."""
    classes: dict[tuple[str, str, str], str] = {}
    for place, row in read_rows(path, folder):
        with at(place):
            if row[1] in task.labels:
                classes[row[0], row[4].split(":", 1)[1], row[5].split(":", 1)[1]] = row[1]
    return classes


def _chemprot_pairs(
    document: str,
    text: str,
    entities: Sequence[tuple[str, str, int, int]],
    classes: Mapping[tuple[str, str, str], str],
) -> Iterator[TextExample]:
    """Yield the pairs of a chemical and a gene of one sentence."""
    for start, end in sentence_spans(text):
        within = [entity for entity in entities if start <= entity[2] and entity[3] <= end]
        for chemical in (entity for entity in within if entity[1] == "CHEMICAL"):
            for gene in (entity for entity in within if entity[1] != "CHEMICAL"):
                first, second = sorted(
                    (entity[2] - start, entity[3] - start) for entity in (chemical, gene)
                )
                yield TextExample(
                    key=f"{document}.{chemical[0]}.{gene[0]}",
                    document=document,
                    texts=(text[start:end],),
                    label=classes.get((document, chemical[0], gene[0]), "false"),
                    spans=(first, second),
                )


def _scibert_chemprot(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read SciBERT's train.txt, dev.txt, test.txt: JSON lines of a text and its label."""
    return _json_splits(folder, "{}.txt", marked_example)


def marked_example(key: str, row: Mapping[str, Any]) -> TextExample:
    """Return an example of SciBERT's ChemProt, with its mentions in << >> and [[ ]]."""
    text, label = (row["text"], row["label"]) if "text" in row else (row["marked"], row["relation"])
    return TextExample(key=key, document=key, texts=(str(text),), label=str(label))


def _ddi(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read the XML files that the lists name; a discontinuous mention runs from its first to its
    last character.
    """
    return {
        split: [
            example
            for name in names
            for example in _ddi_document(folder / name.lstrip("/"), folder)
        ]
        for split, names in listed(folder, "files").items()
    }


def _ddi_document(path: Path, folder: Path) -> list[TextExample]:
    text = read_text(path, folder)
    with at(path):
        root = parse_xml(text.encode())
        document = root.attrib.get("id", path.stem)
    return [
        pair
        for number, sentence in enumerate(root, 1)
        for pair in _ddi_pairs(sentence, document, path, number)
    ]


def _ddi_pairs(
    sentence: ElementTree.Element, document: str, path: Path, number: int
) -> Iterator[TextExample]:
    with at(f"{path}, sentence {number}"):
        text = sentence.attrib["text"]
        spans = {
            entity.attrib["id"]: [
                int(number) for number in re.findall(r"\d+", entity.attrib["charOffset"])
            ]
            for entity in sentence.findall("entity")
        }
        for pair in sentence.findall("pair"):
            first, second = sorted((spans[pair.attrib["e1"]], spans[pair.attrib["e2"]]))
            yield TextExample(
                key=pair.attrib["id"],
                document=document,
                texts=(text,),
                label=pair.attrib.get("type", "None") if pair.attrib["ddi"] == "true" else "false",
                spans=((first[0], first[-1] + 1), (second[0], second[-1] + 1)),
            )


def _gad(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read fold 1 of BioBERT's ten folds."""
    fold = folder / "1" if (folder / "1").is_dir() else folder
    training = _gad_rows("train", fold / "train.tsv", folder)
    return {
        "train": training[:_GAD_TRAIN],
        "dev": training[_GAD_TRAIN:],
        "test": [
            example
            for example in _gad_rows("test", fold / "test.tsv", folder)
            if example.label in task.labels
        ],
    }


def _gad_rows(split: str, path: Path, folder: Path) -> list[TextExample]:
    examples: list[TextExample] = []
    for place, row in read_rows(path, folder):
        if row[-2:] != ["sentence", "label"]:
            key = f"gad-{split}-{len(examples)}"
            with at(place):
                examples.append(
                    TextExample(key=key, document=key, texts=(row[-2],), label=row[-1].strip())
                )
    return examples


def _biosses(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read BLUE's or BLURB's tables: columns sentence1, sentence2 (or sent1, sent2) and score."""
    return _similarity(folder, "{}.tsv")


def _medsts(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read lines of two sentences and a score, separated by tabs; or BLUE's tables, as for BIOSSES.

    Scores of the test set may be in a file of their own, one per line, such as
    clinicalSTS2019.test.gs.sim.txt.
    """
    return _similarity(folder, "*{}*.t[sx][vt]")


def _similarity(folder: Path, pattern: str) -> dict[Split, list[TextExample]]:
    result: dict[Split, list[TextExample]] = {}
    for split in SPLITS:
        path = split_file(folder, split, pattern, without=".gs.")
        if path is not None:
            gold = split_file(folder, split, "*{}*.gs.*")
            result[split] = _scored_pairs(
                split, path, folder, None if gold is None else list(read_rows(gold, folder))
            )
    return result


def _scored_pairs(
    split: Split, path: Path, folder: Path, gold: Sequence[tuple[str, list[str]]] | None
) -> list[TextExample]:
    rows = list(read_rows(path, folder))
    a = 0
    b = 1
    score = 2
    if rows and "score" in rows[0][1]:
        (place, header), *rows = rows
        names = ("sentence1", "sentence2") if "sentence1" in header else ("sent1", "sent2")
        with at(place):
            a, b, score = (header.index(name) for name in (*names, "score"))
    if gold is not None and len(gold) != len(rows):
        message = (
            f"expected a score for each of the {len(rows)} pairs of {path}, got "
            f"{len(gold)} lines beside it"
        )
        raise CorpusError(message, "mismatch", field="data")
    examples: list[TextExample] = []
    for number, (place, row) in enumerate(rows):
        where, cell = (place, row[score:]) if gold is None else gold[number]
        with at(where):
            value = float(cell[0])
        key = f"{split}-{number}"
        with at(place):
            examples.append(TextExample(key=key, document=key, texts=(row[a], row[b]), label=value))
    return examples


def _hoc(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read `text/ID.txt` and `labels/ID.txt`; a document's labels are the union of its
    sentences'.
    """
    result: dict[Split, list[TextExample]] = {}
    for split, documents in listed(folder, "pmid").items():
        result[split] = []
        for document in documents:
            text = " ".join(read_text(folder / "text" / f"{document}.txt", folder).split())
            marks = re.split(r"<|\bAND\b", read_text(folder / "labels" / f"{document}.txt", folder))
            named = {mark.split("--")[0].strip().lower() for mark in marks}
            labels = tuple(label for label in task.labels if label in named)
            result[split].append(
                TextExample(key=document, document=document, texts=(text,), label=labels)
            )
    return result


def _pubmedqa(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read the output of PubMedQA's split_dataset.py: fold 0 and the test set."""
    places: Mapping[Split, str] = {
        "train": "pqal_fold0/train_set.json",
        "dev": "pqal_fold0/dev_set.json",
        "test": "test_set.json",
    }
    data = folder / "data" if (folder / "data").is_dir() else folder
    result: dict[Split, list[TextExample]] = {}
    for split, name in places.items():
        path = data / name
        if path.is_file():
            text = read_text(path, folder)
            with at(path):
                rows = list(parse_json(text).items())
            result[split] = [_pubmedqa_example(path, key, row) for key, row in rows]
    return result


def _pubmedqa_example(path: Path, key: str, row: Mapping[str, Any]) -> TextExample:
    with at(f"{path}, entry {key}"):
        texts = (row["QUESTION"], " ".join(row["CONTEXTS"]))
        return TextExample(key=key, document=key, texts=texts, label=row["final_decision"])


def _bioasq(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read the yes-or-no questions of the training file and the enriched test files, split by
    BLURB's lists.
    """
    questions = {
        example.key: example
        for path in sorted(folder.rglob("*.json"))
        for example in _bioasq_questions(path, folder)
    }
    result: dict[Split, list[TextExample]] = {}
    for split, keys in listed(folder, "id").items():
        absent = [key for key in keys if key not in questions]
        if absent:
            message = (
                f"{folder}: {len(absent)} questions of {split}_id.tsv are in no JSON "
                f"file, the first is {absent[0]}"
            )
            raise CorpusError(message, "not_found", field="data")
        result[split] = [questions[key] for key in keys]
    return result


def _bioasq_questions(path: Path, folder: Path) -> Iterator[TextExample]:
    text = read_text(path, folder)
    with at(path):
        rows = parse_json(text)["questions"]
    for number, row in enumerate(rows, start=1):
        with at(f"{path}, question {number}"):
            if row["type"] == "yesno":
                texts = (row["body"], " ".join(snippet["text"] for snippet in row["snippets"]))
                yield TextExample(
                    key=row["id"],
                    document=row["id"],
                    texts=texts,
                    label=row["exact_answer"].lower(),
                )


def _inference(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read JSON lines of sentence1, sentence2 and gold_label, such as mli_train_v1.jsonl and
    radnli_test_v1.jsonl.
    """
    return _json_splits(folder, "*_{}_*.jsonl", lambda key, row: inference_example(row))


def _json_splits(
    folder: Path, pattern: str, read: Callable[[str, Mapping[str, Any]], TextExample]
) -> dict[Split, list[TextExample]]:
    """Read JSON lines of each split; `read` makes an example of a key of medvl's and an object."""
    result: dict[Split, list[TextExample]] = {}
    for split in SPLITS:
        if (path := split_file(folder, split, pattern)) is not None:
            result[split] = []
            for number, line in enumerate(read_lines(path, folder), start=1):
                with at(f"{path}, line {number}"):
                    if line.strip():
                        result[split].append(read(f"{split}-{number}", parse_json(line)))
    return result


_READERS: Mapping[str, Callable[[Path, TextTask], dict[Split, list[TextExample]]]] = {
    "jnlpba": read_jnlpba,
    "ebm-pico": read_pico,
    "chemprot": _chemprot,
    "chemprot-scibert": _scibert_chemprot,
    "ddi": _ddi,
    "gad": _gad,
    "biosses": _biosses,
    "medsts": _medsts,
    "hoc": _hoc,
    "pubmedqa": _pubmedqa,
    "bioasq": _bioasq,
    "mednli": _inference,
    "radnli": _inference,
}
