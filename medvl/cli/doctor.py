"""`medvl doctor`: training speed of a recipe on this machine; checks of several nodes, and of remote shards."""

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from medvl.common.files import write_atomic
from medvl.data.storage.location import is_address
from medvl.data.storage.webdataset_tars import is_tar_pattern
from medvl.errors import TrainingError
from medvl.train.recipe_cli import choose, shown_as
from medvl.train.recipe_files import find_recipe, load_recipe_module


def doctor(arguments: Sequence[str]) -> str:
    """Measure the training speed of a recipe and find its bottleneck, or check several nodes or remote shards.

    Raises ConfigError if the file is not a recipe, and the errors of its data and model; `nodes` raises TrainingError
    if a check fails.
    """
    if arguments[:1] == ["nodes"]:
        return _nodes(arguments[1:])
    if arguments[:1] == ["shards"]:
        return _shards(arguments[1:])
    options, recipe_arguments = _parser(add_help=arguments[:1] in (["-h"], ["--help"])).parse_known_args(arguments)
    with shown_as(f"medvl doctor {options.recipe}"):
        recipe, settings = load_recipe(find_recipe(options.recipe), recipe_arguments)
    run = recipe.prepare(settings)
    from medvl.train.doctor.diagnosis import advice, describe, limit
    from medvl.train.doctor.examine import examine

    logging.getLogger("medvl").setLevel(logging.WARNING)
    examination = examine(run, options.seconds)
    if options.json is not None:
        measured = {**dataclasses.asdict(examination), "mfu": examination.mfu}
        diagnosis = {"limit": limit(examination), "advice": advice(examination, settings)}
        write_atomic(options.json, json.dumps(measured | diagnosis, indent=1) + "\n")
    described = describe(examination, settings)
    if is_address(settings.data.train) and not is_tar_pattern(settings.data.train):
        from medvl.train.doctor.remote_shards import check_remote_shards, describe_remote_shards

        described = f"{described}\n{describe_remote_shards(check_remote_shards(settings.data.train))}"
    return described


def load_recipe(path: Path, arguments: Sequence[str]) -> tuple[ModuleType, Any]:
    """Import the module of a recipe, and parse its settings from the arguments.

    Raises ConfigError if the file is missing or is not a recipe.
    """
    module = load_recipe_module(path)
    return module, choose(module.PRESETS, list(arguments), description=module.__doc__)


def _shards(arguments: Sequence[str]) -> str:
    """Check remote shards from this machine. Returns the report."""
    parser = argparse.ArgumentParser(
        prog="medvl doctor shards",
        usage="medvl doctor shards ADDRESS [--json FILE]",
        description="Check remote shards: access, latency, throughput, and the local cache.",
        allow_abbrev=False,
    )
    parser.add_argument("address", help="folder of shards in a store: s3://, gs://, az://, hf:// or https://")
    parser.add_argument("--json", type=Path, help="output file of the measurements")
    options = parser.parse_args(arguments)
    from medvl.train.doctor.remote_shards import check_remote_shards, describe_remote_shards

    found = check_remote_shards(options.address)
    if options.json is not None:
        write_atomic(options.json, json.dumps(dataclasses.asdict(found), indent=1) + "\n")
    return describe_remote_shards(found)


def _nodes(arguments: Sequence[str]) -> str:
    """Check rendezvous, collectives, versions, clocks and storage of several nodes. Rank 0 returns the report."""
    parser = argparse.ArgumentParser(
        prog="medvl doctor nodes",
        usage="torchrun --nnodes N ... -m medvl doctor nodes [--storage DIR] [--megabytes M] [--json FILE]",
        description="Check several nodes before a run: rendezvous, all-reduce, versions, clocks, shared storage.",
        allow_abbrev=False,
    )
    parser.add_argument("--storage", type=Path, help="folder that all nodes mount, for shards and checkpoints")
    parser.add_argument("--megabytes", type=int, default=64, help="size of the measured all-reduce (default 64)")
    parser.add_argument("--json", type=Path, help="output file of the report")
    options = parser.parse_args(arguments)
    from medvl.train.doctor.nodes import check_nodes
    from medvl.train.parallel.distributed import join

    started = time.perf_counter()
    with join() as ranks:
        report = check_nodes(ranks, time.perf_counter() - started, options.storage, options.megabytes)
        if ranks.is_main and options.json is not None:
            write_atomic(options.json, json.dumps(dataclasses.asdict(report), indent=1) + "\n")
        if report.problems and ranks.is_main:
            print(report)
        if report.problems:
            problems = f"{len(report.problems)} checks of the nodes failed; see the report of rank 0"
            raise TrainingError(problems, "mismatch", field="nodes")
        return str(report) if ranks.is_main else ""


def _parser(add_help: bool) -> argparse.ArgumentParser:
    """Return the parser of doctor's own options, which may stand before or after the recipe and its settings."""
    parser = argparse.ArgumentParser(
        prog="medvl doctor",
        usage="medvl doctor [--seconds S] [--json FILE] RECIPE [PRESET] [settings of the recipe ...]\n"
        "       torchrun --nnodes N ... -m medvl doctor nodes [--storage DIR]\n"
        "       medvl doctor shards ADDRESS [--json FILE]",
        description="Measure a recipe and find its bottleneck. RECIPE --help lists its settings.",
        add_help=add_help,  # --help after the recipe is that of the recipe
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds of each of about six measurements (default 10)"
    )
    parser.add_argument("--json", type=Path, help="output file of the measurements")
    parser.add_argument("recipe", help="name or file of the recipe, such as convirt or recipes/convirt_mimic.py")
    return parser
