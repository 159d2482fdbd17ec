"""`medvl doctor`: how fast a recipe is here, and what limits it."""

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from medvl.errors import ConfigError
from medvl.train.recipe_cli import choose


def doctor(arguments: Sequence[str]) -> str:
    """Measure a recipe part by part, and name what limits it.

    Raises ConfigError where the file is no recipe, and what its data and model raise.
    """
    options = _parser().parse_args(arguments)
    recipe, settings = load_recipe(options.recipe, options.settings)
    run = recipe.prepare(settings)
    from medvl.train.doctor.diagnosis import advice, describe, limit
    from medvl.train.doctor.examine import examine

    logging.getLogger("medvl").setLevel(logging.WARNING)
    found = examine(run, options.seconds)
    if options.json is not None:
        told = {**dataclasses.asdict(found), "mfu": found.mfu, "limit": limit(found), "advice": advice(found, settings)}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return describe(found, settings)


def load_recipe(path: Path, arguments: Sequence[str]) -> tuple[ModuleType, Any]:
    """The module of a recipe's file, and its settings from the rest of a command line.

    Raises ConfigError where the file is missing or is no recipe.
    """
    spec = spec_from_file_location(f"recipe_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file: name that of a recipe, such as recipes/convirt_mimic.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses are looked up
    spec.loader.exec_module(module)
    if not (hasattr(module, "PRESETS") and hasattr(module, "prepare")):
        raise ConfigError(f"{path} is no recipe: it defines no PRESETS and prepare")
    return module, choose(module.PRESETS, list(arguments), description=module.__doc__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="medvl doctor", description="Measure a recipe, and name what limits it.")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of about six measurements (default 10)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("recipe", type=Path, help="its file, such as recipes/convirt_mimic.py")
    parser.add_argument(
        "settings", nargs=argparse.REMAINDER, help="preset and options of the recipe: tiny --data.train DIR"
    )
    return parser
