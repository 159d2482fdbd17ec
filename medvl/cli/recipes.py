"""`medvl train`, `medvl recipes` and `medvl cards`: the recipes and data cards that come with the package."""

import argparse
import fnmatch
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from medvl.common.config_io import nearest
from medvl.common.files import write_atomic
from medvl.errors import ConfigError
from medvl.train.recipe_cli import shown_as
from medvl.train.recipe_files import find_recipe, outline, packaged_files


def train(arguments: Sequence[str]) -> None:
    """Train a recipe, by the name of its system or by its file.

    With `ranks`, the process is replaced by torchrun; under torchrun, it is one of its ranks. Raises ConfigError if
    there is no such recipe.
    """
    options, settings = _train_parser(add_help=arguments[:1] in ([], ["-h"], ["--help"])).parse_known_args(
        list(arguments) or ["--help"]
    )
    path = find_recipe(options.recipe)
    if options.ranks is not None and "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", options.ranks]
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun warns without; the trainer sets threads itself
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *launcher, str(path), *settings])
    sys.argv = [str(path), *settings]
    with shown_as(f"medvl train {options.recipe}"):
        runpy.run_path(str(path), run_name="__main__")


def _train_parser(add_help: bool) -> argparse.ArgumentParser:
    """Return the parser of `train`'s own options, which may stand before or after the recipe and its settings."""
    parser = argparse.ArgumentParser(
        prog="medvl train",
        usage="medvl train [--ranks N] RECIPE [PRESET] [settings of the recipe ...]",
        description="Train a recipe: medvl train convirt tiny --optim.lr 3e-4. RECIPE [PRESET] --help lists its "
        "settings; medvl recipes list, all recipes. torchrun -m medvl train RECIPE ... trains on several machines.",
        add_help=add_help,  # --help after the recipe is that of the recipe
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", help="processes on this machine: a number, gpu, cpu or auto (default 1)")
    parser.add_argument("recipe", help="convirt, m3ae, vqa, ..., or a file such as recipes/convirt_mimic.py")
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
    """Return the recipes whose names match a wildcard pattern, each as lines with its presets and published numbers."""
    shown = []
    for stem, path in packaged_files("recipes", ".py").items():
        if fnmatch.fnmatch(stem, match):
            presets, summary = outline(path)
            shown.append(
                "\n".join([f"{stem}: {summary}", f"  presets: {', '.join(presets)}", *_number_lines(stem), ""])
            )
    return shown


def _number_lines(recipe: str | None) -> list[str]:
    """Return the published numbers of a recipe, or of all, under the commands that should reproduce them."""
    from medvl.eval.published.numbers import published_numbers, without_numbers

    lines, command = [], ("", "")
    for one in published_numbers(recipe):
        if (one.recipe, one.command) != command:
            command = one.recipe, one.command
            lines.append(f"\n{one.recipe}: {one.command}")
        notes = "; ".join(filter(None, ["" if one.checked else "not checked", one.note]))
        lines.append(f"  {one.value:<8g} {one.dataset}, {one.split}: {one.metric}")
        lines.append(f"{'':11}{one.source}{f' ({notes})' if notes else ''}")
    reasons = without_numbers().items()
    return [*lines, *(f"\n{name}: no numbers; {reason}" for name, reason in reasons if recipe in (None, name))]


def show_numbers(recipe: Annotated[str, tyro.conf.Positional] = "", *, markdown: bool = False) -> None:
    """Print the published numbers of a recipe, or of all, and the commands that should reproduce them.

    The commands need the paper's weights or a whole training run, and the data.

    Args:
        recipe: name of a recipe, such as convirt_mimic or convirt.
        markdown: print Markdown.
    """
    from medvl.eval.published.numbers import published_markdown, published_numbers, without_numbers

    name, reasons = find_recipe(recipe).stem if recipe else None, without_numbers()
    if markdown:
        reasons = reasons if name is None else {name: reasons[name]} if name in reasons else {}
        print(published_markdown(published_numbers(name), reasons), end="")
    else:
        print("\n".join(_number_lines(name)))


def copy_recipe(
    recipe: Annotated[str, tyro.conf.Positional], dest: Annotated[Path, tyro.conf.Positional] = Path()
) -> None:
    """Copy a recipe, to edit it and train it as `medvl train FILE.py`.

    Args:
        recipe: name of the recipe, such as convirt_mimic or convirt.
        dest: folder or file of the copy; existing files are not overwritten.
    """
    source = find_recipe(recipe)
    target = dest / source.name if dest.is_dir() or dest.suffix != ".py" else dest
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists; name another file, or remove it", "exists", field="dest")
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
        raise ConfigError(f"no data card {card!r}: {nearest(card, cards)}", "unknown_name", field="card")
    print(cards[card].read_text(encoding="utf-8"), end="")


RECIPES: dict[str, Callable[..., None]] = {"list": list_recipes, "copy": copy_recipe, "numbers": show_numbers}
CARDS: dict[str, Callable[..., None]] = {"list": list_cards, "show": show_card}
