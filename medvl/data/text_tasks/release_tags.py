"""Original releases of tagging tasks: one word with its tag per line, JNLPBA's IOB2 files, EBM-NLP's spans."""

from collections.abc import Sequence
from pathlib import Path

from medvl.data.text_tasks.release_files import at, listed, read_lines, read_text, split_file
from medvl.data.text_tasks.tasks import SPLITS, Split, TextExample, TextTask

_JNLPBA_TRAIN_LINES = 465_497
"""Lines of Genia4ERtask2.iob2 that are training data; the rest is the dev split of MTL-Bioinformatics and BLURB."""


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


def read_conll(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read one word with its tag per line, an empty line after each sentence; `-DOCSTART-` begins a document."""
    files = {split: path for split in SPLITS if (path := split_file(folder, split, "{}.[tc]*")) is not None}
    return {split: _sentences(path, path.stem, read_lines(path, folder), task) for split, path in files.items()}


def read_jnlpba(folder: Path, task: TextTask) -> dict[Split, list[TextExample]]:
    """Read Genia4ERtask2.iob2 and Genia4EReval2.iob2, or tables as `read_conll`."""
    training, test = folder / "Genia4ERtask2.iob2", folder / "Genia4EReval2.iob2"
    if not training.is_file():
        return read_conll(folder, task)
    lines = read_lines(training, folder)
    return {
        "train": _sentences(training, "train", lines[:_JNLPBA_TRAIN_LINES], task),
        "dev": _sentences(training, "dev", lines[_JNLPBA_TRAIN_LINES:], task, _JNLPBA_TRAIN_LINES),
        "test": _sentences(test, "test", read_lines(test, folder), task),
    }


def _sentences(path: Path, name: str, lines: Sequence[str], task: TextTask, before: int = 0) -> list[TextExample]:
    """Return the sentences of lines of `path`, which come behind `before` others."""
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

    for number, line in enumerate(lines, start=before + 1):
        if line.startswith(("-DOCSTART-", "###MEDLINE")):
            close()
            documents += 1
            document = f"{line.strip()} {documents}"  # some releases have the same line for every document
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
    """Read EBM-NLP's starting spans. Where they overlap, the last of participants, interventions, outcomes counts."""
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
                    with at(f"{path}, {len(marks)} marks for {len(words)} words of {words_path.name}"):
                        tags = [tag if mark != "0" else old for mark, old in zip(marks, tags, strict=True)]
            lines = [text for word, tag in zip(words, tags, strict=True) for text in _until_full_stop(word, tag)]
            result[split] += _sentences(words_path, document, [f"-DOCSTART- {document}", *lines], task)
    return result


def _until_full_stop(word: str, tag: str) -> list[str]:
    return [f"{word}\t{tag}", *([""] if word == "." else [])]
