"""Systems of a benchmark: their recipes, presets and families."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.benchmark.config import FAMILIES, BenchmarkConfig, Family
from medvl.common.config_io import nearest
from medvl.errors import ConfigError, MedvlError
from medvl.models import MRM, DualEncoder, FusionModel, ReportGenerator, System, list_models, system
from medvl.train import Recipe
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
    chosen = _chosen(
        config.systems, entries, missing, [variant.name for variant in config.variants]
    )
    order = {family: place for place, family in enumerate(FAMILIES)}
    found = sorted(
        (entries[name] for name in chosen if name in entries), key=lambda entry: order[entry.family]
    )
    return found, {name: missing[name] for name in chosen if name in missing}


def _chosen(
    names: Sequence[str],
    entries: Mapping[str, Entry],
    missing: Mapping[str, str],
    variants: Sequence[str],
) -> list[str]:
    known = [*entries, *missing]
    chosen: dict[str, None] = {}
    for name in names:
        left_out = name.removeprefix("-")
        if left_out in ("all", *FAMILIES) and left_out == name:
            fitting = [
                one for one in known if one not in entries or name in ("all", entries[one].family)
            ]
            members = fitting if name == "all" else [one for one in fitting if one in entries]
            chosen |= dict.fromkeys(one for one in members if one not in variants)
        elif left_out not in known:
            message = (
                f"expected a system of images and texts, got {left_out!r}; "
                f"{nearest(left_out, known)}"
            )
            raise ConfigError(message, "unknown_name", field="systems")
        elif left_out == name:
            chosen[name] = None
    chosen = {name: None for name in chosen if f"-{name}" not in names}
    if not chosen:
        raise ConfigError(
            f"expected systems to name one or more, got {', '.join(names)}",
            "empty",
            field="systems",
        )
    return list(chosen)


@functools.cache
def _recipes(preset: str) -> dict[str, tuple[str, Path, str]]:
    """Return name -> (system, recipe, preset) of every recipe that pretrains on images and
    texts; those with `CONTINUES` train a system of another recipe further.
    """
    found: dict[str, tuple[str, Path, str]] = {}
    for path in packaged_files("recipes", ".py").values():
        module = recipe_module(path)
        presets = {} if getattr(module, "CONTINUES", False) else module.PRESETS
        for name, settings in presets.items():
            if not isinstance(settings, Recipe) or not (
                name == preset or name.startswith(f"{preset}-")
            ):
                continue
            trained = str(settings.model.system)
            if family_of(system(trained)) is not None and trained not in _NOT_COMPARED:
                title = (
                    trained
                    if trained not in found
                    else f"{trained}-{name.removeprefix(f'{preset}-')}"
                )
                found[title] = (trained, path, name)
    return found


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
