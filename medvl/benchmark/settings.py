"""Systems of a benchmark, with their recipes, presets and families; and the settings of their runs:
those of a recipe with those of a benchmark.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.benchmark.config import (
    FAMILIES,
    BenchmarkConfig,
    Budget,
    CommandTask,
    CorpusConfig,
    Family,
    StartConfig,
    expanded,
)
from medvl.common.config_io import from_dict, nearest, to_dict
from medvl.data import ConVIRTAugmentation
from medvl.errors import ConfigError, MedvlError
from medvl.eval.evaluation import EvaluationConfig
from medvl.models import MRM, DualEncoder, FusionModel, ReportGenerator, System, list_models, system
from medvl.train import DataConfig, Plateau, Recipe
from medvl.train.recipe_files import find_recipe, load_recipe_module, packaged_files

_RECIPE_OF = {"clip": "chexzero"}
"""Systems that train with the recipe of another one."""
_FAMILY_RECIPE: Mapping[Family, str] = {
    "dual": "convirt",
    "fusion": "m3ae",
    "records": "mrm",
    "report": "r2gen",
}
"""Recipe of systems of other packages that name none."""
_NOT_COMPARED = {
    "local_analysis": "a training objective of LoVT's analysis, not a published system"
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A system with the recipe and the preset that it trains with."""

    name: str
    system: str
    family: Family
    recipe: Path
    preset: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of a variant."""

    def recipe_settings(self) -> Any:
        """Return the settings of the preset; those of another system take the model's fields that
        this one shares.

        Texts are not packed then: nothing says that the system has a text encoder that can.
        """
        settings = recipe_module(self.recipe).PRESETS[self.preset]
        config = system(self.system).Config
        if type(settings.model) is config:
            return settings
        names = {field.name for field in dataclasses.fields(settings.model) if field.init}
        fields = [field.name for field in dataclasses.fields(config) if field.init]
        shared = {name: getattr(settings.model, name) for name in fields if name in names}
        train = dataclasses.replace(settings.train, packed_text=False)
        return dataclasses.replace(settings, model=config(**shared), train=train)


@functools.cache
def recipe_module(path: Path) -> Any:
    """Return the module of a recipe, imported once."""
    return load_recipe_module(path)


def family_of(cls: type[System]) -> Family | None:
    """Return the family of a system that pretrains on images and texts; None for any other."""
    if issubclass(cls, ReportGenerator):
        return "report"
    if issubclass(cls, FusionModel):
        return "fusion"
    if issubclass(cls, MRM):
        return "records"
    return "dual" if issubclass(cls, DualEncoder) else None


def find_systems(config: BenchmarkConfig) -> tuple[list[Entry], dict[str, str]]:
    """Return the systems of a benchmark by family, and the reasons of those that cannot take part.

    Raises ConfigError where a name is unknown, with the nearest one.
    """
    entries, missing = _known(config.preset)
    taken = {"all", *FAMILIES, *entries, *missing}
    for number, variant in enumerate(config.variants):
        if variant.name in taken or variant.name.startswith("-"):
            message = (
                f"expected a new name without a leading dash, got {variant.name!r}; "
                f"rename the variant"
            )
            raise ConfigError(message, "conflict", field=f"variants.{number}.name")
        base = entries.get(variant.system) or _entry(variant.system, config.preset)
        path = base.recipe if variant.recipe is None else find_recipe(variant.recipe)
        preset = variant.preset or (base.preset if variant.recipe is None else config.preset)
        presets = recipe_module(path).PRESETS
        if preset not in presets:
            field = f"variants.{number}.preset"
            raise ConfigError(
                f"{path.name} has no preset {preset!r}: {nearest(preset, presets)}",
                "unknown_name",
                field=field,
            )
        settings = dict(variant.settings)
        entries[variant.name] = dataclasses.replace(
            base, name=variant.name, recipe=path, preset=preset, settings=settings
        )
    for name in config.settings:
        if name not in taken and name not in entries:
            message = f"settings: no system or family {name!r}; {nearest(name, {*taken, *entries})}"
            raise ConfigError(message, "unknown_name", field=f"settings.{name}")
    selection = _chosen(
        config.systems, entries, missing, [variant.name for variant in config.variants]
    )
    order = {family: place for place, family in enumerate(FAMILIES)}
    systems = sorted(
        (entries[name] for name in selection if name in entries),
        key=lambda entry: order[entry.family],
    )
    return systems, {name: missing[name] for name in selection if name in missing}


def _chosen(
    names: Sequence[str],
    entries: Mapping[str, Entry],
    missing: Mapping[str, str],
    variants: Sequence[str],
) -> list[str]:
    known = [*entries, *missing]
    selection: dict[str, None] = {}
    for name in names:
        left_out = name.removeprefix("-")
        if left_out in ("all", *FAMILIES) and left_out == name:
            fitting = [
                one for one in known if one not in entries or name in ("all", entries[one].family)
            ]
            members = fitting if name == "all" else [one for one in fitting if one in entries]
            selection |= dict.fromkeys(one for one in members if one not in variants)
        elif left_out not in known:
            message = (
                f"expected a system of images and texts, got {left_out!r}; "
                f"{nearest(left_out, known)}"
            )
            raise ConfigError(message, "unknown_name", field="systems")
        elif left_out == name:
            selection[name] = None
    selection = {name: None for name in selection if f"-{name}" not in names}
    if not selection:
        raise ConfigError(
            f"expected systems to name one or more, got {', '.join(names)}",
            "empty",
            field="systems",
        )
    return list(selection)


@functools.cache
def _recipes(preset: str) -> dict[str, tuple[str, Path, str]]:
    """Return name -> (system, recipe, preset) of every recipe that pretrains on images and
    texts; those with `CONTINUES` train a system of another recipe further.
    """
    recipes: dict[str, tuple[str, Path, str]] = {}
    for path in packaged_files("recipes", ".py").values():
        module = recipe_module(path)
        presets = {} if getattr(module, "CONTINUES", False) else module.PRESETS
        for name, settings in presets.items():
            reads_images = isinstance(settings, Recipe) and isinstance(settings.data, DataConfig)
            if not reads_images or not (name == preset or name.startswith(f"{preset}-")):
                continue
            trained = str(settings.model.system)
            if family_of(system(trained)) is not None and trained not in _NOT_COMPARED:
                title = (
                    trained
                    if trained not in recipes
                    else f"{trained}-{name.removeprefix(f'{preset}-')}"
                )
                recipes[title] = (trained, path, name)
    return recipes


def _known(preset: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the entries of all registered systems, and the reasons of those that have none."""
    entries: dict[str, Entry] = {}
    missing: dict[str, str] = {}
    recipes = _recipes(preset)
    if not recipes:
        raise ConfigError(
            f"preset: no recipe has the preset {preset!r}; try tiny or paper",
            "unknown_name",
            field="preset",
        )
    for title, (name, path, own) in recipes.items():
        family = family_of(system(name))
        assert family is not None
        entries[title] = Entry(name=title, system=name, family=family, recipe=path, preset=own)
    for name in list_models():
        if name in entries or name in _NOT_COMPARED:
            continue
        try:
            if family_of(system(name)) is not None:
                entries[name] = _entry(name, preset)
        except MedvlError as error:  # a system of another package, or one without a fitting preset
            missing[name] = str(error)
    return dict(sorted(entries.items())), missing


def _entry(name: str, preset: str) -> Entry:
    """Return the entry of a system without a recipe. Raises ConfigError for one that is not of
    images and texts.
    """
    family = family_of(system(name))
    if family is None:
        raise ConfigError(
            f"{name} does not pretrain on images and texts", "unsupported", field="systems"
        )
    if name not in _RECIPE_OF and system(name).__module__.startswith("medvl."):
        raise ConfigError("no recipe pretrains it", "unsupported", field="systems")
    path = find_recipe(_RECIPE_OF.get(name, _FAMILY_RECIPE[family]))
    if preset not in recipe_module(path).PRESETS:
        raise ConfigError(f"{path.name} has no preset {preset!r}", "unknown_name", field="preset")
    return Entry(name=name, system=name, family=family, recipe=path, preset=preset)


RUN = "run:"
"""Prefix of a setting that is the checkpoint of another run, such as "run:convirt"."""
_WEIGHTS = ("image_weights", "text_weights")


def resolved_settings(
    entry: Entry, config: BenchmarkConfig, start: StartConfig, seed: int, share: float
) -> Any:
    """Return the recipe's settings with those of the benchmark.

    The budget replaces the settings of recipes and starts; the settings of a variant replace the
    budget's. Raises ConfigError where a setting does not exist, with the nearest name.
    """
    settings = with_settings(
        entry.recipe_settings(), {"pretrained": False, "init_from": None}, "settings"
    )
    for name in ("all", entry.family, entry.system, entry.name):
        if name in config.settings and not (
            name == entry.name == entry.system and name in ("all", entry.family)
        ):
            settings = with_settings(settings, config.settings[name], f"settings.{name}")
    settings = with_settings(settings, _of_start(settings, start), f"starts.{start.name}")
    settings = with_settings(settings, entry.settings, f"variants.{entry.name}")
    data: dict[str, Any] = (
        {"seed": seed, "paired_fraction": share, "others": "drop"} if share < 1 else {"seed": seed}
    )
    train: dict[str, Any] = {"seed": seed, "tensorboard": False, "keep_last": 1}
    budget = config.budget
    if budget.augmentation == "weak" and entry.family != "report":
        size = settings.model.image_size
        scale = getattr(settings.model, "target_scale", 1)
        data["image"] = ConVIRTAugmentation.weak(
            scale * (size if isinstance(size, int) else size[0])
        )
    optim: dict[str, Any] = {}
    if budget.steps is not None:
        train |= {"epochs": None, "steps": budget.steps, "scale_below": None}
        warmup = min(getattr(settings.optim.schedule, "warmup_steps", 0), 100, budget.steps // 4)
        optim["schedule"] = dataclasses.replace(settings.optim.schedule, warmup_steps=warmup)
    if budget.batch is not None:
        train |= {"global_batch": budget.batch, "accumulate": 1}
    # a plateau schedule needs validation
    if budget.weights == "last" and not isinstance(settings.optim.schedule, Plateau):
        data["valid"] = None
        train |= {
            "best_metric": "loss",
            "best_mode": "min",
            "early_stop_patience": None,
            "validate_every": "epoch",
        }
    settings = with_settings(settings, {"data": data, "train": train, "optim": optim}, "budget")
    return with_settings(settings, entry.settings, f"variants.{entry.name}")


def written_settings(settings: Any) -> dict[str, Any]:
    """Return the settings of a run as JSON values, without those of the machine."""
    written = to_dict(settings)
    for part, names in (
        ("data", ("train", "extra_train", "tokenizer", "workers")),
        ("train", ("run_dir", "num_threads", "checkpoint_every")),
    ):
        for name in names:
            written[part].pop(name)
    if written["data"].get("valid") is not None:
        written["data"]["valid"] = "validate"
    return written


def with_settings(config: Any, tree: Mapping[str, Any], path: str) -> Any:
    """Return a config dataclass with the values of a tree of settings; nested dataclasses keep
    their other fields.

    Raises ConfigError where a name or a type is wrong, with the dotted name in `field`.
    """
    names = [field.name for field in dataclasses.fields(config) if field.init]
    changed: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in names:
            message = (
                f"{path}: {type(config).__name__} has no field {name!r}; {nearest(name, names)}"
            )
            raise ConfigError(message, "unknown_name", field=f"{path}.{name}")
        current = getattr(config, name)
        nested = (
            dataclasses.is_dataclass(current) and isinstance(value, Mapping) and "kind" not in value
        )
        changed[name] = with_settings(current, value, f"{path}.{name}") if nested else value
    if not changed:
        return config
    try:
        return from_dict(type(config), {name: getattr(config, name) for name in names} | changed)
    except ConfigError as error:
        field = path if error.field is None else f"{path}.{error.field}"
        raise ConfigError(f"{path}: {error}", error.code, field=field) from None


def find_references(tree: Any) -> dict[str, str]:
    """Return system -> dotted name of the setting, of the systems in values such as
    "run:convirt".
    """
    if isinstance(tree, str) and tree.startswith(RUN):
        return {tree.removeprefix(RUN): ""}
    items = (
        enumerate(tree)
        if isinstance(tree, (list, tuple))
        else tree.items()
        if isinstance(tree, Mapping)
        else ()
    )
    return {
        system: f"{name}.{inner}".removesuffix(".")
        for name, value in items
        for system, inner in find_references(value).items()
    }


def _of_start(recipe: Any, start: StartConfig) -> dict[str, Any]:
    """Return the settings of a start, with the statistics of pixels where this system has them.

    A system whose settings name a run to start from gets a start's weights of encoders through that
    run.
    """
    settings = {
        name: _expanded(value, f"starts.{start.name}.{name}")
        for name, value in start.settings.items()
    }
    of_model = dict(settings.get("model", {}))
    if str(recipe.init_from).startswith(RUN):
        of_model = {name: value for name, value in of_model.items() if name not in _WEIGHTS}
        settings.pop("pretrained", None)
    pixels = {"mean": start.pixel_mean, "std": start.pixel_std}
    given = {name: value for name, value in pixels.items() if value is not None}
    names = {field.name for field in dataclasses.fields(recipe.model)}
    if {f"pixel_{name}" for name in given} <= names:
        of_model |= {f"pixel_{name}": value for name, value in given.items()}
    else:
        of_model["image_arguments"] = {**of_model.get("image_arguments", {}), **given}
    return {**settings, "model": of_model}


def _expanded(value: Any, field: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _expanded(item, f"{field}.{name}") for name, item in value.items()}
    return expanded(value, field) if isinstance(value, str) else value


# A run of a benchmark: the settings of its training and its evaluations.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run with its evaluations."""

    key: str
    name: str
    """Name of the system or variant."""
    system: str
    family: Family
    recipe: str
    preset: str
    seed: int
    corpus: CorpusConfig
    """Corpus with absolute folders."""
    share: float
    start: str
    published_tokenizer: bool = False
    settings: Mapping[str, Any]
    """All settings of the recipe, as `to_dict` writes them, but for those of the machine."""
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name -> key of the runs whose checkpoints this one takes, or that propose candidates in
    its evaluations.
    """
    tasks: tuple[str, ...] = ()
    commands: tuple[CommandTask, ...] = ()
    budget: Budget
    evaluation: EvaluationConfig

    @property
    def title(self) -> str:
        """Name, and what differs between runs of one system."""
        parts = [self.corpus.name, "" if self.start == "random" else self.start]
        parts += ["" if self.share == 1 else f"{self.share:g} of the pairs", f"seed {self.seed}"]
        return ", ".join([self.name, *filter(None, parts)])

    @property
    def tokenizer(self) -> str | None:
        """Folder of the tokenizer; None for the text encoder's own."""
        if self.family == "report":
            return self.corpus.words
        return None if self.published_tokenizer else self.corpus.tokenizer

    @property
    def train_shards(self) -> str:
        """Folder of the training shards."""
        home = self.corpus.reports if self.family == "report" else self.corpus.pairs
        return f"{home}/train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Runs of a benchmark in an order in which those that others need come first."""

    config: BenchmarkConfig
    runs: tuple[Run, ...]
    left_out: Mapping[str, str]
    """Systems that cannot take part -> reason."""
