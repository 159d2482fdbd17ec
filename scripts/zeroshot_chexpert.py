"""Zero-shot classification on the CheXpert release, without shards.

    python scripts/zeroshot_chexpert.py --checkpoint runs/convirt-mimic/best \\
        --root CheXpert-v1.0-small
    python scripts/zeroshot_chexpert.py --checkpoint RUN/best --root DIR --split test \\
        --thresholds-from valid
    python scripts/zeroshot_chexpert.py --checkpoint RUN/best --root DIR --frontal-only \\
        --prompts chexpert_pairs
    # an ensemble
    python scripts/zeroshot_chexpert.py --checkpoint RUN_1/best RUN_2/best ... --root DIR

The folder contains the release's tables (valid.csv, test.csv) and images; data_cards/chexpert.md
explains how to get it. Decision metrics such as F1 need thresholds from a split of other patients
(`--thresholds-from`). The label policy (`--uncertain`, `--missing`) and the prompt set are recorded
in results.json and on the page.
"""

import argparse
import datetime
import functools
import os
import sys
from pathlib import Path

import torch

from medvl.data import Deidentifier, FileSource, default_salt_file
from medvl.data.corpora.labels import chexpert
from medvl.errors import MedvlError, SplitError
from medvl.eval import (
    LabelPolicy,
    PageHeader,
    default_folder,
    list_prompts,
    load_ensemble,
    load_prompts,
    open_for_evaluation,
    write_results,
    write_zero_shot_page,
    zero_shot,
)
from medvl.models import train_manifests
from medvl.schema import FINDINGS


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        nargs="+",
        required=True,
        help="checkpoint folder such as runs/convirt/best; the scores of several are averaged "
        "(ensemble)",
    )
    parser.add_argument(
        "--root", type=Path, required=True, help="folder of the release, CheXpert-v1.0-small"
    )
    parser.add_argument(
        "--split", choices=chexpert.SPLITS, default="valid", help="evaluated split (default: valid)"
    )
    parser.add_argument(
        "--thresholds-from", choices=chexpert.SPLITS, help="split on which thresholds are chosen"
    )
    parser.add_argument(
        "--frontal-only", action="store_true", help="exclude lateral views, as CheXzero does"
    )
    parser.add_argument(
        "--prompts",
        default="chexpert_ensemble",
        help=f"{', '.join(list_prompts())}, or a JSON file",
    )
    parser.add_argument(
        "--uncertain", choices=("ignore", "zeros", "ones", "per_class"), default="ignore"
    )
    parser.add_argument("--missing", choices=("negative", "ignore"), default="negative")
    parser.add_argument(
        "--resamples", type=int, default=1000, help="bootstrap resamples (default: 1000)"
    )
    parser.add_argument(
        "--out", type=Path, help="default: chexpert-SPLIT with the checkpoint's other evaluations"
    )
    parser.add_argument(
        "--replace", action="store_true", help="replace results of another checkpoint in --out"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.thresholds_from == options.split:
        parser.error(f"--thresholds-from must be another split than --split, got {options.split}")
    if options.resamples < 0 or options.batch < 1 or options.workers < 0:
        parser.error("--resamples and --workers must be 0 or more, and --batch 1 or more")
    return options


def read_split(
    options: argparse.Namespace, split: chexpert.Split, deid: Deidentifier
) -> FileSource:
    """Read the images of a split with their labels. Raises CorpusError."""
    plan = chexpert.CheXpert(root=options.root, split=split).plan(deid)
    samples = [
        sample
        for sample in plan.iter_samples()
        if not options.frontal_only or sample.view != "LATERAL"
    ]
    return FileSource(samples, FINDINGS, plan.folders)


def refuse_known_patients(checkpoint: Path, source: FileSource, deid: Deidentifier) -> None:
    """Raise SplitError if the checkpoint, or one that it started from, was trained on a patient
    of these images.
    """
    for training in train_manifests(checkpoint):
        if training.salt != deid.fingerprint:
            print(
                f"warning: {checkpoint}: training patients have another salt and are not compared",
                file=sys.stderr,
            )
            continue
        shared = {sample.patient for sample in source.samples} & set(training.patients)
        if shared:
            raise SplitError(
                f"{checkpoint} was trained on {len(shared)} of these patients; use another split",
                "leak",
                field="split",
            )


def run(options: argparse.Namespace) -> None:
    """Evaluate the checkpoints; inputs are checked before the models are loaded."""
    prompts = load_prompts(options.prompts)
    deid = Deidentifier.from_file(default_salt_file(), create="MEDVL_SALT_FILE" not in os.environ)
    source = read_split(options, options.split, deid)
    valid = (
        None
        if options.thresholds_from is None
        else read_split(options, options.thresholds_from, deid)
    )
    for checkpoint in options.checkpoint:
        refuse_known_patients(checkpoint, source, deid)
    models = load_ensemble(options.checkpoint, options.device)
    read = functools.partial(
        open_for_evaluation,
        transform=models[0].transform,
        tokenizer=models[0].tokenizer,
        batch=options.batch,
        workers=options.workers,
    )
    result = zero_shot(
        models,
        read(source),
        prompts,
        valid_loader=None if valid is None else read(valid),
        policy=LabelPolicy(uncertain=options.uncertain, missing=options.missing),
        resamples=options.resamples,
        checkpoint=options.checkpoint,
    )
    ensemble = "-ensemble" if len(models) > 1 else ""
    out = options.out or default_folder(
        options.checkpoint[0], f"chexpert-{options.split}{ensemble}"
    )
    paths = write_results(result.results, out, result.predictions(), replace=options.replace)
    page = write_zero_shot_page(
        result,
        out / "index.html",
        PageHeader(
            model=f"{models[0].name} ({', '.join(path.name for path in options.checkpoint)})",
            data=f"CheXpert, {options.split}" + (", frontal views" if options.frontal_only else ""),
            date=datetime.date.today().isoformat(),
        ),
        pixels=source.pixels,
    )
    print(result.table())
    print()
    for path in (*paths, page):
        print(path)


def main() -> None:
    """Run the evaluation; report errors in one line."""
    options = arguments()
    try:
        run(options)
    except MedvlError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
