"""The `medvl` command: table of commands and entry point. Heavy libraries are imported by the
commands.
"""

import contextlib
import dataclasses
import difflib
import fnmatch
import functools
import importlib
import io
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import tyro

from medvl import __version__
from medvl.cli.help import OVERVIEW, ClassCommands, describe, family_help
from medvl.common.process import console
from medvl.errors import ERROR_CODES, ConfigError, MedvlError

_log = logging.getLogger(__name__)


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
        from medvl.cli.recipes import recipes_with_numbers

        names = recipes_with_numbers(match)
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


_FAMILIES: dict[str, str] = {
    "phantom": "medvl.cli.phantom:FAMILY",
    "shards": "medvl.cli.shards.commands:COMMANDS",
    "eval": "medvl.cli.eval:COMMANDS",
    "knowledge": "medvl.cli.knowledge:COMMANDS",
    "recipes": "medvl.cli.recipes:RECIPES",
    "cards": "medvl.cli.recipes:CARDS",
}
"""Family -> module and table of its commands."""
_COMMANDS: dict[str, str] = {
    "merge": "medvl.cli.shards.corpora:merge",
    "upload": "medvl.cli.shards.commands:upload",
    "vocab": "medvl.cli.shards.commands:vocab",
    "fit-pixelhop": "medvl.cli.import_export:fit_pixelhop",
    "verify": "medvl.cli.shards.commands:verify",
    "regions": "medvl.cli.shards.commands:regions",
    "infer": "medvl.cli.infer:infer",
    "embed": "medvl.cli.infer:embed",
    "generate": "medvl.cli.infer:generate",
    "compare": "medvl.cli.benchmark:compare",
    "benchmark": "medvl.cli.benchmark:benchmark",
    "serve": "medvl.cli.infer:serve",
    "import": "medvl.cli.import_export:import_published",
    "export": "medvl.cli.import_export:export_checkpoint",
    "consolidate": "medvl.cli.import_export:consolidate_checkpoint",
    "interpolate": "medvl.cli.import_export:interpolate",
    "list": "medvl.cli.main:list_everything",
    "completion": "medvl.cli.completion:completion",
}
"""Command -> module and function."""
_RECIPE_COMMANDS: dict[str, str] = {
    "train": "medvl.cli.recipes:train",
    "doctor": "medvl.cli.recipes:doctor",
}
"""Commands whose arguments are the command line of a recipe."""
_WITH_FLAGS = {
    *("infer", "embed", "generate", "vocab", "fit-pixelhop", "regions", "consolidate", "export"),
}
"""Commands whose required arguments are flags, unless marked as positional."""
_FORMER_ARGUMENTS = {
    "vocab": "--data FOLDER --out FOLDER",
    "fit-pixelhop": "--data FOLDER --out FOLDER",
    "regions": "--data FOLDER --detector NAME",
    "consolidate": "--checkpoint FOLDER --out FOLDER",
    "export": "--checkpoint FOLDER",
}
"""Command -> options that have replaced its arguments without a name."""
_FORMER_OPTIONS = {
    "knowledge train": {"--folder": "--knowledge", "--valid-share": "--validate-share"},
    "knowledge find": {"--folder": "--knowledge"},
    "eval probe": {"--random-encoder": "--random-weights"},
    "eval text": {"--vocab": "--tokenizer"},
    "doctor": {"--json": "--out"},
}
"""Command -> former name of an option -> its name."""
_RESUMABLE = {
    "shards",
    "merge",
    "upload",
    "regions",
    "train",
    "infer",
    "embed",
    "benchmark",
    "generate",
}
"""Commands that continue where they were interrupted."""
_LEVELS = {"--quiet": logging.WARNING, "--verbose": logging.DEBUG}
"""Options of every command -> the lowest level of log lines on stderr."""
_WRITTEN = {"out", "salt_file", "staging", "cache"}
"""Arguments that name what a command writes."""


def commands() -> dict[str, Callable[..., Any]]:
    """Return the function of every command by its full name, such as `shards table`, in the
    order of the help.
    """
    grouped = {
        f"{family} {name}": function
        for family, address in _FAMILIES.items()
        for name, function in _find(address).items()
    }
    return grouped | {
        name: _find(address) for name, address in (_COMMANDS | _RECIPE_COMMANDS).items()
    }


def _find(address: str) -> Any:
    """Import what `module:name` names."""
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)


def main(arguments: list[str] | None = None) -> None:
    """Run the `medvl` command.

    Bad input and system errors end it with status 1, Ctrl-C with status 130, each with a one-line
    message.
    """
    given = sys.argv[1:] if arguments is None else arguments
    arguments = [word for word in given if word not in _LEVELS]
    levels = [_LEVELS[word] for word in given if word in _LEVELS]
    if levels[-1:] == [logging.WARNING]:
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        with console(True, *levels[-1:]):
            output = run_command(arguments[0] if arguments else "--help", arguments[1:])
        if output:
            print(output)
    except KeyboardInterrupt:
        resume = "; run the same command again to resume" if set(arguments[:1]) & _RESUMABLE else ""
        _fail(f"interrupted{resume}", status=130)
    except MedvlError as error:
        if levels[-1:] == [logging.DEBUG]:
            traceback.print_exception(error)
        unnamed = error.field is not None and error.field not in str(error)
        code = f" [{error.code}]" if ERROR_CODES in os.environ else ""
        _fail((f"{error.field}: {error}" if unnamed else str(error)) + code)
    except OSError as error:
        _fail(
            f"{error.filename}: {error.strerror}"
            if error.filename
            else error.strerror or str(error)
        )


def run_command(command: str, arguments: list[str]) -> str | None:
    """Run a command. Returns the text to print."""
    if command in ("-h", "--help"):
        return OVERVIEW
    if command == "--version":
        return f"medvl {__version__}"
    if command in _FAMILIES:
        return _run_of_family(command, _find(_FAMILIES[command]), arguments)
    if command in _COMMANDS:
        return parse_and_run(command, _find(_COMMANDS[command]), arguments)
    if command in _RECIPE_COMMANDS:
        _check_names(command, arguments)
        output: str | None = _find(_RECIPE_COMMANDS[command])(arguments)
        return output
    raise _unknown(command)


def _run_of_family(
    family: str, functions: Mapping[str, Callable[..., Any]], arguments: list[str]
) -> str | None:
    made = functions if isinstance(functions, ClassCommands) else None
    if arguments[:1] in (["-h"], ["--help"]):
        return family_help(family, functions if made is None else made.summaries())
    if not arguments or arguments[0].startswith("-"):
        got = f", got {arguments[0]}" if arguments else ""
        _fail(f"expected a command of medvl {family}{got}; {_see(family)}", status=2)
    name, *rest = arguments
    if name not in functions:
        raise _unknown(f"{family} {name}")
    if made is None:
        return parse_and_run(f"{family} {name}", functions[name], rest)
    if rest in (["-h"], ["--help"]):
        print(_help_of_class(family, name, made))
        raise SystemExit(0)
    return parse_and_run(f"{family} {name}", made.function(name), rest)


def _help_of_class(family: str, name: str, made: ClassCommands) -> str:
    """Return the help of a command that is made from a class of medvl's; from the cache if medvl
    has not changed, because the module of a class takes seconds to import.
    """
    from medvl.train.recipe_files import cache_help, cached_help

    key = f"{shutil.get_terminal_size().columns} columns, terminal: {sys.stdout.isatty()}"
    text = cached_help(f"{family}-{name}", key)
    if text is None:
        printed = _Printed()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parse_and_run(f"{family} {name}", made.function(name), ["--help"])
        text = printed.getvalue().rstrip("\n")
        if made.is_own(name):
            cache_help(f"{family}-{name}", {key: text})
    return text


class _Printed(io.StringIO):
    """What a function prints, as on the terminal of this process."""

    def isatty(self) -> bool:
        """Return whether the real output is a terminal, on which help has colours."""
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def parse_and_run(name: str, function: Callable[..., Any], arguments: list[str]) -> str | None:
    """Call the function of a command with the values of its arguments.

    Args:
        name: full name of the command, such as `shards table`, which help and errors show.
        function: function whose parameters are the options.
        arguments: command line without the command.

    Raises what the function raises; a wrong command line ends the process with status 2.
    """
    _check_names(name, arguments)
    options: list[Any] = [tyro.conf.OmitArgPrefixes] if " " in name else []
    if " " not in name and name not in _WITH_FLAGS:
        options.append(tyro.conf.PositionalRequiredArgs)
    return tyro.cli(
        _announce(function),
        prog=f"medvl {name}",
        description=describe(name, function),
        args=arguments,
        config=options,
    )


def _check_names(name: str, arguments: list[str]) -> None:
    """End the process, and name the option of today, for a former name of an option."""
    first = arguments[0] if arguments else "-"
    if name in _FORMER_ARGUMENTS and not first.startswith("-"):
        usage = _FORMER_ARGUMENTS[name]
        _fail(f"expected {usage}, got {first!r} without an option; {_see(name)}", status=2)
    former = _FORMER_OPTIONS.get(name, {})
    for option in (word.partition("=")[0] for word in arguments):
        if option in former:
            _fail(
                f"expected {former[option]}, got its former name {option}; {_see(name)}", status=2
            )


def _see(name: str) -> str:
    return f"see medvl {name} --help"


def _announce(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, with a log line about the files and folders that it is about to open:
    libraries and checkpoints take seconds to load.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        opened = dict.fromkeys(_opened((arguments, named)))
        if opened and int(os.environ.get("RANK", 0)) == 0:
            _log.info("opening %s", ", ".join(opened))
        return function(*arguments, **named)

    return call


def _opened(value: Any, name: str = "") -> Iterator[str]:
    """Yield the existing paths, and the checkpoints, among the values of a command's options."""
    if name in _WRITTEN:
        return
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _opened(item, key)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _opened(item, name)
    elif (isinstance(value, Path) and value.exists()) or (name == "checkpoint" and value):
        yield str(value)


def _unknown(name: str) -> ConfigError:
    """Return the error for a command that does not exist; it names the nearest one."""
    full_names = {known.rpartition(" ")[2]: known for known in commands()} | {
        known: known for known in commands()
    }
    full_names |= {group: f"{group} --help" for group in _FAMILIES}
    near = difflib.get_close_matches(name, full_names, n=1)
    advice = f"did you mean medvl {full_names[near[0]]}?" if near else "see medvl --help"
    return ConfigError(
        f"expected a command of medvl, got {name!r}; {advice}", "unknown_name", field=name
    )


def _fail(message: str, status: int = 1) -> NoReturn:
    print(f"medvl: {message}", file=sys.stderr)
    raise SystemExit(status) from None


if __name__ == "__main__":
    main()
