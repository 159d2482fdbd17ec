"""Files of the recipes that come with the package, and their modules."""

import ast
import contextlib
import contextvars
import dataclasses
import difflib
import functools
import hashlib
import inspect
import itertools
import json
import logging
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import medvl
from medvl.common.config_io import nearest
from medvl.common.files import write_atomic
from medvl.common.process import console
from medvl.errors import ConfigError, MedvlError

if TYPE_CHECKING:
    from medvl.train.run import Run


_log = logging.getLogger(__name__)
_PACKAGE = Path(medvl.__file__).parent
_SHOWN = 6
"""Recipes that a message names at most."""


def packaged_files(folder: str, suffix: str) -> Mapping[str, Path]:
    """Return stem -> file of a folder: within the installed package, else beside it, in a
    checkout.
    """
    inside = _PACKAGE / folder
    paths = sorted((inside if inside.is_dir() else _PACKAGE.parent / folder).glob(f"*{suffix}"))
    if not paths:
        raise ConfigError(
            f"this installation of medvl has no {folder}; install it again",
            "not_found",
            field=folder,
        )
    return {path.stem: path for path in paths}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe: a path, a full name (convirt_mimic) or the first words of one
    (convirt).

    If several names begin with these words, the one with the fewest further words is returned:
    biovil_mimic for `biovil`, not biovil_t_mimic. Raises ConfigError if none or more than one fits.
    """
    if name.endswith(".py") or "/" in name:
        path = Path(name)
        if not path.is_file():
            message = f"{path} is not a file; give a recipe by name (medvl recipes list) or a file"
            raise ConfigError(message, "not_found", field="recipe")
        return path
    recipes = packaged_files("recipes", ".py")
    stem = name.replace("-", "_")
    if stem in recipes:
        return recipes[stem]
    candidates = sorted((one.count("_"), one) for one in recipes if one.startswith(f"{stem}_"))
    best = [one for words, one in candidates if words == candidates[0][0]]
    if len(best) == 1:
        return recipes[best[0]]
    message = f"expected the name of a recipe, got {name!r}; {_advice(stem, best, recipes)}"
    raise ConfigError(message, "unknown_name", field="recipe")


def _advice(stem: str, fitting: Sequence[str], recipes: Mapping[str, Path]) -> str:
    """Return what to give in place of a name: recipes that begin with it, that train a system of
    this name, or whose name or description contains it.

    Only a word that is in none of them is taken for a misspelling.
    """
    stem = stem.lower()
    every = "medvl recipes list shows all"
    trained = [] if fitting else _trained(stem, recipes)
    if trained:
        kin = [one for one in recipes if stem in one and one not in trained]
        return f"recipes of this system and its kin: {', '.join([*trained, *kin])}; {every}"
    word = re.compile(rf"\b{re.escape(stem)}\b", re.IGNORECASE)
    about = [one for one, path in recipes.items() if stem in one or word.search(_docstring(path))]
    nearest = difflib.get_close_matches(
        stem, [*recipes, *(one.partition("_")[0] for one in recipes)], n=1
    )
    names = list(fitting) or about or nearest
    if not names:
        return every
    if names == about:
        return (
            f"it is part of "
            f"{', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}; {every}"
        )
    return f"did you mean {' or '.join(names)}? {every}"


def _trained(system: str, recipes: Mapping[str, Path]) -> list[str]:
    """Return the recipes that name a class of a system, then those of systems that extend it.

    Sources are read as text, because importing the systems takes seconds.
    """
    own: set[str] = set()
    bases: dict[str, str] = {}
    for path in (_PACKAGE / "models").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        classes = dict(re.findall(r"^class (\w+)(?:\((.*?)\))?:", source, re.MULTILINE))
        bases |= classes
        if f'@register_system("{system}")' in source:
            name = system.replace("_", "")
            own |= {one for one in classes if name in one.lower()} or set(classes)
    kin = {one for one, parents in bases.items() if own & set(re.findall(r"\w+", parents))}
    words = {one: _identifiers(path) for one, path in recipes.items()}
    return [
        *(one for one in recipes if own & words[one]),
        *(one for one in recipes if kin & words[one] and not own & words[one]),
    ]


def _identifiers(path: Path) -> set[str]:
    """Return the names in the code of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def load_recipe_module(path: Path) -> ModuleType:
    """Import the module of a recipe. Raises ConfigError if the file is missing or is not a
    recipe.
    """
    spec = spec_from_file_location(f"recipe_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        message = f"{path} is not a Python file; give a recipe such as recipes/convirt_mimic.py"
        raise ConfigError(message, "not_found", field="recipe")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve their annotations there
    spec.loader.exec_module(module)
    if not (hasattr(module, "PRESETS") and hasattr(module, "prepare")):
        message = f"{path} is not a recipe: it does not define PRESETS and prepare"
        raise ConfigError(message, "malformed", field="recipe")
    return module


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def outline(path: Path) -> tuple[list[str], str]:
    """Return the names of a recipe's presets and the first line of its docstring, without
    importing it.
    """
    module = ast.parse(path.read_text(encoding="utf-8"))
    summary = _docstring(path).partition("\n")[0]
    for node in module.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if ast.unparse(node.targets[0]) == "PRESETS":
            return [
                str(key.value) if isinstance(key, ast.Constant) else "..."
                for key in node.value.keys
            ], summary
    return [], summary


# Command line of a recipe: presets by name, every field of the config as a flag.

Recipe = TypeVar("Recipe")

DEFAULT_PRESET = "paper"
_command: contextvars.ContextVar[str | None] = contextvars.ContextVar("command", default=None)


@contextlib.contextmanager
def shown_as(command: str) -> Iterator[None]:
    """Show this command in the help and the errors of `choose`, in place of the name of the
    program.
    """
    token = _command.set(command)
    try:
        yield
    finally:
        _command.reset(token)


def launch(
    prepare: "Callable[[Recipe], Run]", presets: Mapping[str, Recipe], description: str
) -> None:
    """Run a recipe as a program: read the settings from the command line, train, and print the
    result.

    `prepare` creates the run. A MedvlError ends the process with status 1 and `error: ...`, Ctrl-C
    with status 130 and one line, both without a traceback.
    """
    try:
        settings = choose(presets, description=description)
        with console(int(os.environ.get("RANK", 0)) == 0):
            _log.info("%s Opening its data and creating its model.", description)
            run = prepare(settings)
        result = run.train()
    except MedvlError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        _exit("interrupted; run the same command again to resume", status=130)
    sys.stdout.write(f"{result}\n")


def choose(
    presets: Mapping[str, Recipe], argv: Sequence[str] | None = None, description: str | None = None
) -> Recipe:
    """Return the settings that a command line selects.

        recipe.py                          the preset `paper`
        recipe.py tiny                     the preset of that name
        recipe.py tiny --optim.lr 3e-4     ... with a field changed
        recipe.py tiny --model.text-arguments hidden_size 128
                                           ... with a key of a mapping changed or added
        recipe.py --help                   the usual fields, with their values in the preset
        recipe.py --help-all               every field

    A wrong command line (unknown preset or flag, value out of range) ends the process with status 2
    and an error message, without a traceback.

    Args:
        presets: frozen config dataclasses. Where a field may be one of several dataclasses (a
            schedule), the preset determines which one, and the flags change its values.
        argv: arguments without the program's name; None takes `sys.argv`.
        description: first line of the help.
    """
    import tyro

    arguments = list(sys.argv[1:] if argv is None else argv)
    words = [arguments.pop(0)] if arguments and not arguments[0].startswith("-") else []
    name = words[0] if words else DEFAULT_PRESET
    command = _command.get()
    if name not in presets:
        _exit(f"no preset {name!r}: {nearest(name, presets)}")
    if {"-h", "--help"} & {*arguments}:
        program = command or Path(sys.argv[0]).name
        sys.stdout.write(
            short_help(" ".join([program, *words]), description or "", presets, name) + "\n"
        )
        raise SystemExit(0)
    arguments = ["--help" if word == "--help-all" else word for word in arguments]
    usage = f"Presets: {', '.join(presets)}. This is {name}; give another name first to select it."
    try:
        chosen = tyro.cli(
            _concrete_type(presets[name]),
            prog=command and " ".join([command, *words]),
            args=arguments,
            default=presets[name],
            description=f"{description}\n\n{usage}" if description else usage,
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            registry=_pairs_of_mappings(),
        )
        return _with_other_keys(chosen, presets[name])
    except ConfigError as error:
        _exit(str(error))


def _pairs_of_mappings() -> Any:
    """Return tyro's rule for mappings: one option that takes KEY VALUE pairs.

    By default, tyro makes an option of every key of a preset's mapping, and takes no others. This
    stays so where all values are floats: the keys of the weights of rewards are fixed. Values of
    type `Any` are Python literals, such as `"(8, 16, 16)"`, and otherwise strings.
    """
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
    )

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def pairs(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type_origin is not Mapping:
            return None
        value_type = typing.get_args(info.type)[1]
        if value_type is float:
            return None
        if value_type is Any:
            return PrimitiveConstructorSpec(
                nargs="*",
                metavar="[KEY VALUE ...]",
                instance_from_str=_literal_pairs,
                is_instance=lambda value: isinstance(value, Mapping),
                str_from_instance=lambda value: [
                    str(word) for pair in value.items() for word in pair
                ],
            )
        pairs_type: Any = types.GenericAlias(dict, (str, value_type))
        spec = registry.get_primitive_spec(PrimitiveTypeInfo.make(pairs_type, {*info.markers}))
        return spec if isinstance(spec, PrimitiveConstructorSpec) else None

    return registry


def _literal_pairs(words: Sequence[str]) -> dict[str, Any]:
    """Return a mapping of KEY VALUE words; raises `ValueError` where a key has no value."""
    if len(words) % 2:
        raise ValueError(
            f"got {len(words)} words, not pairs of a key and a value; "
            'write a tuple as one word: window "(-1000, 1000)"'
        )
    return {key: _literal(word) for key, word in zip(words[::2], words[1::2], strict=True)}


def _literal(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word


def _with_other_keys(chosen: Any, preset: Any) -> Any:
    """Return settings whose mappings also have the keys of the preset that the command line does
    not name.
    """
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(chosen):
        value, before = getattr(chosen, field.name), getattr(preset, field.name)
        if value == before:
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            changes[field.name] = {**before, **value}
        elif dataclasses.is_dataclass(value) and type(value) is type(before):
            changes[field.name] = _with_other_keys(value, before)
    return dataclasses.replace(chosen, **changes) if changes else chosen


def _concrete_type(settings: Recipe) -> type[Recipe]:
    """Return the class of settings; with the types of its fields where these are parameters."""
    cls: Any = type(settings)
    parameters = getattr(cls, "__parameters__", ())
    if not parameters:
        return type(settings)
    type_of = {
        hint: type(getattr(settings, name)) for name, hint in typing.get_type_hints(cls).items()
    }
    concrete: type[Recipe] = cls[tuple(type_of[parameter] for parameter in parameters)]
    return concrete


def _exit(reason: str, status: int = 2) -> NoReturn:
    sys.stderr.write(f"error: {reason}\n")
    raise SystemExit(status) from None


# Help of a recipe on two screens: the settings that most runs change, in one line each.
#
# `--help-all` lists every setting. A recipe must be imported for its values, which takes seconds,
# so the texts are cached by the content of the package.

WIDTH = 100
LINES = 60
"""Lines of two screens."""
SETTINGS = (
    *("pretrained", "init_from", "prompts", "tokenizer"),
    *("model.image_encoder", "model.text_encoder", "model.image_size", "model.projection_dim"),
    *("model.max_tokens", "model.temperature"),
    *("data.train", "data.valid", "data.tokenizer", "data.workers", "data.valid_batch"),
    *("data.max_skipped", "data.image.size"),
    *("optim.optimizer", "optim.lr", "optim.weight_decay", "optim.clip_norm"),
    *("optim.schedule.warmup_steps", "optim.schedule.warmup"),
    *("train.run_dir", "train.epochs", "train.steps", "train.global_batch", "train.accumulate"),
    *("train.precision", "train.device", "train.seed", "train.compile", "train.validate_every"),
    *("train.checkpoint_every", "train.early_stop_patience", "train.resume", "train.log_every"),
    "train.wandb",
)
"""Settings that the help shows where a recipe has them."""
_TITLES = {"model": "Model", "optim": "Optimiser", "train": "Run"}
_NAMED = 46
"""Columns of an option and its value."""


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A field of a recipe's settings."""

    name: str
    """Path of the field, such as optim.lr."""
    value: Any
    help: str
    changed: bool
    """Whether the recipe sets another value than the default of the field."""


def short_help(command: str, description: str, presets: Mapping[str, Any], preset: str) -> str:
    """Return the help of a preset, of at most `LINES` lines of `WIDTH` columns.

    Args:
        command: command in front of the options, such as `medvl train convirt tiny`.
        description: first line of the help.
        presets: settings of the recipe, by name.
        preset: name of the settings whose values are shown.
    """
    head = [
        f"usage: {command} [OPTIONS]",
        "",
        *textwrap.wrap(description, WIDTH),
        *textwrap.wrap(f"Presets: {', '.join(presets)}. These are the values of {preset}.", WIDTH),
    ]
    tail = ["", f"Every setting: {command} --help-all"]
    settings = {setting.name: setting for setting in _settings(presets[preset])}
    listing = [settings[name] for name in SETTINGS if name in settings]
    space = LINES - len(head) - len(tail) - 2 * len({_title(one) for one in settings.values()})
    rest = (one for one in settings.values() if one.changed and one.name not in SETTINGS)
    listing = [*listing, *rest][:space]
    lines = []
    for title in dict.fromkeys(["Recipe", *map(_title, settings.values())]):
        of_title = [
            _line(one) for one in settings.values() if one in listing and _title(one) == title
        ]
        lines += ["", title, *of_title] if of_title else []
    return "\n".join([*head, *lines, *tail])


def _settings(config: Any, prefix: str = "") -> Iterator[_Setting]:
    """Yield the fields of a dataclass, and of those within it."""
    cls: type = type(config)
    docs = field_docs(cls)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{name}.")
        else:
            is_changed = field.default is not dataclasses.MISSING and value != field.default
            yield _Setting(name, value, docs.get(field.name, ""), is_changed)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the texts below the fields of a dataclass, and of its bases, by name."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError):  # classes without a source file
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            statements = body.body if isinstance(body, ast.ClassDef) else []
            for node, after in itertools.pairwise(statements):
                if (
                    isinstance(node, ast.AnnAssign)
                    and isinstance(node.target, ast.Name)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                ):
                    docs[node.target.id] = " ".join(str(after.value.value).split())
    return docs


def _title(setting: _Setting) -> str:
    group, dot, _ = setting.name.partition(".")
    return _TITLES.get(group, group.capitalize()) if dot else "Recipe"


def _line(setting: _Setting) -> str:
    """Return the line of a setting: option, value and the start of its description."""
    option = f"  --{setting.name.replace('_', '-')} {_shown(setting.value)}"
    left = f"{textwrap.shorten(option[2:], WIDTH // 2, placeholder=' ...'):{_NAMED}}"
    text = textwrap.shorten(setting.help, WIDTH - len(left) - 4, placeholder=" ...")
    return f"  {left}  {text}".rstrip()


def _shown(value: Any) -> str:
    """Return a value as one types it."""
    if isinstance(value, tuple | list):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# Cache of the texts of the recipes that come with the package.


def cached_help(name: str, key: str, *sources: Path) -> str | None:
    """Return the text that `cache_help` stored for these sources; None without any."""
    try:
        texts = json.loads(_cache_file(name, sources).read_text(encoding="utf-8"))
        return str(texts[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cache_help(name: str, texts: Mapping[str, str], *sources: Path) -> None:
    """Store texts by key, in place of those of earlier sources.

    A folder that cannot be written is ignored.

    Args:
        name: name of the command or recipe.
        texts: the texts.
        sources: files beside those of the package, whose changes make the texts invalid.
    """
    path = _cache_file(name, sources)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(texts))
        for earlier in path.parent.glob(f"{name}-{'?' * _DIGITS}.json"):
            if earlier != path:
                earlier.unlink(missing_ok=True)


_DIGITS = 16
"""Digits of the hash in the name of a file of the cache."""


def _cache_file(name: str, sources: Sequence[Path]) -> Path:
    """Return the file of the texts. Its name changes with each source of the package."""
    files = [*sources, *sorted(Path(medvl.__file__).parent.rglob("*.py"))]
    states = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:_DIGITS]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "medvl" / "help" / f"{name}-{digest}.json"
