"""Help of a recipe on two screens: the settings that most runs change, in one line each.

`--help-all` lists every setting. A recipe must be imported for its values, which takes seconds, so
the texts are cached by the content of the package.
"""

import ast
import contextlib
import dataclasses
import hashlib
import inspect
import itertools
import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import medvl
from medvl.common.files import write_atomic

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
    found = {setting.name: setting for setting in _settings(presets[preset])}
    shown = [found[name] for name in SETTINGS if name in found]
    space = LINES - len(head) - len(tail) - 2 * len({_title(one) for one in found.values()})
    rest = (one for one in found.values() if one.changed and one.name not in SETTINGS)
    shown = [*shown, *rest][:space]
    lines = []
    for title in dict.fromkeys(["Recipe", *map(_title, found.values())]):
        of_title = [_line(one) for one in found.values() if one in shown and _title(one) == title]
        lines += ["", title, *of_title] if of_title else []
    return "\n".join([*head, *lines, *tail])


def _settings(config: Any, prefix: str = "") -> Iterator[_Setting]:
    """Yield the fields of a dataclass, and of those within it."""
    docs = field_docs(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{name}.")
        else:
            changed = field.default is not dataclasses.MISSING and value != field.default
            yield _Setting(name, value, docs.get(field.name, ""), changed)


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


def cached_help(recipe: Path, preset: str) -> str | None:
    """Return the help that `cache_help` stored for these sources; None without any."""
    try:
        texts = json.loads(_cache_file(recipe).read_text(encoding="utf-8"))
        return str(texts[preset])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cache_help(recipe: Path, texts: Mapping[str, str]) -> None:
    """Store the help of the presets of a recipe, in place of that of earlier sources.

    A folder that cannot be written is ignored.
    """
    path = _cache_file(recipe)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(texts))
        for earlier in path.parent.glob(f"{recipe.stem}-*.json"):
            if earlier != path:
                earlier.unlink(missing_ok=True)


def _cache_file(recipe: Path) -> Path:
    """Return the file of a recipe's texts. Its name changes with each source of the package."""
    sources = [recipe, *sorted(Path(medvl.__file__).parent.rglob("*.py"))]
    states = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in sources]
    digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "medvl" / "help" / f"{recipe.stem}-{digest}.json"
