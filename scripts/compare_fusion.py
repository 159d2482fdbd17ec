"""Comparison of all fusion-encoders: the same phantom, vocabulary and number of image-text pairs.

    python scripts/compare_fusion.py --dry-run                       # list the runs
    python scripts/compare_fusion.py --write                         # all systems, seed 0; table into RESULTS.md
    python scripts/compare_fusion.py --systems m3ae,albef --seeds 0 1 2

Each system trains with the `tiny` preset of its recipe (encoders, loss, optimiser), but on the impressions of the
phantom's MIMIC-CXR, from random weights, for `--steps` batches of `--batch` pairs. The weights after the last step are
evaluated, and those before the first ("at random"), all by one protocol:

* matching: accuracy of the matching head on own and other impressions, and the share of impressions that score above
  their mirror (`medvl eval matching`);
* retrieval: recall at 1 in both directions, among the 16 candidates that a ConVIRT with the same pairs ranks first;
* questions: accuracy on a phantom VQA-RAD after fine-tuning for a quarter of the steps, beside a classifier that reads
  the question alone;
* cost: median of the pairs per second that training logged, and peak memory of the process (on a GPU: of the GPU).

Data and runs are written below `--data`; what exists there, also from scripts/quickstart.sh, is used. Finished runs are
not repeated and a killed one is resumed. A run that fails is named below the table, and the exit status is 1.
"""

import dataclasses
import sys

from compare_fusion_tasks import EVALUATIONS
from compare_runs import (
    STORED,
    Run,
    Sizes,
    execute,
    failures,
    list_runs,
    make_data,
    make_run,
    medvl,
    merged,
    parse,
    presets_of,
    selected,
)
from compare_table import Columns, publish, row
from results import cell

from medvl.errors import MedvlError
from medvl.eval import read_results
from medvl.models import ConVIRTConfig, FusionConfig

COLUMNS = Columns({
    "matching": ("matching", "accuracy", "all"),
    "text above its mirror": ("matching", "above_mirror", "all"),
    "R@1 image to text": ("retrieval", "recall@1", "image_to_text"),
    "R@1 text to image": ("retrieval", "recall@1", "text_to_image"),
    "questions": ("vqa", "accuracy", "overall"),
    "closed": ("vqa", "accuracy", "closed"),
    "open": ("vqa", "accuracy", "open"),
})  # fmt: skip
LEFT_OUT = {"medvill-report": "writes reports and matches nothing"}
"""Presets that are not in the table."""
SEED_OF_VALIDATION = 21


def main() -> int:
    """Make the data, execute the missing runs and print the table; return the exit status."""
    options = parse(__doc__)
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)})
    presets = {name: preset for name, preset in presets_of(FusionConfig).items() if name not in LEFT_OUT}
    runs = [
        Run(name=name, seed=seed, **vars(presets[name]), changes={}, tasks=tuple(EVALUATIONS))
        for name in selected(options.systems, presets)
        for seed in options.seeds
    ]
    convirt = presets_of(ConVIRTConfig)["convirt"]
    planned = merged([*(make_run("convirt", convirt, seed, tasks=()) for seed in options.seeds), *runs])
    if options.only is not None:
        execute(planned[options.only], sizes, EVALUATIONS)
        return 0
    if options.dry_run:
        list_runs(planned, sizes.home)
        return 0
    make_data(sizes, ())
    make_questions(sizes)
    failed = failures(planned, sizes, [sys.executable, __file__, *sys.argv[1:], "--only"])
    table = COLUMNS.table(runs, sizes.home, {}, failed)
    publish(
        "fusion-encoders",
        with_question_alone(table, [run for run in runs if run.id not in failed], sizes),
        options.write,
    )
    return int(bool(failed))


def make_questions(sizes: Sizes) -> None:
    """Write the shards of the phantom's VQA-RAD that do not exist yet; as scripts/quickstart_vqa.sh does."""
    data, few = sizes.data, max(14, sizes.patients // 7)
    for name, patients, seed in (("vqa", sizes.patients, 20), ("vqa-valid", few, SEED_OF_VALIDATION)):
        if not (data / name / "test/manifest.json").is_file():
            size = ("--patients", patients, "--size", sizes.side, "--seed", seed)
            medvl("phantom", "vqa-rad", "--out", data / f"{name}-files", *size)
            medvl("shards", "vqa-rad", "--root", data / f"{name}-files", "--out", data / name, *STORED)


def with_question_alone(table: str, done: list[Run], sizes: Sizes) -> str:
    """Add the row of the baseline that reads the question alone, which is the same for every system."""
    if not done:
        return table
    results = read_results(done[0].results(sizes.home, "trained", "vqa") / "results.json")
    cells = [
        cell(results, metric, target, "baseline: question_only") if task == "vqa" else ""
        for task, metric, target in COLUMNS.metrics.values()
    ]
    head, rule, *lines = table.splitlines()
    return "\n".join([head, rule, row("the question alone", [*cells, "", ""]), *lines])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MedvlError as error:
        sys.exit(f"error: {error}")
