"""Comparison of all dual-encoders: the same phantom, encoders, vocabulary and number of image-text pairs.

    python scripts/compare_dual.py --dry-run                       # list the runs
    python scripts/compare_dual.py --write                         # all systems, seed 0; table into RESULTS.md
    python scripts/compare_dual.py --systems convirt,mgca --seeds 0 1 2
    python scripts/compare_dual.py --systems none --extras         # the second table only

Systems are those of the registry. Each trains with the `tiny` preset of its recipe (loss, heads, texts, optimiser), but
with a ResNet-10 and a three-layer BERT at 112 pixels, from random weights, for `--steps` batches of `--batch` pairs.
The weights after the last step are evaluated, and those before the first ("at random"), all by one protocol:

* zero-shot: mean AUROC of the five competition findings, prompts `chexpert_ensemble`;
* retrieval: recall at 10 in both directions, on the same radiographs and their whole reports;
* grounding: pointing game and contrast-to-noise ratio of phrases of other phantom patients, maps of similarity with a
  smoothing of 0.7 cells (chosen on a further phantom for scripts/reproduce_results.sh);
* linear probe at 1 % of the labels: mean AUROC of the five, over five samples of patients;
* cost: median of the pairs per second that training logged, and peak memory of the process (on a GPU: of the GPU).

UMRL, whose encoders are frozen, has TF-IDF of the texts and the image encoder of ConVIRT's run in place of the common
encoders.

`--extras` compares ways of training one system: change classification with and without the prior image, and training
with few pairs and the other images and texts unpaired. Data and runs are written below `--data`; what exists there,
also from scripts/quickstart.sh, is used. Finished runs are not repeated and a killed one is resumed. A run that fails
is named below the table, and the exit status is 1.
"""

import argparse
import dataclasses
import itertools
import json
import runpy
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from compare_extras import extra_runs, extras_table
from compare_runs import COST, REFUSAL, Preset, Run, Sizes, execute, failures, make_data, make_run
from results import cell, provenance, replace

from medvl.errors import ConfigError, EvaluationError, MedvlError
from medvl.eval import read_results
from medvl.models import DualEncoder, DualEncoderConfig, list_models, system

ROOT = Path(__file__).parents[1]
SETTINGS_OF = {"clip": "chexzero"}
"""Systems without a recipe -> the system whose recipe they train with."""
REASONS = {
    "albef": "a fusion-encoder, whose similarity is one of three losses",
}
"""Systems that are not in the table."""
METRICS = {
    "zero-shot AUROC": ("zero-shot", "auroc", "macro_competition"),
    "R@10 image to text": ("retrieval", "recall@10", "image_to_text"),
    "R@10 text to image": ("retrieval", "recall@10", "text_to_image"),
    "pointing game": ("grounding", "pointing_game", "overall"),
    "CNR": ("grounding", "cnr", "overall"),
    "probe, 1 %": ("probe", "auroc@1%", "macro_competition"),
}
"""Column -> evaluation, metric, target."""


def main() -> int:
    """Make the data, execute the missing runs and print the tables; return the exit status."""
    options = parse()
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)})
    presets = presets_by_system()
    names = selected(options.systems, presets)
    found = [(name, preset) for name in names if (preset := presets[name]) is not None]
    runs = [make_run(name, preset, seed) for name, preset in found for seed in options.seeds]
    extras = extra_runs(presets, options.seeds) if options.extras else []
    planned = merged([*prerequisites([*runs, *extras], presets), *runs, *extras])
    if options.only is not None:
        execute(planned[options.only], sizes)
        return 0
    if options.dry_run:
        for name, run in planned.items():
            state = "finished" if run.finished(sizes.home) else "to do"
            print(f"{name}: {run.recipe.name} {run.preset}, {', '.join(run.tasks)}, {state}")
        return 0
    make_data(sizes, {folder for run in planned.values() for folder in (*run.train, *run.tasks)})
    failed = failures(planned, sizes, [sys.executable, __file__, *sys.argv[1:], "--only"])
    missing = {name: "no recipe with a preset `tiny`" for name in names if not presets[name]}
    if runs or missing:
        publish("dual-encoders", table(runs, sizes.home, missing | left_out(), failed), options.write)
    if options.extras:
        publish("dual-encoder-options", extras_table(extras, sizes.home, failed), options.write)
    return int(bool(failed))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="all", help="names separated by commas, all (default) or none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of weights, order and training (default: 0)")
    parser.add_argument("--extras", action="store_true", help="also the table of ways to train one system")
    parser.add_argument("--data", type=Path, default=ROOT / "quickstart", help="folder of data and runs")
    parser.add_argument("--patients", type=int, default=2800, help="patients of the phantom")
    parser.add_argument("--side", type=int, default=256, help="height and width of the phantom's images")
    parser.add_argument("--steps", type=int, default=1100, help="training steps")
    parser.add_argument("--batch", type=int, default=64, help="pairs of a step")
    parser.add_argument("--workers", type=int, default=1, help="loader processes")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples")
    parser.add_argument("--dry-run", action="store_true", help="list the runs")
    parser.add_argument("--write", action="store_true", help="replace the tables in RESULTS.md")
    parser.add_argument("--only", metavar="RUN", help="execute one run in this process, without data and tables")
    return parser.parse_args()


def presets_by_system() -> dict[str, Preset | None]:
    """Return the preset of every dual-encoder of the registry; None for one without.

    A second `tiny` preset of a system, such as `tiny-large`, is named "SYSTEM-large".
    """
    found: dict[str, Preset | None] = {}
    for path in sorted((ROOT / "recipes").glob("*.py")):
        for preset, settings in runpy.run_path(str(path))["PRESETS"].items():
            model = getattr(settings, "model", None)
            if preset.split("-")[0] != "tiny" or not isinstance(model, DualEncoderConfig):
                continue
            name = model.system if model.system not in found else f"{model.system}-{preset.removeprefix('tiny-')}"
            found[name] = Preset(recipe=path, preset=preset, config=type(model))
    for name in list_models():
        if name not in found and name not in REASONS and issubclass(system(name), DualEncoder):
            other = found.get(SETTINGS_OF.get(name, ""))
            found[name] = other and dataclasses.replace(other, config=system(name).Config)
    return dict(sorted(found.items()))


def selected(text: str, presets: Mapping[str, Preset | None]) -> list[str]:
    """Return the systems that `--systems` names. Raises ConfigError for an unknown one."""
    if text in ("all", "none"):
        return list(presets) if text == "all" else []
    names = text.split(",")
    unknown = sorted(set(names) - presets.keys())
    if unknown:
        message = f"expected systems out of {', '.join(presets)}; got {', '.join(unknown)}"
        raise ConfigError(message, "unknown_name", field="systems")
    return names


def merged(runs: Sequence[Run]) -> dict[str, Run]:
    """Return runs by name and seed; equal ones are one run with the evaluations of both."""
    planned: dict[str, Run] = {}
    for run in runs:
        other = planned.get(run.id, run)
        planned[run.id] = dataclasses.replace(other, tasks=tuple(dict.fromkeys((*other.tasks, *run.tasks))))
    return planned


def prerequisites(runs: Sequence[Run], presets: Mapping[str, Preset | None]) -> list[Run]:
    """Return the runs whose image encoders others take, without evaluations of their own."""
    needed = [(run.image_from, presets[run.image_from], run.seed) for run in runs if run.image_from is not None]
    return [make_run(name, preset, seed, tasks=()) for name, preset, seed in needed if preset is not None]


def left_out() -> dict[str, str]:
    """Return the registered systems that are not compared, and why."""
    return {name: reason for name, reason in REASONS.items() if name in list_models()}


def table(runs: Sequence[Run], home: Path, missing: Mapping[str, str], failed: Mapping[str, str]) -> str:
    """Return the table of all runs, each followed by its random start, and the notes below it."""
    notes: dict[str, str] = {}
    titles = ["", *METRICS, "pairs/s", "memory, GiB"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    seeds = sorted({run.seed for run in runs})
    for name, of_name in itertools.groupby(runs, key=lambda run: run.name):
        several = list(of_name)
        for run in several:
            title = name if len(seeds) == 1 else f"{name}, seed {run.seed}"
            if run.id in failed:
                notes[title] = f"failed: {failed[run.id]}"
                lines.append(row(title, ["–"] * (len(titles) - 1)))
                continue
            lines.append(row(title, [*scores(run, "trained", home, notes), *costs(run, home)]))
            lines.append(row(f"{title}, at random", [*scores(run, "start", home, notes), "", ""]))
        done = [run for run in several if run.id not in failed]
        if len(done) > 1:
            lines.append(row(f"{name}, mean (lowest to highest)", [*means(done, home), "", ""]))
    for name, reason in missing.items():
        notes[name] = reason
        lines.append(row(name, ["–"] * (len(titles) - 1)))
    below = [f"{name}: {reason}." for name, reason in notes.items()]
    return "\n".join([*lines, *(["", *below] if below else [])])


def row(title: str, cells: Sequence[str]) -> str:
    """Return a line of a table."""
    return f"| {title} | {' | '.join(cells)} |"


def scores(run: Run, weights: str, home: Path, notes: dict[str, str]) -> Iterator[str]:
    """Yield the cells of an evaluated model; evaluations that do not apply are dashes with a note."""
    for title, (task, metric, target) in METRICS.items():
        folder = run.results(home, weights, task)
        refusal = folder / REFUSAL
        if refusal.is_file():
            notes[f"{run.name}, {title}"] = refusal.read_text(encoding="utf-8").strip()
            yield "–"
        else:
            yield cell(read_results(folder / "results.json"), metric, target) or "–"


def costs(run: Run, home: Path) -> list[str]:
    """Return pairs per second and peak memory."""
    measured = json.loads((home / run.id / COST).read_text(encoding="utf-8"))
    return [f"{measured['pairs_per_second']:.0f}", f"{measured['peak_memory_gb']:.2f}"]


def means(runs: Sequence[Run], home: Path) -> Iterator[str]:
    """Yield the mean of each metric over the seeds of a system, with the lowest and the highest."""
    for task, metric, target in METRICS.values():
        paths = [run.results(home, "trained", task) / "results.json" for run in runs]
        try:
            values = [read_results(path).row(metric, target).value for path in paths if path.is_file()]
        except EvaluationError:  # no such row in the data
            values = []
        yield f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "–"


def publish(name: str, lines: str, write: bool) -> None:
    """Print a table; with `write` also replace it in RESULTS.md."""
    print(f"{name}\n{lines}\n")
    if write:
        document = ROOT / "RESULTS.md"
        text = document.read_text(encoding="utf-8")
        document.write_text(replace(text, name, f"{lines}\n\n{provenance()}"), encoding="utf-8")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MedvlError as error:
        sys.exit(f"error: {error}")
