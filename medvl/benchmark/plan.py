"""Runs of a benchmark, each with a key: the hash of all settings that its weights depend on."""

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.benchmark.config import BenchmarkConfig, CorpusConfig, StartConfig, expanded
from medvl.benchmark.settings import (
    Entry,
    Plan,
    Run,
    find_references,
    find_systems,
    resolved_settings,
    written_settings,
)
from medvl.benchmark.store import stored_runs
from medvl.benchmark.tasks import columns_of, evaluation_tasks, fitting_tasks
from medvl.common.config_io import differences, nearest, to_dict, upgrade_settings
from medvl.errors import ConfigError
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
            needs[name] = self.add(other, corpus, plain, share, seed, evaluated=False).key
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
        to `recipe` since, which have their defaults; the run's own key where there is none.
        """
        if any(stored.key == run.key for stored in self._stored):
            return run.key
        for stored in self._stored:
            settings = upgrade_settings(stored.settings, recipe, run.settings)
            if _trained_with(dataclasses.replace(stored, settings=settings)) == _trained_with(run):
                added = differences(stored.settings, settings)
                _log.info(
                    "%s was stored before the settings %s existed: their defaults apply",
                    *(stored.title, ", ".join(path for path, *_ in added)),
                )
                return stored.key
        return run.key

    def _place(self, entry: Entry, start: StartConfig, name: str) -> str:
        """Return the field of the file by which a run needs that of another system."""
        trees = {f"variants.{entry.name}": entry.settings, f"starts.{start.name}": start.settings}
        for own in (entry.name, entry.system, entry.family, "all"):
            trees[f"settings.{own}"] = self._config.settings.get(own, {})
        fields = (
            f"{place}.{found[name]}"
            for place, tree in trees.items()
            if name in (found := find_references(tree))
        )
        return next(fields, "evaluation.shortlist_system")

    def _entry(self, name: str, field: str) -> Entry:
        """Return the system that a field names. Raises ConfigError where there is none, or none
        that can be trained.
        """
        if name in self._entries:
            return self._entries[name]
        try:
            found, missing = find_systems(dataclasses.replace(self._config, systems=(name,)))
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}", error.code, field=field) from None
        if len(found) != 1:
            reason = missing.get(name, "it is not one system")
            raise ConfigError(
                f"{field}: {name!r} cannot be trained: {reason}", "unsupported", field=field
            )
        [self._entries[name]] = found
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
