"""The `medvl` command: table of commands and entry point. Heavy libraries are imported by the
commands.
"""

import difflib
import fnmatch
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, NoReturn

import tyro

from medvl import __version__
from medvl.cli import (
    benchmark,
    benchmark as compare,
    import_export,
    import_export as fit_pixelhop,
    import_export as interpolate,
    infer,
    infer as generate,
    infer as serve,
    knowledge,
    phantom,
    phantom as quickstart,
    recipes,
    recipes as doctor,
)
from medvl.cli.eval import commands as evaluation
from medvl.cli.shards import (
    commands as conversion,
    commands as upload,
    commands as verify,
    corpora,
    regions,
    text,
)
from medvl.errors import ERROR_CODES, ConfigError, MedvlError


def list_everything(
    kind: Literal[
        "models",
        "image-encoders",
        "text-encoders",
        "pretrained",
        "prompts",
        "benchmarks",
        "recipes",
    ],
    *,
    match: str = "*",
) -> None:
    """List available models, encoders, published weights, prompt sets, benchmarks or recipes.

    Recipes are listed with their presets, and with the published numbers and the commands that
    should reproduce them.

    Args:
        kind: what to list.
        match: wildcard pattern of the names.
    """
    from medvl import encoders, models

    if kind == "prompts":
        from medvl.eval.zero_shot_classification.prompts import list_prompts

        names = fnmatch.filter(list_prompts(), match)
    elif kind == "benchmarks":
        from medvl.benchmark.config import list_benchmarks

        names = fnmatch.filter(list_benchmarks(), match)
    elif kind == "recipes":
        names = recipes.recipes_with_numbers(match)
    else:
        listers: dict[str, Callable[[str], list[str]]] = {
            "models": models.list_models,
            "image-encoders": encoders.list_image_encoders,
            "text-encoders": encoders.list_text_encoders,
            "pretrained": lambda pattern: [
                "  ".join(pair) for pair in models.list_pretrained(pattern)
            ],
        }
        names = listers[kind](match)
    if not names:
        print(
            f"medvl: none of the {kind} matches {match!r}; * stands for any characters: '*bert*'",
            file=sys.stderr,
        )
    for name in names:
        print(name)


_GROUPS: dict[str, dict[str, Callable[..., Any]]] = {
    "phantom": {"quickstart": quickstart.quickstart, **phantom.COMMANDS},
    "shards": conversion.COMMANDS,
    "eval": evaluation.COMMANDS,
    "knowledge": {
        "build": knowledge.build,
        "train": knowledge.train,
        "find": knowledge.find,
        "radgraph": knowledge.radgraph,
        "statements": knowledge.statements,
    },
    "recipes": recipes.RECIPES,
    "cards": recipes.CARDS,
}
_COMMANDS: dict[str, Callable[..., Any]] = {
    "merge": corpora.merge,
    "upload": upload.upload,
    "vocab": text.vocab,
    "fit-pixelhop": fit_pixelhop.fit_pixelhop,
    "verify": verify.verify,
    "regions": regions.regions,
    "infer": infer.infer,
    "generate": generate.generate,
    "compare": compare.compare,
    "benchmark": benchmark.benchmark,
    "serve": serve.serve,
    "import": import_export.import_published,
    "export": import_export.export_checkpoint,
    "consolidate": import_export.consolidate_checkpoint,
    "interpolate": interpolate.interpolate,
    "list": list_everything,
}
_RECIPE_COMMANDS: dict[str, Callable[[list[str]], str | None]] = {
    "train": recipes.train,
    "doctor": doctor.doctor,
}
"""Commands whose arguments are the command line of a recipe."""
_WITH_FLAGS = {"infer", "generate"}
"""Commands whose required arguments are flags, unless marked as positional."""
_RESUMABLE = {"shards", "merge", "upload", "regions", "train", "infer", "benchmark", "generate"}
"""Commands that continue where they were interrupted."""


def commands() -> dict[str, Callable[..., Any]]:
    """Return the function of every command by its full name, such as `shards table`, in the
    order of the help.
    """
    grouped = {
        f"{name} {sub}": function
        for name, group in _GROUPS.items()
        for sub, function in group.items()
    }
    return grouped | _COMMANDS | _RECIPE_COMMANDS


def main(arguments: list[str] | None = None) -> None:
    """Run the `medvl` command.

    Bad input and system errors end it with status 1, Ctrl-C with status 130, each with a one-line
    message.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        output = _run(arguments[0] if arguments else "--help", arguments[1:])
        if output:
            print(output)
    except KeyboardInterrupt:
        resume = "; run the same command again to resume" if set(arguments[:1]) & _RESUMABLE else ""
        _fail(f"interrupted{resume}", status=130)
    except MedvlError as error:
        unnamed = error.field is not None and error.field not in str(error)
        code = f" [{error.code}]" if ERROR_CODES in os.environ else ""
        _fail((f"{error.field}: {error}" if unnamed else str(error)) + code)
    except OSError as error:
        _fail(
            f"{error.filename}: {error.strerror}"
            if error.filename
            else error.strerror or str(error)
        )


def _run(command: str, arguments: list[str]) -> str | None:
    """Run a command. Returns the text to print."""
    if command in ("-h", "--help"):
        return _usage()
    if command == "--version":
        return f"medvl {__version__}"
    if command in _GROUPS:
        return _run_grouped(command, _GROUPS[command], arguments)
    if command in _COMMANDS:
        function = _COMMANDS[command]
        if command not in _WITH_FLAGS:
            function = tyro.conf.configure(tyro.conf.PositionalRequiredArgs)(function)
        return tyro.cli(function, prog=f"medvl {command}", args=arguments)
    if command in _RECIPE_COMMANDS:
        return _RECIPE_COMMANDS[command](arguments)
    raise _unknown(command)


def _run_grouped(
    name: str, group: dict[str, Callable[..., Any]], arguments: list[str]
) -> str | None:
    """Run a command of a group. Its parser is its own, so that errors name `medvl GROUP COMMAND
    --help`.
    """
    options = [tyro.conf.OmitArgPrefixes]
    if not arguments or arguments[0].startswith("-"):
        return tyro.extras.subcommand_cli_from_dict(
            group, prog=f"medvl {name}", args=arguments, config=options
        )
    command, *rest = arguments
    if command not in group:
        raise _unknown(f"{name} {command}")
    with evaluation.joined_ranks(command) if name == "eval" else nullcontext():
        return tyro.cli(group[command], prog=f"medvl {name} {command}", args=rest, config=options)


def _unknown(name: str) -> ConfigError:
    """Return the error for a command that does not exist; it names the nearest one."""
    full_names = {known.rpartition(" ")[2]: known for known in commands()} | {
        known: known for known in commands()
    }
    full_names |= {group: f"{group} --help" for group in _GROUPS}
    near = difflib.get_close_matches(name, full_names, n=1)
    advice = f"did you mean medvl {full_names[near[0]]}?" if near else "see medvl --help"
    return ConfigError(
        f"expected a command of medvl, got {name!r}; {advice}", "unknown_name", field=name
    )


def _fail(message: str, status: int = 1) -> NoReturn:
    print(f"medvl: {message}", file=sys.stderr)
    raise SystemExit(status) from None


def _usage() -> str:
    lines = [f"  {name:24} {_summary(function)}" for name, function in commands().items()]
    closing = "Options: medvl COMMAND --help. Settings of a recipe: medvl train convirt tiny --help"
    return "\n".join(
        ["usage: medvl COMMAND ...", "       medvl --version", "", *lines, "", closing]
    )


def _summary(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    main()
