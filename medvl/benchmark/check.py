"""Checks before any run of a benchmark is trained: settings of the models, sections of texts,
data of the results.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from medvl.benchmark.execute import checkpoint_of, located
from medvl.benchmark.plan import Plan
from medvl.benchmark.settings import Run
from medvl.benchmark.store import COST, Store, read_evaluation
from medvl.benchmark.tasks import tested_folder
from medvl.common.config_io import from_dict, nearest
from medvl.data import ShardSource
from medvl.data.loading.studies import StudySource
from medvl.data.shards.format import MANIFEST, Manifest
from medvl.data.shards.regions import find_regions
from medvl.errors import ConfigError, MedvlError
from medvl.eval import Results
from medvl.models import System, system
from medvl.models.checkpoint_folder import detector_of, train_manifests

_LATER = ("missing", "not_found")
"""Codes of what the corpora lack until they are made: vocabularies, graphs of entities,
checkpoints of other runs.
"""


def model_errors(plan: Plan, store: Store) -> Mapping[str, str]:
    """Return key -> error of the runs whose model cannot be built; finished runs and data that lack
    are left out.

    Each distinct model is built once, on the meta device.
    """
    found: dict[tuple[str, str], str | None] = {}
    errors: dict[str, str] = {}
    for run in plan.runs:
        if store.state(run) == "finished":
            continue
        model = run.system, json.dumps(run.settings["model"], sort_keys=True)
        if model not in found:
            found[model] = _error(run, store)
        if (error := found[model]) is not None:
            errors[run.key] = error
    return errors


def check_data(plan: Plan, store: Store) -> None:
    """Compare the data of a benchmark with those of its finished runs, and look for the sections
    that are matched.

    Data and runs that do not exist yet are left out. Raises ConfigError where a run was trained or
    evaluated on other data than its folders have now, or where no text has a section of
    `evaluation.sections`.
    """
    changed = list(_changed_data(plan, store))
    if changed:
        run, folder, results = changed[0]
        message = f"{run.title}: {results} was made with other data than {folder} has now"
        others = f", and {len(changed) - 1} more results were" if len(changed) > 1 else ""
        advice = "restore the data, give another --out, or remove what was made with the other data"
        raise ConfigError(
            f"{message}{others}; {advice}", "mismatch", field=f"corpora.{run.corpus.name}"
        )
    left = [
        run
        for run in plan.runs
        if store.state(run) == "to do" and {"matching", "reranking"} & {*run.tasks}
    ]
    folders = [Path(pairs) / "test" for pairs in dict.fromkeys(run.corpus.pairs for run in left)]
    _check_sections(
        [path for path in folders if (path / MANIFEST).is_file()], plan.config.evaluation.sections
    )


def _changed_data(plan: Plan, store: Store) -> Iterator[tuple[Run, Path, Path]]:
    """Yield (run, folder of data, what was made with other data) of trainings and evaluations
    that are finished.
    """
    read = functools.cache(
        lambda folder: Manifest.read(folder) if (Path(folder) / MANIFEST).is_file() else None
    )
    for run in plan.runs:
        if not (store.folder(run) / COST).is_file():
            continue
        checkpoint = checkpoint_of(run, store)
        trained = next(iter(train_manifests(checkpoint)), None)
        extra = () if run.family == "report" else run.corpus.extra_train
        present = [read(folder) for folder in (run.train_shards, *extra)]
        shards = [
            shard for manifest in present if manifest is not None for shard in manifest.shards
        ]
        if trained is not None and None not in present and list(trained.shards) != shards:
            yield run, Path(run.train_shards), store.folder(run)
            continue
        for _, task, results in store.evaluations(run):
            found = read_evaluation(results)
            folder = tested_folder(run, task)
            made = found.inputs.get("manifest") if isinstance(found, Results) else None
            if folder is None or made is None or (manifest := read(folder)) is None:
                continue
            if made not in _fingerprints(run, folder, manifest, checkpoint):
                yield run, folder, results


def _fingerprints(run: Run, folder: Path, manifest: Manifest, checkpoint: Path) -> Iterator[str]:
    """Yield the hashes that an evaluation notes for shards: of images, of a detector's regions,
    of whole studies.
    """
    yield manifest.fingerprint
    if (detector := detector_of(checkpoint)) is not None:
        yield ShardSource(folder, regions=find_regions(folder, detector)).fingerprint
    if run.family == "report":
        yield StudySource(ShardSource(folder)).fingerprint


def _check_sections(folders: Sequence[Path], sections: tuple[str, ...]) -> None:
    """Raise ConfigError where no text of a folder has any of the sections, or none of all
    folders has one of them.
    """
    found: set[str] = set()
    for folder in folders:
        source = ShardSource(folder)
        known = set[str]()
        for position in range(len(source)):
            if known.issuperset(sections):
                break
            known |= source.sample(position).sections.keys()
        if not known & {*sections}:
            message = f"no text of {folder} has a section {' or '.join(map(repr, sections))}"
            raise ConfigError(
                f"{message}; {nearest(sections[0], known)}",
                "unknown_name",
                field="evaluation.sections",
            )
        found |= known
    for name in sections if folders else ():
        if name not in found:
            message = (
                f"no text of {', '.join(map(str, folders))} has a section {name!r}; "
                f"{nearest(name, found)}"
            )
            raise ConfigError(message, "unknown_name", field="evaluation.sections")


def _error(run: Run, store: Store) -> str | None:
    cls: type[System] = system(run.system)
    try:
        config = from_dict(cls.Config, located(run, store, run.settings["model"]))
        with torch.device("meta"):
            cls.build(config, pretrained=False, tokenizer=None)
    except MedvlError as error:
        return None if error.code in _LATER else str(error)
    return None
