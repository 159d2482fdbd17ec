"""Command line of a recipe: presets by name, every field of the config as a flag."""

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

from medvl.common.config_io import nearest
from medvl.errors import ConfigError, MedvlError

if TYPE_CHECKING:
    from medvl.train.run import Run

Recipe = TypeVar("Recipe")

DEFAULT_PRESET = "paper"
_command: contextvars.ContextVar[str | None] = contextvars.ContextVar("command", default=None)


@contextlib.contextmanager
def shown_as(command: str) -> Iterator[None]:
    """Show this command in the help and the errors of `choose`, in place of the name of the program."""
    token = _command.set(command)
    try:
        yield
    finally:
        _command.reset(token)


def launch(prepare: "Callable[[Recipe], Run]", presets: Mapping[str, Recipe], description: str) -> None:
    """Run a recipe as a program: read the settings from the command line, train, and print the result.

    `prepare` creates the run. A MedvlError ends the process with status 1 and `error: ...`, Ctrl-C with status 130 and
    one line, both without a traceback.
    """
    try:
        result = prepare(choose(presets, description=description)).train()
    except MedvlError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        _exit("interrupted; run the same command again to resume", status=130)
    sys.stdout.write(f"{result}\n")


def choose(presets: Mapping[str, Recipe], argv: Sequence[str] | None = None, description: str | None = None) -> Recipe:
    """Return the settings that a command line selects.

        recipe.py                          the preset `paper`
        recipe.py tiny                     the preset of that name
        recipe.py tiny --optim.lr 3e-4     ... with a field changed
        recipe.py --help                   every field, with its value in the preset

    A wrong command line (unknown preset or flag, value out of range) ends the process with status 2 and an error
    message, without a traceback.

    Args:
        presets: frozen config dataclasses. Where a field may be one of several dataclasses (a schedule), the preset
            determines which one, and the flags change its values.
        argv: arguments without the program's name; None takes `sys.argv`.
        description: first line of the help.
    """
    import tyro

    arguments = list(sys.argv[1:] if argv is None else argv)
    given = [arguments.pop(0)] if arguments and not arguments[0].startswith("-") else []
    name = given[0] if given else DEFAULT_PRESET
    command = _command.get()
    if name not in presets:
        _exit(f"no preset {name!r}: {nearest(name, presets)}")
    usage = f"Presets: {', '.join(presets)}. This is {name}; give another name first to select it."
    try:
        return tyro.cli(
            type(presets[name]),
            prog=command and " ".join([command, *given]),
            args=arguments,
            default=presets[name],
            description=f"{description}\n\n{usage}" if description else usage,
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
        )
    except ConfigError as error:
        _exit(str(error))


def _exit(reason: str, status: int = 2) -> NoReturn:
    sys.stderr.write(f"error: {reason}\n")
    raise SystemExit(status) from None
