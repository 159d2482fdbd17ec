"""Configuration of a benchmark, read from a TOML file or a preset: systems, seeds, corpora,
tasks, length, starts.
"""

import dataclasses
import os
import re
import shlex
import string
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from medvl.common.config_io import from_dict, nearest
from medvl.common.text_files import read_text
from medvl.errors import ConfigError
from medvl.eval.evaluation import Column, EvaluationConfig

Family = Literal["dual", "fusion", "records", "report"]
FAMILIES: tuple[Family, ...] = ("dual", "fusion", "records", "report")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})", re.ASCII)
_PRESETS = Path(__file__).parent / "presets"
_STEPS = Path(__file__).parent / "steps.toml"


def _check_least(config: Any, **least: int) -> None:
    """Raise ConfigError where a field has a number below its least one."""
    for name, number in least.items():
        if (value := getattr(config, name)) is not None and value < number:
            raise ConfigError(
                f"{name} must be at least {number}, got {value}", "out_of_range", field=name
            )


def _check_once(values: Iterable[Any], name: str) -> None:
    """Raise ConfigError where a value is given twice."""
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ConfigError(
            f"expected each of {name} once, got {twice[0]!r} twice", "conflict", field=name
        )


def _check_shares(shares: Iterable[float], name: str) -> None:
    for share in shares:
        if not 0 < share <= 1:
            raise ConfigError(
                f"{name} must be above 0 and at most 1, got {share}", "out_of_range", field=name
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeStep:
    """Commands of medvl that make a part of a corpus."""

    creates: str
    """File or folder below the corpus's root; the commands are left out where it exists."""
    table: Literal[
        "medpix", "nih", "sentences", "chest", "odir", "paediatric", "boxes",
        "structures", "lungs", "openi"
    ] | None = None  # fmt: skip
    """Collection of `MEDVL_REAL_DATA` whose table is written first, as {root}/TABLE.jsonl, with
    prompts in TABLE.json; of openi the reports, as {root}/text/openi for `medvl eval text`.
    """
    run: tuple[str, ...] = ()
    """Commands without `medvl`, such as "shards mimic-cxr --root {root}/mimic-cxr --out
    {root}/shards"; {root} is the corpus's root, and variables of the environment are replaced.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Shards of a corpus and of its evaluations. Paths are below `root`, unless absolute."""

    name: str
    root: str | None = None
    """Folder; None for DIR/data/NAME of the benchmark's own folder. Variables of the environment
    are replaced.
    """
    make: tuple[MakeStep, ...] = ()
    """How to make what is missing; a file may name steps of `steps.toml`, such as
    "phantom-pairs".
    """
    pairs: str = "shards"
    """Shards of images and texts: folder of train and test; a linear probe also reads validate."""
    tokenizer: str = "vocab"
    extra_train: tuple[str, ...] = ()
    """Further shards of training pairs."""
    prompts: str = "chexpert_ensemble"
    """Prompt set of the zero-shot classification: a name, or a .json file. Systems whose prompts
    are statements are evaluated on its classes too.
    """
    phrases: str | None = None
    """Test shards of phrases with boxes, for grounding."""
    masks: str | None = None
    """Test shards of masks, for commands of `CommandTask`."""
    changes: str | None = None
    """Test shards of pairs of studies, for change classification."""
    questions: str | None = None
    """Shards of questions: folder of train and test."""
    questions_valid: str | None = None
    """Shards of questions of other patients, for the fine-tuning."""
    choices: str | None = None
    """Shards of multiple-choice questions: folder of train and test."""
    reports: str | None = None
    """Shards for report generators: folder of train and test."""
    words: str | None = None
    """Tokenizer of report generators."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartConfig:
    """Weights that the systems start from."""

    name: str = "random"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the recipe, such as {model = {image_encoder = "timm:mobilenetv2_035",
    image_weights = "FILE"}}; the value "run:convirt" is the checkpoint of the benchmark's run of
    that system with the same seed.
    """
    pixel_mean: float | None = None
    """Mean of the pixels that the image encoder was trained with."""
    pixel_std: float | None = None
    published_tokenizer: bool = False
    """Take the tokenizer of the published text encoder, such as of `minilm`, in place of the
    corpus's.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Length of the training; None takes the value of the recipe."""

    steps: int | None = None
    batch: int | None = None
    finetune_steps: int | None = None
    """Steps of fine-tuning for questions; None is a quarter of `steps`."""
    augmentation: Literal["weak", "recipe"] = "weak"
    weights: Literal["last", "best"] = "last"
    """Checkpoint that is evaluated; "best" needs validation data, which "last" leaves out, but for
    recipes whose learning rate depends on it.
    """
    checkpoint_every: int = 250
    workers: int = 1

    def __post_init__(self) -> None:
        _check_least(self, steps=1, batch=1, finetune_steps=1, checkpoint_every=1, workers=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandTask:
    """A task that is a command of medvl, which writes a results.json."""

    name: str
    command: str
    """Such as "eval zero-shot --checkpoint {checkpoint} --data {pairs}/test --out {out}".
    {checkpoint}, {out}, {resamples}, {question_size} and the paths of the corpus ({root}, {pairs},
    ...) are replaced. " && " separates several, of which the first may train into {out}/run.
    """
    families: tuple[Family, ...] = FAMILIES
    corpora: tuple[str, ...] = ()
    """Names of the corpora whose runs are evaluated; empty for all."""
    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        try:
            shlex.split(self.command)
            names = {
                name for _, name, *_ in string.Formatter().parse(self.command) if name is not None
            }
        except ValueError as error:
            message = f"expected balanced quotes and braces in {self.command!r}: {error}"
            raise ConfigError(message, "malformed", field="command") from None
        folders = {field.name for field in dataclasses.fields(CorpusConfig)} - {
            "make",
            "extra_train",
        }
        known = {"checkpoint", "out", "resamples", "question_size", *folders}
        if names - known:
            unknown = min(names - known)
            message = f"{{{unknown}}} is not replaced in a command; {nearest(unknown, known)}"
            raise ConfigError(message, "unknown_name", field="command")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A system trained in another way, or a system of another package with a recipe of its own."""

    name: str
    system: str
    recipe: str | None = None
    """Name or file of a recipe; None for the system's."""
    preset: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the recipe, which replace those of the budget."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """A benchmark: every system with every seed, corpus, start and share of the pairs."""

    name: str
    description: str = ""
    systems: tuple[str, ...] = ("all",)
    """Names of systems or variants; "dual", "fusion", "report" or "all" of them; "-NAME" leaves
    one out.
    """
    preset: str = "tiny"
    """Preset of the recipes. Presets that continue its name (tiny-local) are systems too, named
    SYSTEM-local.
    """
    variants: tuple[Variant, ...] = ()
    seeds: tuple[int, ...] = (0,)
    corpora: tuple[CorpusConfig, ...]
    tasks: tuple[str, ...] = ("all",)
    """Names of tasks, or "all" that fit."""
    commands: tuple[CommandTask, ...] = ()
    columns: Mapping[str, tuple[Column, ...]] = dataclasses.field(default_factory=dict)
    """Task -> further columns, such as that of a single finding."""
    shares: tuple[float, ...] = (1.0,)
    """Shares of the patients of the pretraining pairs."""
    starts: tuple[StartConfig, ...] = (StartConfig(),)
    budget: Budget = Budget()
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Settings of the recipes by "all", family or system, applied in this order, such as
    settings.dual.model.image_size = 112."""

    def __post_init__(self) -> None:
        for name in ("systems", "seeds", "corpora", "tasks", "shares", "starts"):
            if not getattr(self, name):
                raise ConfigError(f"expected one or more {name}, got none", "empty", field=name)
        for name in (
            "systems",
            "seeds",
            "corpora",
            "tasks",
            "shares",
            "starts",
            "variants",
            "commands",
        ):
            values = getattr(self, name)
            _check_once(
                (value if isinstance(value, (str, int, float)) else value.name for value in values),
                name,
            )
        names = {
            "corpora": [one.name for one in self.corpora],
            "commands": [one.name for one in self.commands],
        }
        for kind, given in names.items():
            for number, name in enumerate(given):
                if name in ("", ".", "..") or "/" in name:
                    message = f"{kind}.{number}.name: expected the name of a folder, got {name!r}"
                    raise ConfigError(message, "malformed", field=f"{kind}.{number}.name")
        _check_shares(self.shares, "shares")


def list_benchmarks() -> list[str]:
    """Return the names of the presets."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def read_benchmark(source: str | Path, changes: Mapping[str, Any] | None = None) -> BenchmarkConfig:
    """Read a benchmark from a TOML file or a preset.

    Args:
        source: path of a file, or the name of a preset (`list_benchmarks`).
        changes: values by dotted name that replace those of the file: {"budget.steps": 100,
            "corpora.0.root": "DIR"}.

    Raises ConfigError, with the dotted name in `field`, where the file is missing or malformed or a
    field is wrong.
    """
    path = Path(source)
    if path.suffix != ".toml":
        if str(source) not in list_benchmarks():
            hint = nearest(str(source), list_benchmarks())
            message = (
                f"expected a .toml file or a preset of the benchmark, got {str(source)!r}; {hint}"
            )
            raise ConfigError(message, "unknown_name", field="benchmark")
        path = _PRESETS / f"{source}.toml"
    try:
        what = f"a .toml file, or one of {', '.join(list_benchmarks())}"
        data = tomllib.loads(read_text(path, ConfigError, field="benchmark", what=what))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}", "malformed", field="benchmark") from None
    _replace_names_of_steps(data)
    for name, value in (changes or {}).items():
        _change(data, name, value)
    try:
        return from_dict(BenchmarkConfig, data)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}", error.code, field=error.field) from None


def _replace_names_of_steps(data: Mapping[str, Any]) -> None:
    """Replace the names of shared steps in the corpora of a file by the steps."""
    steps = tomllib.loads(_STEPS.read_text(encoding="utf-8"))
    corpora = data.get("corpora")
    for number, corpus in enumerate(corpora if isinstance(corpora, list) else ()):
        make: Any = corpus.get("make") if isinstance(corpus, dict) else None
        for place, step in enumerate(make if isinstance(make, list) else ()):
            if isinstance(step, str) and step not in steps:
                field = f"corpora.{number}.make.{place}"
                raise ConfigError(
                    f"{field}: no step {step!r}; {nearest(step, steps)}",
                    "unknown_name",
                    field=field,
                )
            make[place] = steps[step] if isinstance(step, str) else step


def _change(data: Any, name: str, value: Any) -> None:
    """Set a value of nested tables and lists by its dotted name."""
    *parents, last = name.split(".")
    for part in parents:
        data = (
            data.setdefault(part, {}) if isinstance(data, dict) else data[_place(data, part, name)]
        )
    if isinstance(data, dict):
        data[last] = value
    else:
        data[_place(data, last, name)] = value


def _place(data: Any, part: str, name: str) -> int:
    """Return the number of an entry of a list. Raises ConfigError if there is no list or no
    such entry.
    """
    if not isinstance(data, list):
        raise ConfigError(
            f"{name}: expected a table or a list before {part!r}", "wrong_type", field=name
        )
    if not part.isdecimal() or int(part) >= len(data):
        message = f"{name}: expected a number below {len(data)}, got {part!r}"
        raise ConfigError(message, "out_of_range", field=name)
    return int(part)


def expanded(text: str, field: str) -> str:
    """Return a text with variables of the environment replaced. Raises ConfigError where one is
    not set.
    """
    for name in _VARIABLE.findall(text):
        if name.strip("{}") not in os.environ:
            message = f"{field}: the environment has no ${name}; set it to a folder"
            raise ConfigError(message, "missing", field=field)
    return os.path.expandvars(text)
