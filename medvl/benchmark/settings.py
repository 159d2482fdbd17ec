"""Settings of a recipe with those of a benchmark."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from medvl.benchmark.config import (
    BenchmarkConfig,
    Budget,
    CommandTask,
    CorpusConfig,
    Family,
    StartConfig,
    expanded,
)
from medvl.benchmark.systems import Entry
from medvl.common.config_io import from_dict, nearest, to_dict
from medvl.data import ConVIRTAugmentation
from medvl.errors import ConfigError
from medvl.eval.trial import EvaluationConfig
from medvl.train import Plateau

RUN = "run:"
"""Prefix of a setting that is the checkpoint of another run, such as "run:convirt"."""
_WEIGHTS = ("image_weights", "text_weights")


def resolved_settings(
    entry: Entry, config: BenchmarkConfig, start: StartConfig, seed: int, share: float
) -> dict[str, Any]:
    """Return the recipe's settings with those of the benchmark, as JSON values without folders.

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
    if budget.weights == "last" and not isinstance(
        settings.optim.schedule, Plateau
    ):  # which needs validation
        data["valid"] = None
        train |= {
            "best_metric": "loss",
            "best_mode": "min",
            "early_stop_patience": None,
            "validate_every": "epoch",
        }
    settings = with_settings(settings, {"data": data, "train": train, "optim": optim}, "budget")
    written = to_dict(with_settings(settings, entry.settings, f"variants.{entry.name}"))
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
