"""Read a data set of `medvl.data.text_tasks.tasks`, from compact JSON lines or from the original
release.

    # {"train": [...], "dev": [...], "test": [...]}
    splits = read_text_task(Path("blurb"), TASKS["ncbi-disease"])

A folder `ROOT/NAME` with `train.jsonl.gz`, `dev.jsonl.gz`, `test.jsonl.gz` (or `.jsonl`) is read as
compact; else the release is looked for in `ROOT/NAME` and below the name of its archive. Splits
that do not exist are left out; the evaluator raises where it needs one of them.
"""

import dataclasses
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.common.untrusted import InputFolders, parse_json
from medvl.data.text_tasks import releases
from medvl.data.text_tasks.releases import (
    inference_example,
    marked_example,
    plain_tag,
    read_release,
    tagged_example,
)
from medvl.data.text_tasks.tasks import (
    SPLITS,
    TASKS,
    RelationText,
    Split,
    TextExample,
    TextTask,
    relation_text,
)
from medvl.errors import CorpusError

Splits = Mapping[Split, Sequence[TextExample]]
_LINE_LIMIT = 4_000_000  # characters of a line of JSON


def read_text_task(
    root: Path | str, task: TextTask, relation_form: RelationText = "dummies"
) -> Splits:
    """Return the examples of each split that exists.

    Args:
        root: folder with a folder for each task.
        task: one of `TASKS`.
        relation_form: form of the two mentions of a relation, see `medvl.data.text_tasks.tasks`.

    Raises CorpusError naming file, line and reason if the task is not there or a row is not as
    expected.
    """
    folder = _folder(Path(root), task)
    compact = {
        split: path for split in SPLITS if (path := _compact_file(folder, split, task)) is not None
    }
    if compact:
        splits = {
            split: [_compact_row(task, row) for row in _json_lines(path)]
            for split, path in compact.items()
        }
    else:
        splits = read_release(folder, task)
    if not any(splits.values()):
        message = (
            f"{folder} holds no examples of {task.name}; see data_cards/blurb.md for its files"
        )
        raise CorpusError(message, "not_found", field="data")
    return {
        split: [
            _prepared(example, task, relation_form)
            for example in rows
            if example.label not in task.left_out
        ]
        for split, rows in splits.items()
    }


def available_tasks(root: Path | str) -> list[str]:
    """Return the names of the tasks whose folder exists."""
    return [
        name
        for name, task in TASKS.items()
        if any(path.is_dir() for path in _candidates(Path(root), task))
    ]


def _candidates(root: Path, task: TextTask) -> list[Path]:
    return [root / name for name in dict.fromkeys((task.name, task.released_as or task.name))]


def _folder(root: Path, task: TextTask) -> Path:
    for path in _candidates(root, task):
        if path.is_dir():
            return path
    names = " or ".join(str(path) for path in _candidates(root, task))
    raise CorpusError(
        f"expected the data of {task.name} in {names}; see data_cards/blurb.md",
        "not_found",
        field="data",
    )


def _compact_file(folder: Path, split: Split, task: TextTask) -> Path | None:
    names = [f"{task.compact_prefix}{split}.jsonl.gz", f"{task.compact_prefix}{split}.jsonl"]
    if folder.name == task.name:
        names += [f"{split}.jsonl.gz", f"{split}.jsonl"]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, object) of each line, place being "FILE, line N"."""
    number = characters = 0
    try:
        with InputFolders.of(path.parent).open(path, CorpusError) as file:
            plain = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            lines = io.TextIOWrapper(plain, encoding="utf-8")
            while line := lines.readline(_LINE_LIMIT):
                number = number + 1
                characters = characters + len(line)
                if characters > releases.MAX_FILE_BYTES:
                    limit = f"expected at most {releases.MAX_FILE_BYTES} characters"
                    raise CorpusError(
                        f"{path}: {limit}; split the task's data", "too_large", field="data"
                    )
                if line.strip():
                    row = parse_json(line)
                    if not isinstance(row, dict):
                        raise ValueError("expected an object")
                    yield f"{path}, line {number}", row
    except (OSError, EOFError, ValueError, zlib.error) as error:
        message = (
            f"cannot read {path} at line {number + (not isinstance(error, ValueError))} ({error})"
        )
        raise CorpusError(message, "malformed", field="data") from error


def _compact_row(task: TextTask, placed: tuple[str, Mapping[str, Any]]) -> TextExample:
    place, row = placed
    try:
        return _COMPACT[task.kind](task, row)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        message = f"{place}: {reason}; expected the fields of {task.kind} in data_cards/blurb.md"
        raise CorpusError(message, "malformed", field="data") from error


def _tagged(task: TextTask, row: Mapping[str, Any]) -> TextExample:
    words = tuple(str(word) for word in row["tokens"])
    tags = tuple(plain_tag(str(tag), task) for tag in row["tags"])
    return tagged_example(str(row["id"]), str(row.get("doc") or row["id"]), words, tags)


def _related(task: TextTask, row: Mapping[str, Any]) -> TextExample:
    key = str(row["id"])
    label = str(row["label"])
    document = str(row.get("doc") or key)
    if "text" in row:
        (a, b), (c, d) = row["e1"], row["e2"]
        return TextExample(
            key=key,
            document=document,
            texts=(str(row["text"]),),
            label=label,
            spans=((a, b), (c, d)),
        )
    return TextExample(key=key, document=document, texts=(str(row["dummy"]),), label=label)


def _similar(task: TextTask, row: Mapping[str, Any]) -> TextExample:
    pair = (str(row["sentence1"]), str(row["sentence2"]))
    return TextExample(
        key=str(row["id"]), document=str(row["id"]), texts=pair, label=float(row["score"])
    )


def _document(task: TextTask, row: Mapping[str, Any]) -> TextExample:
    labels = tuple(task.labels[int(index)] for index in row["labels"])
    text = " ".join(str(sentence) for sentence in row["sentences"])
    return TextExample(key=str(row["id"]), document=str(row["id"]), texts=(text,), label=labels)


def _answered(task: TextTask, row: Mapping[str, Any]) -> TextExample:
    if "sentence1" in row:
        return inference_example(row)
    if "marked" in row:
        return marked_example(str(row["id"]), row)
    context = row["context"]
    context = context if isinstance(context, str) else " ".join(map(str, context))
    texts = (str(row["question"]), context)
    return TextExample(
        key=str(row["id"]), document=str(row["id"]), texts=texts, label=str(row["label"])
    )


_COMPACT: Mapping[str, Callable[[TextTask, Mapping[str, Any]], TextExample]] = {
    "entities": _tagged,
    "words": _tagged,
    "relations": _related,
    "similarity": _similar,
    "documents": _document,
    "answers": _answered,
}


def _prepared(example: TextExample, task: TextTask, form: RelationText) -> TextExample:
    """Return a relation in the requested form, and check that the label is known."""
    label_set = set(example.label) if isinstance(example.label, tuple) else {example.label}
    if task.kind != "similarity" and not label_set <= set(task.labels):
        unknown = ", ".join(sorted(str(label) for label in label_set - set(task.labels)))
        message = f"{task.name}: example {example.key} has the unknown label {unknown}"
        raise CorpusError(message, "unknown_name", field="label")
    if task.kind != "relations":
        return example
    text, spans = relation_text(example, task, form)
    return dataclasses.replace(example, texts=(text,), spans=spans)
