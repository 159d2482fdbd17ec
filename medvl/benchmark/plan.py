"""Plan of a benchmark: its runs, each with a key, the hash of all settings that its weights depend
on; and its data: what a corpus lacks is made by the commands of its configuration.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.benchmark.config import BenchmarkConfig, CorpusConfig, MakeStep, StartConfig, expanded
from medvl.benchmark.real_tables import write_table
from medvl.benchmark.settings import (
    RUN,
    Entry,
    Plan,
    Run,
    find_references,
    find_systems,
    resolved_settings,
    written_settings,
)
from medvl.benchmark.store import stored_runs
from medvl.benchmark.tasks import (
    columns_of,
    command_arguments,
    evaluation_tasks,
    fitting_tasks,
    tested_folder,
)
from medvl.common.config_io import differences, nearest, to_dict, upgrade_settings
from medvl.common.files import RunLock, write_atomic
from medvl.data.shards.format import MANIFEST, Manifest
from medvl.errors import ConfigError, CorpusError, EvaluationError
from medvl.eval import list_prompts

_log = logging.getLogger(__name__)

_NEEDS = {"report": ("reports", "words")}
"""Family -> folders of a corpus that its systems train on."""


def plan_runs(config: BenchmarkConfig, out: Path) -> Plan:
    """Return all runs of a benchmark whose folder is `out`.

    Raises ConfigError where a system, task or setting does not exist, or a corpus lacks what was
    asked for.
    """
    entries, missing = find_systems(config)
    _check_names(config)
    planner = _Planner(config, {entry.name: entry for entry in entries}, out)
    places = itertools.product(entries, config.corpora, config.starts, config.shares, config.seeds)
    for entry, corpus, start, share, seed in places:
        lacking = [name for name in _NEEDS.get(entry.family, ()) if getattr(corpus, name) is None]
        if lacking:
            missing[entry.name] = f"corpus {corpus.name} has no {' and no '.join(lacking)}"
        else:
            planner.add(entry, corpus, start, share, seed)
    for name in {run.name for run in planner.runs.values()} & missing.keys():
        del missing[name]  # it takes part on another corpus
    if not any(run.tasks for run in planner.runs.values()):
        reasons = "".join(f"; {name}: {reason}" for name, reason in missing.items())
        message = (
            f"expected tasks that fit a system and its corpus, got "
            f"{', '.join(config.tasks)}{reasons}"
        )
        raise ConfigError(message, "empty", field="tasks")
    return Plan(config=config, runs=tuple(planner.runs.values()), left_out=missing)


def _check_names(config: BenchmarkConfig) -> None:
    """Raise ConfigError where a task, corpus or prompt set does not exist, or tasks or columns
    have the same name.
    """
    tasks = evaluation_tasks()
    for number, command in enumerate(config.commands):
        if command.name in tasks:
            message = f"commands: {command.name!r} is a task of medvl; rename the command"
            raise ConfigError(message, "conflict", field=f"commands.{number}.name")
    known = [*tasks, *(command.name for command in config.commands)]
    for field, names in (("tasks", set(config.tasks) - {"all"}), ("columns", set(config.columns))):
        for name in sorted(names):
            _check_name(name, known, "task", field)
    corpora = [corpus.name for corpus in config.corpora]
    for number, command in enumerate(config.commands):
        for name in command.corpora:
            _check_name(name, corpora, "corpus", f"commands.{number}.corpora")
    for number, corpus in enumerate(config.corpora):
        if not corpus.prompts.endswith(".json"):
            _check_name(corpus.prompts, list_prompts(), "prompt set", f"corpora.{number}.prompts")
    titles: dict[str, str] = {}
    for task, columns in columns_of(config).items():
        for column in columns:
            if column.title in titles:
                message = (
                    f"columns: {titles[column.title]} and {task} have a column "
                    f"{column.title!r}; rename one of them"
                )
                raise ConfigError(message, "conflict", field="columns")
            titles[column.title] = task


def _check_name(name: str, known: Sequence[str], what: str, field: str) -> None:
    if name not in known:
        raise ConfigError(
            f"{field}: no {what} {name!r}; {nearest(name, known)}", "unknown_name", field=field
        )


class _Planner:
    """Collector of runs, each after those that it needs."""

    def __init__(self, config: BenchmarkConfig, entries: dict[str, Entry], out: Path) -> None:
        self._config = config
        self._entries = entries
        self._out = out
        self._stored = list(stored_runs(out))
        self.runs: dict[str, Run] = {}
        self._titles: dict[str, str] = {}
        self._open: list[str] = []
        """Systems whose needs are being added."""

    def add(
        self,
        entry: Entry,
        corpus: CorpusConfig,
        start: StartConfig,
        share: float,
        seed: int,
        evaluated: bool = True,
    ) -> Run:
        """Add a run and those that it needs, and return it."""
        config = self._config
        recipe = resolved_settings(entry, config, start, seed, share)
        settings = written_settings(recipe)
        tasks = fitting_tasks(config, entry.system, entry.family, corpus) if evaluated else ()
        others = {*find_references(settings)}
        if "reranking" in tasks:
            others.add(config.evaluation.shortlist_system)
        needs = {}
        if entry.name in self._open:
            circle = " from ".join([*self._open[self._open.index(entry.name) :], entry.name])
            raise ConfigError(
                f"settings: {circle}: a run cannot start from itself", "conflict", field="settings"
            )
        self._open.append(entry.name)
        for name in sorted(others):
            other = self._entry(name, self._place(entry, start, name))
            plain = StartConfig() if find_references(start.settings) else start
            needed = self.add(other, corpus, plain, share, seed, evaluated=False)
            needs[name] = needed.key
            if settings.get("init_from") == RUN + name:
                _check_encoders(entry.name, settings, needed)
        self._open.pop()
        located = located_corpus(corpus, self._out)
        run = Run(
            key=_key(entry, settings, corpus, start, needs),
            name=entry.name,
            system=entry.system,
            family=entry.family,
            recipe=str(entry.recipe),
            preset=entry.preset,
            seed=seed,
            corpus=located,
            share=share,
            start=start.name,
            published_tokenizer=start.published_tokenizer,
            settings=settings,
            needs=needs,
            tasks=tasks,
            commands=tuple(command for command in config.commands if command.name in tasks),
            budget=config.budget,
            evaluation=config.evaluation,
        )
        key = self._stored_key(run, recipe)
        run = dataclasses.replace(run, key=key)
        if evaluated and self._titles.setdefault(key, run.title) != run.title:
            message = (
                f"{run.title} and {self._titles[key]} have the same settings; change one "
                f"of them, or leave it out"
            )
            raise ConfigError(message, "conflict", field="systems")
        if key not in self.runs or evaluated:
            self.runs[key] = run
        return self.runs[key]

    def _stored_key(self, run: Run, recipe: Any) -> str:
        """Return the key of the stored run that equals this one but for settings that were added
        to `recipe` since, which have their defaults; the run's own key if there is none.
        """
        if any(stored.key == run.key for stored in self._stored):
            return run.key
        for stored in self._stored:
            settings = upgrade_settings(stored.settings, recipe, run.settings)
            if _trained_with(dataclasses.replace(stored, settings=settings)) == _trained_with(run):
                added = differences(stored.settings, settings)
                _log.info(
                    "%s was stored before the settings %s existed: their defaults apply",
                    stored.title,
                    ", ".join(path for path, *_ in added),
                )
                return stored.key
        return run.key

    def _place(self, entry: Entry, start: StartConfig, name: str) -> str:
        """Return the field of the file by which a run needs that of another system."""
        trees = {f"variants.{entry.name}": entry.settings, f"starts.{start.name}": start.settings}
        for own in (entry.name, entry.system, entry.family, "all"):
            trees[f"settings.{own}"] = self._config.settings.get(own, {})
        fields = (
            f"{place}.{references[name]}"
            for place, tree in trees.items()
            if name in (references := find_references(tree))
        )
        return next(fields, "evaluation.shortlist_system")

    def _entry(self, name: str, field: str) -> Entry:
        """Return the system that a field names. Raises ConfigError if there is none, or none
        that can be trained.
        """
        if name in self._entries:
            return self._entries[name]
        try:
            entries, missing = find_systems(dataclasses.replace(self._config, systems=(name,)))
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}", error.code, field=field) from None
        if len(entries) != 1:
            reason = missing.get(name, "it is not one system")
            raise ConfigError(
                f"{field}: {name!r} cannot be trained: {reason}", "unsupported", field=field
            )
        [self._entries[name]] = entries
        return self._entries[name]


def located_corpus(corpus: CorpusConfig, out: Path) -> CorpusConfig:
    """Return a corpus with absolute folders."""
    text = expanded(corpus.root or str(out / "data" / corpus.name), f"corpora.{corpus.name}.root")
    root = Path(text).absolute()
    folders: dict[str, Any] = {}
    for field in dataclasses.fields(corpus):
        value = getattr(corpus, field.name)
        if isinstance(value, str) and field.name not in ("name", "root", "prompts"):
            folders[field.name] = str(root / expanded(value, f"corpora.{corpus.name}.{field.name}"))
    if corpus.prompts.endswith(".json"):
        folders["prompts"] = str(root / expanded(corpus.prompts, f"corpora.{corpus.name}.prompts"))
    extra = tuple(
        str(root / expanded(value, f"corpora.{corpus.name}.extra_train"))
        for value in corpus.extra_train
    )
    return dataclasses.replace(corpus, root=str(root), extra_train=extra, **folders)


def _check_encoders(name: str, settings: Mapping[str, Any], start: Run) -> None:
    """Raise ConfigError where a system has other encoders than the run that it starts from."""
    own, of_start = settings.get("model", {}), start.settings.get("model", {})
    for field in ("image_encoder", "text_encoder"):
        encoder, other = own.get(field), of_start.get(field)
        if encoder != other and isinstance(encoder, str) and isinstance(other, str):
            message = (
                f"settings: {name} starts from {start.name}, whose {field} is {other!r}, and has "
                f"{encoder!r}; set settings.{name}.model.{field} to {other!r}"
            )
            raise ConfigError(message, "mismatch", field=f"settings.{name}.model.{field}")


def _key(
    entry: Entry,
    settings: Mapping[str, Any],
    corpus: CorpusConfig,
    start: StartConfig,
    needs: Mapping[str, str],
) -> str:
    """Return the hash of what the weights of a run depend on."""
    data = {
        name: getattr(corpus, name)
        for name in ("name", "root", "pairs", "tokenizer", "extra_train")
    }
    if entry.family == "report":
        data |= {"reports": corpus.reports, "words": corpus.words}
    elif start.published_tokenizer:
        data["tokenizer"] = None
    made = [to_dict(step) for step in corpus.make]
    used = _used(needs, settings)
    content = [entry.system, entry.recipe.stem, settings, data, made, used]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _used(needs: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the runs whose weights a run starts from."""
    return {name: key for name, key in needs.items() if name in find_references(settings)}


def _trained_with(run: Run) -> list[Any]:
    """Return what the weights of a run depend on, as `_key`, with absolute folders."""
    corpus = run.corpus
    folders = [corpus.name, corpus.root, corpus.pairs, run.tokenizer, list(corpus.extra_train)]
    if run.family == "report":
        folders.append(corpus.reports)
    made = [to_dict(step) for step in corpus.make]
    used = _used(run.needs, run.settings)
    return [run.system, Path(run.recipe).stem, run.settings, folders, made, used]


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
        tables = () if step.table is None else (f"{step.table}.jsonl", f"{step.table}.json")
        new = {_entry(step.creates, root), *tables, *named} - made
        entries.append((step, new, named & made))
        made |= new
    needed = {_entry(path, root) for run in runs for _, path in _read_by(run)}
    steps: list[MakeStep] = []
    for step, new, read in reversed(entries):  # a step reads what earlier ones make
        if new & needed or "" in new or not new:
            steps.insert(0, step)
            needed |= read
    return steps


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
