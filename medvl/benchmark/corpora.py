"""Data of a benchmark: what a corpus lacks is made by the commands of its configuration."""

import contextlib
import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.benchmark.config import CorpusConfig, MakeStep, expanded
from medvl.benchmark.real_tables import write_table
from medvl.benchmark.settings import Run
from medvl.benchmark.tasks import command_arguments, evaluation_tasks, tested_folder
from medvl.common.files import RunLock, write_atomic
from medvl.data.shards.format import MANIFEST, Manifest
from medvl.errors import CorpusError, EvaluationError

Command = Callable[[Sequence[str]], None]
"""Function that runs a command of medvl."""


def medvl_command(arguments: Sequence[str]) -> None:
    """Run a command of medvl in a process of its own. Raises CorpusError where it fails."""
    ended = subprocess.run([sys.executable, "-m", "medvl", *arguments], check=False)
    if ended.returncode:
        message = (
            f"medvl {shlex.join(arguments)} ended with status {ended.returncode}; see its "
            f"messages above"
        )
        raise CorpusError(message, "missing", field="corpora")


def missing_steps(corpus: CorpusConfig, runs: Sequence[Run] = ()) -> list[list[str]]:
    """Return the commands that make what a located corpus lacks and these runs need; without
    runs, all of it.
    """
    assert corpus.root is not None
    field = f"corpora.{corpus.name}.make"
    return [
        arguments
        for step in _steps(corpus, runs)
        for arguments in _commands(step, corpus.root, field)
    ]


def _commands(step: MakeStep, root: str, field: str) -> list[list[str]]:
    """Return the arguments of each command; a variable is a part of one argument, whatever its
    value has.
    """
    return [
        [expanded(part, field).replace("{root}", root) for part in shlex.split(line)]
        for line in step.run
    ]


def _steps(corpus: CorpusConfig, runs: Sequence[Run]) -> list[MakeStep]:
    """Return the steps that the runs need whose file is missing, or whose commands did not all
    end.
    """
    root = Path(corpus.root or "")
    return [
        step
        for step in _needed_steps(corpus, runs)
        if not (root / step.creates).exists() or _mark(root, step).exists()
    ]


def _needed_steps(corpus: CorpusConfig, runs: Sequence[Run]) -> list[MakeStep]:
    """Return the steps that make what the runs read, and what those steps read; without runs, all
    steps.

    A step makes the entries of the corpus's root that its commands are the first to name.
    """
    if not runs:
        return list(corpus.make)
    root = os.path.normpath(corpus.root or "")
    made: set[str] = set()
    entries: list[tuple[MakeStep, set[str], set[str]]] = []
    for step in corpus.make:
        words = [word for line in step.run for word in shlex.split(line) if "{root}" in word]
        named = {_entry(word.partition("{root}")[2].lstrip("/"), root) for word in words}
        tables = () if step.table is None else (f"{step.table}.jsonl", f"{step.table}.json", "text")
        new = {_entry(step.creates, root), *tables, *named} - made
        entries.append((step, new, named & made))
        made |= new
    needed = {_entry(path, root) for run in runs for _, path in _read_by(run)}
    chosen: list[MakeStep] = []
    for step, new, read in reversed(entries):  # a step reads what earlier ones make
        if new & needed or "" in new or not new:
            chosen.insert(0, step)
            needed |= read
    return chosen


def _entry(path: str, root: str) -> str:
    """Return the entry of a folder that a path leads into; "" for the folder itself, and an
    outer path as it is.
    """
    whole = Path(os.path.normpath(Path(root) / path))
    if not whole.is_relative_to(root):
        return str(whole)
    return next(iter(whole.relative_to(root).parts), "")


def _read_by(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (field, path) of what a run reads of its corpus."""
    corpus = run.corpus
    reads_words = run.family == "report"
    yield ("reports" if reads_words else "pairs"), run.train_shards
    if run.tokenizer is not None:
        yield "words" if reads_words else "tokenizer", run.tokenizer
    yield from (("extra_train", path) for path in corpus.extra_train)
    yield from (
        ("settings", text.replace("{root}", str(corpus.root))) for text in _texts(run.settings)
    )
    tasks = evaluation_tasks()
    for task in run.tasks:
        if task in tasks:
            yield from ((name, getattr(corpus, name)) for name in tasks[task][1].needs)
            yield "pairs", str(tested_folder(run, task))
        else:
            with contextlib.suppress(EvaluationError):  # the corpus lacks what the command reads
                yield from (
                    ("commands", word)
                    for word in command_arguments(run, task)
                    if word.startswith("/")
                )
    if corpus.prompts.endswith(".json"):
        yield "prompts", corpus.prompts


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts within JSON values that may be a path of a corpus."""
    if isinstance(value, str):
        if value.startswith(("{root}", "/")):
            yield value
    elif isinstance(value, Mapping):
        yield from (text for each in value.values() for text in _texts(each))
    elif isinstance(value, list | tuple):
        yield from (text for each in value for text in _texts(each))


def _mark(root: Path, step: MakeStep) -> Path:
    """Return the file that exists while a step is made: what it creates may exist before its
    commands have ended.
    """
    return root / ".making" / step.creates.replace("/", "-")


def make_corpus(
    corpus: CorpusConfig, run: Command = medvl_command, *, runs: Sequence[Run] = ()
) -> None:
    """Make what a located corpus lacks for these runs.

    Raises CorpusError where a command fails, where another process makes it, or where a folder is
    missing that no command makes.
    """
    assert corpus.root is not None
    if _steps(corpus, runs):
        with RunLock(Path(corpus.root), error=CorpusError, field="corpora"):
            _make(corpus, Path(corpus.root), run, runs)
    for name, path in itertools.chain(_needed(corpus, runs), _validation(corpus, runs)):
        if not path.exists():
            message = (
                f"corpus {corpus.name} has no {path}; make it, or give another folder in "
                f"corpora.{name}"
            )
            raise CorpusError(message, "not_found", field=f"corpora.{name}")


def _make(corpus: CorpusConfig, root: Path, run: Command, runs: Sequence[Run]) -> None:
    steps = [
        (step, _commands(step, str(root), f"corpora.{corpus.name}.make"))
        for step in _steps(corpus, runs)
    ]
    salt = root / "salt"
    if "MEDVL_SALT_FILE" not in os.environ and not salt.exists():  # as `medvl phantom quickstart`
        write_atomic(salt, f"{0:064d}\n", permissions=0o600)
    given = os.environ.get("MEDVL_SALT_FILE")
    os.environ["MEDVL_SALT_FILE"] = given or str(salt)
    try:
        for step, _ in steps:
            if step.table is not None:
                write_table(step.table, root)
        for step, commands in steps:
            mark = _mark(root, step)
            mark.parent.mkdir(exist_ok=True)
            write_atomic(mark, "")
            for arguments in commands:
                run(arguments)
            mark.unlink()
    finally:
        if given is None:
            del os.environ["MEDVL_SALT_FILE"]


def _validation(corpus: CorpusConfig, runs: Sequence[Run]) -> Iterator[tuple[str, Path]]:
    """Yield (field, file) of the validation data that trainings read, and probes of a corpus
    with labels.
    """
    for one in runs:
        home = Path(one.train_shards).parent / "validate"
        if one.settings["data"].get("valid") is not None:
            yield "reports" if one.family == "report" else "pairs", home / MANIFEST
    if (
        any({"probe", "neighbours"} & set(one.tasks) for one in runs)
        and Manifest.read(f"{corpus.pairs}/test").label_names
    ):
        yield "pairs", Path(corpus.pairs) / "validate" / MANIFEST


def _needed(corpus: CorpusConfig, runs: Sequence[Run]) -> list[tuple[str, Path]]:
    """Return (field, file) of what the runs read; without runs, of all that the corpus has."""
    read = {
        os.path.normpath(path)
        for run in runs
        for _, path in _read_by(run)
        if path.startswith(os.sep)
    }
    return [
        (name, path)
        for name, path in _expected(corpus)
        if not runs
        or any(_within(str(path), each) or _within(each, str(path.parent)) for each in read)
    ]


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _expected(corpus: CorpusConfig) -> list[tuple[str, Path]]:
    """Return (field, file) of all that a corpus has."""
    shards = [("pairs", f"{corpus.pairs}/train"), ("pairs", f"{corpus.pairs}/test")]
    shards += [("extra_train", path) for path in corpus.extra_train]
    optional = ("phrases", "changes", "masks", "questions_valid")
    shards += [(name, value) for name in optional if (value := getattr(corpus, name)) is not None]
    for name in ("questions", "choices", "reports"):
        home = getattr(corpus, name)
        shards += [(name, f"{home}/{split}") for split in ("train", "test") if home is not None]
    vocabularies = [
        ("tokenizer", corpus.tokenizer),
        *([("words", corpus.words)] if corpus.words else []),
    ]
    return [
        *((name, Path(path) / MANIFEST) for name, path in shards),
        *((name, Path(path) / "tokenizer.json") for name, path in vocabularies),
    ]
