"""`medvl completion`: words of commands, recipes and options for the shell."""

import contextlib
import dataclasses
import functools
import inspect
import io
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro

from medvl.cli.help import summary

RECIPE_OPTIONS = (
    *("init_from", "data.train", "data.valid", "data.tokenizer", "data.workers"),
    *("optim.optimizer", "optim.lr", "optim.weight_decay"),
    *("train.run_dir", "train.epochs", "train.steps", "train.global_batch", "train.accumulate"),
    *("train.precision", "train.device", "train.seed", "train.resume"),
)
"""Settings of recipes that are completed. All of them would make the script slow."""


def completion(shell: Literal["bash", "zsh"]) -> str:
    """Print a script that completes commands, recipes, presets and options in a shell.

    Save it where the shell looks for completions, and open a new shell.

    Args:
        shell: shell that reads the script.
    """
    from medvl.cli.main import commands

    families: dict[str, dict[str, Callable[..., Any]]] = {}
    table: dict[str, Callable[..., Any]] = {}
    for name, function in commands().items():
        first, _, second = name.partition(" ")
        if second:
            families.setdefault(first, {})[second] = function
        else:
            table[first] = function
    table |= {family: _choice(functions) for family, functions in families.items()}
    table["train"] = _choice(_recipes((*RECIPE_OPTIONS, "ranks", "help_all")))
    table["doctor"] = _choice(_recipes(("seconds", "out")))
    options = ("quiet", "verbose", "version")
    script = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(script):
        tyro.cli(
            _choice(table, options),
            prog="medvl",
            args=["--tyro-print-completion", shell],
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
    # A shell reads one completion a line, so that a description must not have several.
    return re.sub(
        r"^COMPLETION_SPEC = .*$",
        lambda match: match[0].replace(r"\n", " "),
        script.getvalue().rstrip(),
        flags=re.MULTILINE,
    )


def _choice(
    functions: Mapping[str, Callable[..., Any]], options: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return a function that takes one of several subcommands, and options."""
    members: list[Any] = [
        Annotated[
            Any,
            tyro.conf.subcommand(name=name, constructor=function, description=summary(function)),
        ]
        for name, function in functions.items()
    ]

    def choose(**_: Any) -> None: ...

    command = functools.reduce(operator.or_, members, Annotated[None, tyro.conf.Suppress])
    hints = {"command": command} | ({"options": _options(options)} if options else {})
    kind = inspect.Parameter.KEYWORD_ONLY
    choose.__annotations__ = hints
    vars(choose)["__signature__"] = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=hint) for name, hint in hints.items()]
    )
    return choose


def _recipes(options: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return a function for every recipe, whose subcommands are its presets with these options."""
    from medvl.train.recipe_files import outline, packaged_files

    settings = _options(options)
    return {
        stem: _choice(dict.fromkeys(outline(path)[0], settings))
        for stem, path in packaged_files("recipes", ".py").items()
    }


def _options(names: Sequence[str]) -> type:
    """Return a dataclass with an option of each name."""
    fields = [
        (
            name.replace(".", "_"),
            Annotated[str, tyro.conf.arg(name=name.replace("_", "-"))],
            dataclasses.field(default=""),
        )
        for name in names
    ]
    return dataclasses.make_dataclass("Options", fields)
