"""Comparison of all dual-encoders: the same phantom, encoders, vocabulary and number of image-text pairs.

    python scripts/compare_dual.py --dry-run                       # list the runs
    python scripts/compare_dual.py --write                         # all systems, seed 0; table into RESULTS.md
    python scripts/compare_dual.py --systems convirt,mgca --seeds 0 1 2
    python scripts/compare_dual.py --systems none --extras         # the second table only

Systems are those of the registry. Each trains with the `tiny` preset of its recipe (loss, heads, texts, optimiser), but
with a ResNet-10 and a three-layer BERT at 112 pixels, from random weights, for `--steps` batches of `--batch` pairs.
The weights after the last step are evaluated, and those before the first ("at random"), all by one protocol:

* zero-shot: mean AUROC of the five competition findings, prompts `chexpert_ensemble`, or `statements` for systems on
  statements (RadZero, CARZero, MedKLIP, KAD, MAVL);
* retrieval: recall at 10 in both directions, on the same radiographs and their whole reports;
* grounding: pointing game and contrast-to-noise ratio of phrases of other phantom patients, maps of similarity with a
  smoothing of 0.7 cells (chosen on a further phantom for scripts/reproduce_results.sh), or of the decoder's attention
  for MedKLIP, KAD and MAVL, whose patches and texts have no common space;
* linear probe at 1 % of the labels: mean AUROC of the five, over five samples of patients;
* cost: median of the pairs per second that training logged, and peak memory of the process (on a GPU: of the GPU).

UMRL, whose encoders are frozen, has TF-IDF of the texts and the image encoder of ConVIRT's run in place of the common
encoders.

`--extras` compares ways of training one system: change classification with and without the prior image, and training
with few pairs and the other images and texts unpaired. Data and runs are written below `--data`; what exists there,
also from scripts/quickstart.sh, is used. Finished runs are not repeated and a killed one is resumed. A run that fails
is named below the table, and the exit status is 1.
"""

import dataclasses
import sys

from compare_dual_tasks import EVALUATIONS
from compare_extras import extra_runs, extras_table
from compare_runs import (
    Preset,
    Sizes,
    execute,
    failures,
    list_runs,
    make_data,
    make_run,
    merged,
    parse,
    prerequisites,
    presets_of,
    selected,
)
from compare_table import Columns, publish

from medvl.errors import MedvlError
from medvl.models import DualEncoder, DualEncoderConfig, list_models, system

SETTINGS_OF = {"clip": "chexzero"}
"""Systems without a recipe -> the system whose recipe they train with."""
REASONS = {
    "albef": "a fusion-encoder, whose similarity is one of three losses",
}
"""Systems that are not in the table."""
COLUMNS = Columns({
    "zero-shot AUROC": ("zero-shot", "auroc", "macro_competition"),
    "R@10 image to text": ("retrieval", "recall@10", "image_to_text"),
    "R@10 text to image": ("retrieval", "recall@10", "text_to_image"),
    "pointing game": ("grounding", "pointing_game", "overall"),
    "CNR": ("grounding", "cnr", "overall"),
    "probe, 1 %": ("probe", "auroc@1%", "macro_competition"),
})  # fmt: skip


def main() -> int:
    """Make the data, execute the missing runs and print the tables; return the exit status."""
    options = parse(__doc__)
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)})
    presets = presets_by_system()
    names = selected(options.systems, presets)
    found = [(name, preset) for name in names if (preset := presets[name]) is not None]
    runs = [make_run(name, preset, seed) for name, preset in found for seed in options.seeds]
    extras = extra_runs(presets, options.seeds) if options.extras else []
    planned = merged([*prerequisites([*runs, *extras], presets), *runs, *extras])
    if options.only is not None:
        execute(planned[options.only], sizes, EVALUATIONS)
        return 0
    if options.dry_run:
        list_runs(planned, sizes.home)
        return 0
    make_data(sizes, {folder for run in planned.values() for folder in (*run.train, *run.tasks)})
    failed = failures(planned, sizes, [sys.executable, __file__, *sys.argv[1:], "--only"])
    missing = {name: "no recipe with a preset `tiny`" for name in names if not presets[name]}
    if runs or missing:
        publish("dual-encoders", COLUMNS.table(runs, sizes.home, missing | left_out(), failed), options.write)
    if options.extras:
        publish("dual-encoder-options", extras_table(extras, sizes.home, failed), options.write)
    return int(bool(failed))


def presets_by_system() -> dict[str, Preset | None]:
    """Return the preset of every dual-encoder of the registry; None for one without."""
    found: dict[str, Preset | None] = {**presets_of(DualEncoderConfig)}
    for name in list_models():
        if name not in found and name not in REASONS and issubclass(system(name), DualEncoder):
            other = found.get(SETTINGS_OF.get(name, ""))
            found[name] = other and dataclasses.replace(other, config=system(name).Config)
    return dict(sorted(found.items()))


def left_out() -> dict[str, str]:
    """Return the registered systems that are not compared, and why."""
    return {name: reason for name, reason in REASONS.items() if name in list_models()}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MedvlError as error:
        sys.exit(f"error: {error}")
