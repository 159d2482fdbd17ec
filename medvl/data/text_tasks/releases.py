"""Original releases of the data sets of `medvl eval text`.

Splits that BLURB defines by lists are read from such lists beside the data: `train_pmid.tsv`, `dev_pmid.tsv`,
`test_pmid.tsv` (EBM PICO, HoC), `train_files.tsv`, ... (DDI) and `train_id.tsv`, ... (BioASQ), with ids or file names
separated by commas or lines. data_cards/blurb.md says which files a release has. Only regular files of at most
`MAX_FILE_BYTES` whose real path is inside the release's folder are read: links and names with `../` cannot lead out of
it.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from medvl.common.untrusted import InputFolders, parse_json, parse_xml, read_limited
from medvl.data.reports.sentences import sentence_spans
from medvl.data.text_tasks.tasks import SPLITS, Split, TextExample, TextTask
from medvl.errors import CorpusError

MAX_FILE_BYTES = 1 << 28
"""Largest accepted file of a release, which is read whole; the largest of BLURB's has 40 MB."""
_SPLIT_NAMES: Mapping[Split, tuple[str, ...]] = {
    "train": ("train",),
    "dev": ("dev", "devel", "valid"),
    "test": ("test",),
}
_JNLPBA_TRAIN_LINES = 465_497
"""Lines of Genia4ERtask2.iob2 that are training data; the rest is the dev split of MTL-Bioinformatics and BLURB."""
_GAD_TRAIN = 4261
"""Lines of fold 1's train.tsv that BLURB trains on; the rest is its dev split."""


def read_release(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Return the examples of an original release. Raises CorpusError naming what is missing or malformed."""
    reader = _READERS.get(task.name, _conll if task.kind in ("entities", "words") else None)
    if reader is None:
        raise CorpusError(f"{task.name} has no reader of an original release", "unsupported", field="data")
    try:
        return reader(folder, task)
    except (AttributeError, LookupError, TypeError, ValueError, csv.Error, ElementTree.ParseError) as error:
        message = f"{folder}: expected {task.name} as published; compare it with data_cards/blurb.md"
        raise CorpusError(message, "malformed", field="data") from error


def plain_tag(tag: str, task: TextTask) -> str:
    """Return a tag in the task's scheme: B, I or O without the entity's type, or the element without its prefix."""
    if task.merge_types:
        return tag[:1]
    return tag.removeprefix("B-").removeprefix("I-")


def tagged_example(key: str, document: str, words: tuple[str, ...], tags: tuple[str, ...]) -> TextExample:
    """Return an example of a tagging task. Raises ValueError if words and tags differ in number."""
    if len(words) != len(tags):
        raise ValueError(f"expected as many tags as words, got {len(tags)} and {len(words)}")
    return TextExample(key=key, document=document, texts=words, label=tags)


def inference_example(row: Mapping[str, Any]) -> TextExample:
    """Return an example of MedNLI's or RadNLI's JSON lines."""
    key = str(row.get("pairID") or row.get("pair_id") or row["id"])
    label = str(row.get("gold_label") or row["label"])
    return TextExample(key=key, document=key, texts=(str(row["sentence1"]), str(row["sentence2"])), label=label)


def _read(path: Path, folder: Path) -> str:
    """Return the text of a file of the release in `folder`, with universal newlines."""
    try:
        with InputFolders.of(folder).open(path, CorpusError) as file:
            text = read_limited(file, MAX_FILE_BYTES, CorpusError).decode("utf-8")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot read {path} ({error})", "unreadable", field="data") from error


def _lines(path: Path, folder: Path) -> list[str]:
    """Return the lines of a file; other separators (U+2028, U+0085) are characters of their text."""
    return _read(path, folder).removesuffix("\n").split("\n")


def _file(folder: Path, split: Split, pattern: str) -> Path | None:
    """Return the file of a split; `pattern` has {} for its name. None: there is none."""
    found = (path for name in _SPLIT_NAMES[split] for path in sorted(folder.glob(pattern.format(name))))
    return next(found, None)


def _listed(folder: Path, kind: str) -> dict[Split, list[str]]:
    """Return the ids of each split from `train_KIND.tsv`, `dev_KIND.tsv`, `test_KIND.tsv`."""
    lists: dict[Split, list[str]] = {}
    for split in SPLITS:
        path = folder / f"{split}_{kind}.tsv"
        if not path.is_file():
            message = f"expected {path}, the list of the {split} split; BLURB publishes it"
            raise CorpusError(message, "not_found", field="data")
        lists[split] = [name for name in re.split(r"[,\s]+", _read(path, folder)) if name]
    return lists


def _conll(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read one word with its tag per line, an empty line after each sentence; `-DOCSTART-` begins a document."""
    files = {split: path for split in SPLITS if (path := _file(folder, split, "{}.[tc]*")) is not None}
    return {split: _sentences(path.stem, _lines(path, folder), task) for split, path in files.items()}


def _jnlpba(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    training, test = folder / "Genia4ERtask2.iob2", folder / "Genia4EReval2.iob2"
    if not training.is_file():
        return _conll(folder, task)
    lines = _lines(training, folder)
    return {
        "train": _sentences("train", lines[:_JNLPBA_TRAIN_LINES], task),
        "dev": _sentences("dev", lines[_JNLPBA_TRAIN_LINES:], task),
        "test": _sentences("test", _lines(test, folder), task),
    }


def _sentences(name: str, lines: Iterable[str], task: TextTask) -> list[TextExample]:
    examples: list[TextExample] = []
    words: list[str] = []
    tags: list[str] = []
    document, documents = "", 0

    def close() -> None:
        if words:
            key = f"{name}-{len(examples)}"
            examples.append(tagged_example(key, document or key, tuple(words), tuple(tags)))
            words.clear()
            tags.clear()

    for line in lines:
        if line.startswith(("-DOCSTART-", "###MEDLINE")):
            close()
            documents += 1
            document = f"{line.strip()} {documents}"  # some releases have the same line for every document
        elif not line.strip():
            close()
        else:
            word, *_, tag = line.rstrip("\n").split("\t") if "\t" in line else line.split()
            words.append(word)
            tags.append(plain_tag(tag, task))
    close()
    return examples


def _pico(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read EBM-NLP's starting spans. Where they overlap, the last of participants, interventions, outcomes counts."""
    spans = folder / "annotations" / "aggregated" / "starting_spans"
    if not spans.is_dir():
        return _conll(folder, task)
    elements = {"participants": "PAR", "interventions": "INT", "outcomes": "OUT"}
    result: dict[Split, list[TextExample]] = {}
    for split, documents in _listed(folder, "pmid").items():
        below = "test/gold" if split == "test" else "train"
        result[split] = []
        for document in documents:
            words = _read(folder / "documents" / f"{document}.tokens", folder).split()
            tags = ["O"] * len(words)
            for element, tag in elements.items():
                path = next((spans / element / below).glob(f"{document}.*ann"), None)
                marks = _read(path, folder).split() if path else []
                tags = [tag if mark != "0" else old for mark, old in zip(marks, tags, strict=True)] if marks else tags
            lines = [text for word, tag in zip(words, tags, strict=True) for text in _until_full_stop(word, tag)]
            sentences = _sentences(document, [f"-DOCSTART- {document}", *lines], task)
            result[split] += sentences
    return result


def _until_full_stop(word: str, tag: str) -> list[str]:
    return [f"{word}\t{tag}", *([""] if word == "." else [])]


def _chemprot(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read BioCreative's tables; sentences are split by medvl, so the number of pairs differs slightly from BLURB's.

    Of several relations of a pair the last of the five classes counts. BLURB takes the last of all, and so makes a pair
    "false" that also has a relation of another class.
    """
    result: dict[Split, list[TextExample]] = {}
    for split, name in (("train", "training"), ("dev", "development"), ("test", "test")):
        abstracts = next(iter(sorted(folder.rglob(f"chemprot_{name}_abstracts*.tsv"))), None)
        if abstracts is None:
            continue
        ending = abstracts.name.removeprefix(f"chemprot_{name}_abstracts")
        entities = _rows(abstracts.with_name(f"chemprot_{name}_entities{ending}"), folder)
        relations = _rows(abstracts.with_name(f"chemprot_{name}_relations{ending}"), folder)
        classes = {
            (row[0], row[4].split(":", 1)[1], row[5].split(":", 1)[1]): row[1]
            for row in relations
            if row[1] in task.labels
        }
        found: dict[str, list[tuple[str, str, int, int]]] = {}
        for document, entity, kind, start, end, *_ in entities:
            found.setdefault(document, []).append((entity, kind, int(start), int(end)))
        result[_split(split)] = [
            example
            for document, title, abstract, *_ in _rows(abstracts, folder)
            for example in _chemprot_pairs(document, f"{title} {abstract}", found.get(document, []), classes, task)
        ]
    return result


def _chemprot_pairs(
    document: str,
    text: str,
    entities: Sequence[tuple[str, str, int, int]],
    classes: Mapping[tuple[str, str, str], str],
    task: TextTask,
) -> Iterator[TextExample]:
    """Yield the pairs of a chemical and a gene of one sentence."""
    for start, end in sentence_spans(text):
        within = [entity for entity in entities if start <= entity[2] and entity[3] <= end]
        for chemical in (entity for entity in within if entity[1] == "CHEMICAL"):
            for gene in (entity for entity in within if entity[1] != "CHEMICAL"):
                label = classes.get((document, chemical[0], gene[0]), "false")
                first, second = sorted((entity[2] - start, entity[3] - start) for entity in (chemical, gene))
                yield TextExample(
                    key=f"{document}.{chemical[0]}.{gene[0]}",
                    document=document,
                    texts=(text[start:end],),
                    label=label,
                    spans=(first, second),
                )


def _rows(path: Path, folder: Path) -> list[list[str]]:
    return list(csv.reader(_lines(path, folder), delimiter="\t", quoting=csv.QUOTE_NONE))


def _ddi(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read the XML files that the lists name; a discontinuous mention runs from its first to its last character."""
    return {
        split: [example for name in names for example in _ddi_document(folder / name.lstrip("/"), folder)]
        for split, names in _listed(folder, "files").items()
    }


def _ddi_document(path: Path, folder: Path) -> Iterator[TextExample]:
    root = parse_xml(_read(path, folder).encode())
    for sentence in root:
        text = sentence.attrib["text"]
        spans = {
            entity.attrib["id"]: [int(number) for number in re.findall(r"\d+", entity.attrib["charOffset"])]
            for entity in sentence.findall("entity")
        }
        for pair in sentence.findall("pair"):
            first, second = sorted((spans[pair.attrib["e1"]], spans[pair.attrib["e2"]]))
            yield TextExample(
                key=pair.attrib["id"],
                document=root.attrib.get("id", path.stem),
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
        "test": [example for example in _gad_rows("test", fold / "test.tsv", folder) if example.label in task.labels],
    }


def _gad_rows(split: str, path: Path, folder: Path) -> list[TextExample]:
    rows = _rows(path, folder)
    return [
        TextExample(key=f"gad-{split}-{n}", document=f"gad-{split}-{n}", texts=(row[-2],), label=row[-1].strip())
        for n, row in enumerate(rows)
        if row[-2:] != ["sentence", "label"]
    ]


def _biosses(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read BLUE's or BLURB's tables: columns sentence1, sentence2 (or sent1, sent2) and score."""
    return _similarity(folder, "{}.tsv")


def _medsts(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read lines of two sentences and a score, separated by tabs; or BLUE's tables, as for BIOSSES."""
    return _similarity(folder, "*{}*.t[sx][vt]")


def _similarity(folder: Path, pattern: str) -> dict[Split, list[TextExample]]:
    result: dict[Split, list[TextExample]] = {}
    for split in SPLITS:
        if (path := _file(folder, split, pattern)) is not None:
            rows = [row for row in _rows(path, folder) if row]
            a, b, score = 0, 1, 2
            if rows and "score" in rows[0]:
                header, *rows = rows
                names = ("sentence1", "sentence2") if "sentence1" in header else ("sent1", "sent2")
                a, b, score = (header.index(name) for name in (*names, "score"))
            keys = [f"{split}-{n}" for n in range(len(rows))]
            result[split] = [
                TextExample(key=key, document=key, texts=(row[a], row[b]), label=float(row[score]))
                for key, row in zip(keys, rows, strict=True)
            ]
    return result


def _hoc(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read `text/ID.txt` and `labels/ID.txt`; a document's labels are the union of its sentences'."""
    result: dict[Split, list[TextExample]] = {}
    for split, documents in _listed(folder, "pmid").items():
        result[split] = []
        for document in documents:
            text = " ".join(_read(folder / "text" / f"{document}.txt", folder).split())
            marks = re.split(r"<|\bAND\b", _read(folder / "labels" / f"{document}.txt", folder))
            named = {mark.split("--")[0].strip().lower() for mark in marks}
            labels = tuple(label for label in task.labels if label in named)
            result[split].append(TextExample(key=document, document=document, texts=(text,), label=labels))
    return result


def _pubmedqa(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read what PubMedQA's split_dataset.py writes: fold 0 and the test set."""
    places: Mapping[Split, str] = {
        "train": "pqal_fold0/train_set.json",
        "dev": "pqal_fold0/dev_set.json",
        "test": "test_set.json",
    }
    data = folder / "data" if (folder / "data").is_dir() else folder
    result: dict[Split, list[TextExample]] = {}
    for split, name in places.items():
        if (data / name).is_file():
            rows = parse_json(_read(data / name, folder))
            result[split] = [
                TextExample(
                    key=key,
                    document=key,
                    texts=(row["QUESTION"], " ".join(row["CONTEXTS"])),
                    label=row["final_decision"],
                )
                for key, row in rows.items()
            ]
    return result


def _bioasq(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read the yes-or-no questions of the training file and the enriched test files, split by BLURB's lists."""
    questions = {
        row["id"]: TextExample(
            key=row["id"],
            document=row["id"],
            texts=(row["body"], " ".join(snippet["text"] for snippet in row["snippets"])),
            label=row["exact_answer"].lower(),
        )
        for path in sorted(folder.rglob("*.json"))
        for row in parse_json(_read(path, folder))["questions"]
        if row["type"] == "yesno"
    }
    return {split: [questions[key] for key in keys] for split, keys in _listed(folder, "id").items()}


def _inference(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read JSON lines of sentence1, sentence2 and gold_label, such as mli_train_v1.jsonl and radnli_test_v1.jsonl."""
    files = {split: path for split in SPLITS if (path := _file(folder, split, "*_{}_*.jsonl")) is not None}
    return {
        split: [inference_example(parse_json(line)) for line in _lines(path, folder) if line.strip()]
        for split, path in files.items()
    }


def _split(name: str) -> Split:
    return next(split for split in SPLITS if split == name)


_READERS: Mapping[str, Callable[[Path, TextTask], dict[Split, list[TextExample]]]] = {
    "jnlpba": _jnlpba,
    "ebm-pico": _pico,
    "chemprot": _chemprot,
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
