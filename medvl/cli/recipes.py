"""`medvl train`, `medvl recipes` and `medvl cards`: the recipes and data cards that come with
the package.
"""

import argparse
import dataclasses
import fnmatch
import json
import logging
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro

from medvl.cli.help import example
from medvl.common.config_io import nearest
from medvl.common.files import write_atomic
from medvl.common.process import LEVEL
from medvl.data.storage.location import is_address
from medvl.data.storage.webdataset_tars import is_tar_pattern
from medvl.errors import ConfigError, TrainingError
from medvl.train.recipe_files import (
    DEFAULT_PRESET,
    choose,
    find_recipe,
    load_recipe_module,
    outline,
    packaged_files,
    shown_as,
)

_log = logging.getLogger(__name__)


def train(arguments: Sequence[str]) -> None:
    """Train a recipe, by the name of its system or by its file.

    With `ranks`, the process is replaced by torchrun; under torchrun, it is one of its ranks.
    Raises ConfigError if there is no such recipe.
    """
    options, settings = _train_parser(
        add_help=arguments[:1] in ([], ["-h"], ["--help"])
    ).parse_known_args(list(arguments) or ["--help"])
    path = find_recipe(options.recipe)
    if options.ranks is not None and "RANK" not in os.environ:
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            options.ranks,
        ]
        # torchrun warns without; the trainer sets threads itself
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.stdout.flush()
        level = logging.getLevelName(logging.getLogger("medvl").getEffectiveLevel())
        os.execve(
            sys.executable,
            [sys.executable, *launcher, str(path), *settings],
            {**os.environ, LEVEL: level},
        )
    if {"-h", "--help"} & {*settings}:
        _print_help(options.recipe, path, settings)
        return
    sys.argv = [str(path), *settings]
    if "--help-all" not in settings:
        _log.info("loading the recipe %s", path)
    with shown_as(f"medvl train {options.recipe}"):
        runpy.run_path(str(path), run_name="__main__")


def _print_help(name: str, path: Path, settings: Sequence[str]) -> None:
    """Print the usual settings of a recipe, from the cache if neither it nor medvl has changed."""
    from medvl.train.recipe_files import cache_help, cached_help, short_help

    given = [] if settings[0].startswith("-") else [settings[0]]
    preset = given[0] if given else DEFAULT_PRESET
    packaged = path in packaged_files("recipes", ".py").values()
    text = cached_help(path.stem, preset, path) if packaged else None
    if text is None:
        module = load_recipe_module(path)
        if preset not in module.PRESETS:
            raise ConfigError(
                f"no preset {preset!r}: {nearest(preset, module.PRESETS)}",
                "unknown_name",
                field="preset",
            )
        summary = (module.__doc__ or "").partition("\n")[0]
        texts = {
            one: short_help("{command}", summary, module.PRESETS, one) for one in module.PRESETS
        }
        if packaged:
            cache_help(path.stem, texts, path)
        text = texts[preset]
    print(text.replace("{command}", " ".join(["medvl train", name, *given])))


def _train_parser(add_help: bool) -> argparse.ArgumentParser:
    """Return the parser of `train`'s own options, which may stand before or after the recipe and
    its settings.
    """
    parser = argparse.ArgumentParser(
        prog="medvl train",
        usage="medvl train [--ranks N] RECIPE [PRESET] [settings of the recipe ...]",
        description="Train a recipe. RECIPE [PRESET] --help lists its "
        "settings; medvl recipes list, all recipes. torchrun -m medvl train RECIPE ... trains "
        "on several machines.",
        epilog=f"Example: {example('train')}",
        add_help=add_help,  # --help after the recipe is that of the recipe
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ranks", help="processes on this machine: a number, gpu, cpu or auto (default 1)"
    )
    parser.add_argument(
        "recipe", help="convirt, m3ae, vqa, ..., or a file such as recipes/convirt_mimic.py"
    )
    return parser


def list_recipes(*, match: str = "") -> None:
    """List the recipes with their presets, summaries and numbers of published results.

    Args:
        match: show only recipes whose name or summary contains this text.
    """
    from medvl.eval.published.numbers import published_numbers

    counts = Counter(number.recipe for number in published_numbers())
    for stem, path in packaged_files("recipes", ".py").items():
        presets, summary = outline(path)
        if match.lower() in f"{stem} {summary}".lower():
            numbers = f"; published numbers: {counts[stem]}" if counts[stem] else ""
            print(f"{stem:22} {summary}\n{'':22} presets: {', '.join(presets)}{numbers}")


def recipes_with_numbers(match: str) -> list[str]:
    """Return the recipes whose names match a wildcard pattern, each as lines with its presets
    and published numbers.
    """
    shown = []
    for stem, path in packaged_files("recipes", ".py").items():
        if fnmatch.fnmatch(stem, match):
            presets, summary = outline(path)
            shown.append(
                "\n".join(
                    [
                        f"{stem}: {summary}",
                        f"  presets: {', '.join(presets)}",
                        *_number_lines(stem),
                        "",
                    ]
                )
            )
    return shown


def _number_lines(recipe: str | None) -> list[str]:
    """Return the published numbers of a recipe, or of all, under the commands that should
    reproduce them.
    """
    from medvl.eval.published.numbers import published_numbers, without_numbers

    lines = []
    command = ("", "")
    for one in published_numbers(recipe):
        if (one.recipe, one.command) != command:
            command = one.recipe, one.command
            lines.append(f"\n{one.recipe}: {one.command}")
        notes = "; ".join(filter(None, ["" if one.checked else "not checked", one.note]))
        lines.append(f"  {one.value:<8g} {one.dataset}, {one.split}: {one.metric}")
        lines.append(f"{'':11}{one.source}{f' ({notes})' if notes else ''}")
    reasons = without_numbers().items()
    return [
        *lines,
        *(f"\n{name}: no numbers; {reason}" for name, reason in reasons if recipe in (None, name)),
    ]


def show_numbers(
    recipe: Annotated[str, tyro.conf.Positional] = "", *, markdown: bool = False
) -> None:
    """Print the published numbers of a recipe, or of all, and the commands that should reproduce
    them.

    The commands need the paper's weights or a whole training run, and the data.

    Args:
        recipe: name of a recipe, such as convirt_mimic or convirt.
        markdown: print Markdown.
    """
    from medvl.eval.published.numbers import published_markdown, published_numbers, without_numbers

    name = find_recipe(recipe).stem if recipe else None
    reasons = without_numbers()
    if markdown:
        reasons = reasons if name is None else {name: reasons[name]} if name in reasons else {}
        print(published_markdown(published_numbers(name), reasons), end="")
    else:
        print("\n".join(_number_lines(name)))


def copy_recipe(
    recipe: Annotated[str, tyro.conf.Positional],
    dest: Annotated[Path, tyro.conf.Positional] = Path(),
) -> None:
    """Copy a recipe, to edit it and train it as `medvl train FILE.py`.

    Args:
        recipe: name of the recipe, such as convirt_mimic or convirt.
        dest: folder or file of the copy; existing files are not overwritten.
    """
    source = find_recipe(recipe)
    target = dest / source.name if dest.is_dir() or dest.suffix != ".py" else dest
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"{target} exists; name another file, or remove it", "exists", field="dest"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, source.read_bytes())
    print(f"Wrote {target}. Next: medvl train {target} tiny --help")


def list_cards() -> None:
    """List the data cards: access, licence, layout, counts and defects of each corpus."""
    for stem, path in packaged_files("data_cards", ".md").items():
        print(f"{stem:18} {path.read_text(encoding='utf-8').partition(chr(10))[0].lstrip('# ')}")


def show_card(card: Annotated[str, tyro.conf.Positional]) -> None:
    """Print a data card.

    Args:
        card: name of the card, such as mimic-cxr.
    """
    cards = packaged_files("data_cards", ".md")
    if card not in cards:
        raise ConfigError(
            f"no data card {card!r}: {nearest(card, cards)}", "unknown_name", field="card"
        )
    print(cards[card].read_text(encoding="utf-8"), end="")


RECIPES: dict[str, Callable[..., None]] = {
    "list": list_recipes,
    "copy": copy_recipe,
    "numbers": show_numbers,
}
CARDS: dict[str, Callable[..., None]] = {"list": list_cards, "show": show_card}


# `medvl doctor`: training speed of a recipe on this machine; checks of several nodes, and of
# remote shards.


def doctor(arguments: Sequence[str]) -> str:
    """Measure the training speed of a recipe and find its bottleneck, or check several nodes or
    remote shards; or compute the cost of a volume on paper.

    Raises ConfigError if the file is not a recipe, and the errors of its data and model; `nodes`
    raises TrainingError if a check fails.
    """
    if arguments[:1] == ["nodes"]:
        return _nodes(arguments[1:])
    if arguments[:1] == ["shards"]:
        return _shards(arguments[1:])
    if arguments[:1] == ["volumes"]:
        return _volumes(arguments[1:])
    options, recipe_arguments = _parser(
        add_help=arguments[:1] in (["-h"], ["--help"])
    ).parse_known_args(arguments)
    with shown_as(f"medvl doctor {options.recipe}"):
        recipe, settings = load_recipe(find_recipe(options.recipe), recipe_arguments)
    _log.info("opening the data and creating the model of %s", options.recipe)
    run = recipe.prepare(settings)
    from medvl.train.doctor.examine import advice, describe, examine, limit

    logging.getLogger("medvl").setLevel(logging.WARNING)
    examination = examine(run, options.seconds)
    if options.out is not None:
        measured = {**dataclasses.asdict(examination), "mfu": examination.mfu}
        diagnosis = {"limit": limit(examination), "advice": advice(examination, settings)}
        write_atomic(options.out, json.dumps(measured | diagnosis, indent=1) + "\n")
    described = describe(examination, settings)
    if is_address(settings.data.train) and not is_tar_pattern(settings.data.train):
        from medvl.train.doctor.checks import check_remote_shards, describe_remote_shards

        described = (
            f"{described}\n{describe_remote_shards(check_remote_shards(settings.data.train))}"
        )
    return described


def load_recipe(path: Path, arguments: Sequence[str]) -> tuple[ModuleType, Any]:
    """Import the module of a recipe, and parse its settings from the arguments.

    Raises ConfigError if the file is missing or is not a recipe.
    """
    module = load_recipe_module(path)
    return module, choose(module.PRESETS, list(arguments), description=module.__doc__)


def _volumes(arguments: Sequence[str]) -> str:
    """Compute the cost of a volume in the encoder of a recipe, without data. Returns the report.

    Raises ConfigError for a recipe of images.
    """
    parser = argparse.ArgumentParser(
        prog="medvl doctor volumes",
        usage="medvl doctor volumes RECIPE [PRESET] [settings of the recipe ...] [--plan ...]",
        description="Operations and memory of one volume in the encoder of a recipe, without data; "
        "with --plan, hours, terabytes and cost of a corpus.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="recipe of a system of volumes, such as hlip_ct_rate")
    _add_plan_options(parser)
    options, rest = parser.parse_known_args(arguments)
    _, settings = load_recipe(find_recipe(options.recipe), rest)
    from medvl.models.volumes.base import VolumeDualConfig
    from medvl.train.doctor.volume_plan import describe_cost, volume_cost

    model = getattr(settings, "model", None)
    if not isinstance(model, VolumeDualConfig):
        raise ConfigError(
            f"{options.recipe} reads images, whose cost `medvl doctor` measures; give a recipe of "
            "volumes",
            "unsupported",
            field="recipe",
        )
    encoder = {"name": model.image_encoder, "size": model.volume_size, **model.image_arguments}
    cost = volume_cost(encoder)
    if not options.plan:
        return describe_cost(cost)
    return f"{describe_cost(cost)}\n\n{_volume_plan(options, cost, settings)}"


_PLAN = {
    "tflops": (float, 1, "peak of one device in TFLOP/s at the precision of the run (required)"),
    "price": (float, 1, "price of one machine for an hour, in any currency"),
    "volumes": (int, 1, "volumes of the corpus; default 47149, CT-RATE's training part"),
    "scans": (int, 1, "scans that they belong to; default 24128"),
    "raw-tb": (float, 1, "terabytes of the corpus as downloaded; default 21"),
    "source": (int, 3, "voxels of a typical file along z y x; default 256 512 512"),
    "source-spacing": (float, 3, "its spacing in mm; default 1.25 0.68 0.68"),
    "spacing": (float, 3, "spacing of the shards in mm; default 3 1 1"),
    "epochs": (float, 1, "passes over the data; default those of the recipe"),
    "utilisation": (float, 1, "share of the peak that a step reaches; default 0.35"),
    "devices": (int, 1, "devices of a machine; default 8"),
    "cores": (int, 1, "cores of a machine; default those of this one"),
    "network-gbit": (float, 1, "rate of the download of one machine; default 10"),
    "scaling": (float, 1, "speed of several machines as a share of so many times one; default 0.9"),
    "machines": (int, "+", "numbers of machines to plan for; default 1 8"),
}
"""Options of `medvl doctor volumes --plan`: type, number of values, help."""


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", action="store_true", help="plan the training on a corpus")
    for name, (kind, count, text) in _PLAN.items():
        several: dict[str, Any] = {} if count == 1 else {"nargs": count}
        parser.add_argument(f"--{name}", type=kind, help=text, **several)


def _volume_plan(options: argparse.Namespace, cost: Any, settings: Any) -> str:
    """Return the plan. Raises ConfigError for values that are not above 0."""
    from medvl.train.doctor.volume_plan import PlanOptions, describe_plan, measure_rates

    given: dict[str, Any] = {}
    for name in _PLAN:
        value = getattr(options, name.replace("-", "_"))
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if not all(0 < each < float("inf") for each in values):
            raise ConfigError(f"expected --{name} above 0, got {value}", "out_of_range", field=name)
        given[name.replace("-", "_")] = tuple(value) if isinstance(value, list) else value
    if "tflops" not in given:
        raise ConfigError(
            "a plan needs the peak of the devices: give --tflops", "missing", field="tflops"
        )
    plan = PlanOptions(**given)
    return describe_plan(plan, measure_rates(plan, cost.size), cost, settings)


def _shards(arguments: Sequence[str]) -> str:
    """Check remote shards from this machine. Returns the report."""
    parser = argparse.ArgumentParser(
        prog="medvl doctor shards",
        usage="medvl doctor shards ADDRESS [--out FILE]",
        description="Check remote shards: access, latency, throughput, and the local cache.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "address", help="folder of shards in a store: s3://, gs://, az://, hf:// or https://"
    )
    parser.add_argument("--out", type=Path, help="output file of the measurements")
    options = parser.parse_args(arguments)
    from medvl.train.doctor.checks import check_remote_shards, describe_remote_shards

    measurements = check_remote_shards(options.address)
    if options.out is not None:
        write_atomic(options.out, json.dumps(dataclasses.asdict(measurements), indent=1) + "\n")
    return describe_remote_shards(measurements)


def _nodes(arguments: Sequence[str]) -> str:
    """Check rendezvous, collectives, versions, clocks and storage of several nodes. Rank 0
    returns the report.
    """
    parser = argparse.ArgumentParser(
        prog="medvl doctor nodes",
        usage="torchrun --nnodes N ... -m medvl doctor nodes [--storage DIR] [--megabytes M] "
        "[--out FILE]",
        description="Check several nodes before a run: rendezvous, all-reduce, versions, "
        "clocks, shared storage.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--storage", type=Path, help="folder that all nodes mount, for shards and checkpoints"
    )
    parser.add_argument(
        "--megabytes", type=int, default=64, help="size of the measured all-reduce (default 64)"
    )
    parser.add_argument("--out", type=Path, help="output file of the report")
    options = parser.parse_args(arguments)
    from medvl.train.doctor.checks import check_nodes
    from medvl.train.parallel.distributed import join

    started = time.perf_counter()
    with join() as ranks:
        report = check_nodes(
            ranks, time.perf_counter() - started, options.storage, options.megabytes
        )
        if ranks.is_main and options.out is not None:
            write_atomic(options.out, json.dumps(dataclasses.asdict(report), indent=1) + "\n")
        if report.problems and ranks.is_main:
            print(report)
        if report.problems:
            problems = (
                f"{len(report.problems)} checks of the nodes failed; see the report of rank 0"
            )
            raise TrainingError(problems, "mismatch", field="nodes")
        return str(report) if ranks.is_main else ""


def _parser(add_help: bool) -> argparse.ArgumentParser:
    """Return the parser of doctor's own options, which may stand before or after the recipe and
    its settings.
    """
    parser = argparse.ArgumentParser(
        prog="medvl doctor",
        usage="medvl doctor [--seconds S] [--out FILE] RECIPE [PRESET] [settings of the recipe "
        "...]\n"
        "       torchrun --nnodes N ... -m medvl doctor nodes [--storage DIR]\n"
        "       medvl doctor shards ADDRESS [--out FILE]\n"
        "       medvl doctor volumes RECIPE [PRESET] [settings of the recipe ...] [--plan ...]",
        description="Measure a recipe and find its bottleneck. RECIPE --help lists its settings.",
        epilog=f"Example: {example('doctor')}",
        add_help=add_help,  # --help after the recipe is that of the recipe
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="seconds of each of about six measurements (default 10)",
    )
    parser.add_argument("--out", type=Path, help="output file of the measurements")
    parser.add_argument(
        "recipe", help="name or file of the recipe, such as convirt or recipes/convirt_mimic.py"
    )
    return parser
