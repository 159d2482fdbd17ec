"""The command line of a recipe: presets by name, every field of the config as a flag."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

from medvl.common.config_io import nearest
from medvl.errors import ConfigError, MedvlError

if TYPE_CHECKING:
    from medvl.train.run import Run

Recipe = TypeVar("Recipe")

DEFAULT_PRESET = "paper"


def launch(prepare: "Callable[[Recipe], Run]", presets: Mapping[str, Recipe], description: str) -> None:
    """What a recipe does as a program: settings from the command line, the run, and how it ended.

    `prepare` makes the run. Bad input or settings end the process with status 1 and `error: ...`, no traceback.
    """
    try:
        result = prepare(choose(presets, description=description)).train()
    except MedvlError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"{result}\n")


def choose(presets: Mapping[str, Recipe], argv: Sequence[str] | None = None, description: str | None = None) -> Recipe:
    """The recipe that a command line asks for.

        recipe.py                          the preset `paper`
        recipe.py tiny                     the preset of that name
        recipe.py tiny --optim.lr 3e-4     ... with a field changed
        recipe.py --help                   every field, with its value in the preset

    `presets` are frozen config dataclasses. Where a field may be one of several dataclasses (a schedule), the preset
    decides which, and the flags change its values. `argv` is without the program's name; None takes `sys.argv`.

    A wrong command line (no such preset, no such flag, a value out of range) ends the process with status 2 and a
    text that names it, as command lines do: no traceback.
    """
    import tyro

    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else DEFAULT_PRESET
    if name not in presets:
        _end(f"no preset {name!r}: {nearest(name, presets)}")
    about = f"Presets: {', '.join(presets)} (this is {name}; name another one first)."
    try:
        return tyro.cli(
            type(presets[name]),
            args=arguments,
            default=presets[name],
            description=f"{description}\n\n{about}" if description else about,
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
        )
    except ConfigError as error:
        _end(str(error))


def _end(reason: str) -> NoReturn:
    sys.stderr.write(f"error: {reason}\n")
    raise SystemExit(2)
