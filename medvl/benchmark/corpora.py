"""Data of a benchmark: what a corpus lacks is made by the commands of its configuration."""

import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from medvl.benchmark.config import CorpusConfig, MakeStep, expanded
from medvl.benchmark.real_tables import write_table
from medvl.benchmark.run import Run
from medvl.common.files import write_atomic
from medvl.common.folders import RunLock
from medvl.data.shards.format import MANIFEST, Manifest
from medvl.errors import CorpusError

Command = Callable[[Sequence[str]], None]
"""Function that runs a command of medvl."""


def medvl_command(arguments: Sequence[str]) -> None:
    """Run a command of medvl in a process of its own. Raises CorpusError where it fails."""
    ended = subprocess.run([sys.executable, "-m", "medvl", *arguments], check=False)
    if ended.returncode:
        message = f"medvl {shlex.join(arguments)} ended with status {ended.returncode}; see its messages above"
        raise CorpusError(message, "missing", field="corpora")


def missing_steps(corpus: CorpusConfig) -> list[list[str]]:
    """Return the commands that make what a located corpus lacks."""
    assert corpus.root is not None
    field = f"corpora.{corpus.name}.make"
    return [arguments for step in _steps(corpus) for arguments in _commands(step, corpus.root, field)]


def _commands(step: MakeStep, root: str, field: str) -> list[list[str]]:
    """Return the arguments of each command; a variable is a part of one argument, whatever its value has."""
    return [[expanded(part, field).replace("{root}", root) for part in shlex.split(line)] for line in step.run]


def _steps(corpus: CorpusConfig) -> list[MakeStep]:
    """Return the steps whose file is missing, or whose commands did not all end."""
    root = Path(corpus.root or "")
    return [step for step in corpus.make if not (root / step.creates).exists() or _mark(root, step).exists()]


def _mark(root: Path, step: MakeStep) -> Path:
    """Return the file that exists while a step is made: what it creates may exist before its commands have ended."""
    return root / ".making" / step.creates.replace("/", "-")


def make_corpus(corpus: CorpusConfig, run: Command = medvl_command, *, runs: Sequence[Run] = ()) -> None:
    """Make what a located corpus lacks for these runs.

    Raises CorpusError where a command fails, where another process makes it, or where a folder is missing that no
    command makes.
    """
    assert corpus.root is not None
    if _steps(corpus):
        with RunLock(Path(corpus.root), error=CorpusError, field="corpora"):
            _make(corpus, Path(corpus.root), run)
    for name, path in itertools.chain(_needed(corpus), _validation(corpus, runs)):
        if not path.exists():
            message = f"corpus {corpus.name} has no {path}; make it, or give another folder in corpora.{name}"
            raise CorpusError(message, "not_found", field=f"corpora.{name}")


def _make(corpus: CorpusConfig, root: Path, run: Command) -> None:
    steps = [(step, _commands(step, str(root), f"corpora.{corpus.name}.make")) for step in _steps(corpus)]
    salt = root / "salt"
    if "MEDVL_SALT_FILE" not in os.environ and not salt.exists():  # as `medvl phantom quickstart`
        write_atomic(salt, f"{0:064d}\n")
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
    """Yield (field, file) of the validation data that trainings read, and probes of a corpus with labels."""
    for one in runs:
        home = Path(one.train_shards).parent / "validate"
        if one.settings["data"].get("valid") is not None:
            yield "reports" if one.family == "report" else "pairs", home / MANIFEST
    if any("probe" in one.tasks for one in runs) and Manifest.read(f"{corpus.pairs}/test").label_names:
        yield "pairs", Path(corpus.pairs) / "validate" / MANIFEST


def _needed(corpus: CorpusConfig) -> list[tuple[str, Path]]:
    """Return (field, file) of what the runs read."""
    shards = [("pairs", f"{corpus.pairs}/train"), ("pairs", f"{corpus.pairs}/test")]
    shards += [("extra_train", path) for path in corpus.extra_train]
    optional = ("phrases", "changes", "masks", "questions_valid")
    shards += [(name, value) for name in optional if (value := getattr(corpus, name)) is not None]
    for name, home in (("questions", corpus.questions), ("reports", corpus.reports)):
        shards += [(name, f"{home}/{split}") for split in ("train", "test") if home is not None]
    vocabularies = [("tokenizer", corpus.tokenizer), *([("words", corpus.words)] if corpus.words else [])]
    return [
        *((name, Path(path) / MANIFEST) for name, path in shards),
        *((name, Path(path) / "tokenizer.json") for name, path in vocabularies),
    ]
