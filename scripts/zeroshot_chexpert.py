"""Zero-shot findings on CheXpert as it lies on disk: no shards, a table and a page out.

    python scripts/zeroshot_chexpert.py --checkpoint runs/convirt-mimic/best --root CheXpert-v1.0-small
    python scripts/zeroshot_chexpert.py --checkpoint RUN/best --root DIR --split test --thresholds-from valid
    python scripts/zeroshot_chexpert.py --checkpoint RUN/best --root DIR --frontal-only --prompts chexpert_pairs
    python scripts/zeroshot_chexpert.py --checkpoint RUN_1/best RUN_2/best ... --root DIR    # an ensemble

The folder must hold the release's tables (valid.csv, test.csv) and images; data_cards/chexpert.md says how to get it.
Thresholds, and with them F1 and the like, need `--thresholds-from`: a split of other patients. `--uncertain`,
`--missing` and the prompt set decide what the numbers mean; they stand in results.json and on the page.
"""

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

import torch

from medvl.data import Deidentifier, FileSource, Loader, WholeText, default_salt_file, open_loader
from medvl.data.corpora import chexpert
from medvl.errors import MedvlError, SplitError
from medvl.eval import LabelPolicy, list_prompts, load_prompts, write_results, write_zero_shot_page, zero_shot
from medvl.eval.core.open import load_ensemble
from medvl.models.checkpoint import train_manifest
from medvl.schema import FINDINGS


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        nargs="+",
        required=True,
        help="checkpoint directory, such as runs/convirt/best; several are an ensemble, whose scores are averaged",
    )
    parser.add_argument("--root", type=Path, required=True, help="the folder of the release, CheXpert-v1.0-small")
    parser.add_argument("--split", choices=chexpert.SPLITS, default="valid", help="what is judged (default: valid)")
    parser.add_argument("--thresholds-from", choices=chexpert.SPLITS, help="another split, to choose thresholds on")
    parser.add_argument("--frontal-only", action="store_true", help="leave lateral views out, as CheXzero does")
    parser.add_argument(
        "--prompts", default="chexpert_ensemble", help=f"{', '.join(list_prompts())}, or a JSON file of your own"
    )
    parser.add_argument("--uncertain", choices=("ignore", "zeros", "ones", "per_class"), default="ignore")
    parser.add_argument("--missing", choices=("negative", "ignore"), default="negative")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap (default: 1000)")
    parser.add_argument("--out", type=Path, help="default: eval/chexpert-SPLIT beside the checkpoint")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.thresholds_from == options.split:
        parser.error(f"--thresholds-from {options.split}: thresholds must come from another split than --split")
    if options.resamples < 0 or options.batch < 1 or options.workers < 0:
        parser.error("--resamples and --workers cannot be negative, and --batch must be at least 1")
    return options


def read_split(options: argparse.Namespace, split: str, deid: Deidentifier) -> FileSource:
    """The images of a split with their labels. Raises CorpusError."""
    samples = list(chexpert.plan(options.root, deid, split=split).iter_samples())
    if options.frontal_only:
        samples = [sample for sample in samples if sample.view != "LATERAL"]
    return FileSource(samples, FINDINGS)


def refuse_known_patients(checkpoint: Path, source: FileSource, deid: Deidentifier) -> None:
    """Raise SplitError when the checkpoint tells its training patients and one of them is in these images."""
    seen = train_manifest(checkpoint)
    if seen is None or seen.salt != deid.fingerprint:
        return
    shared = {sample.patient for sample in source.samples} & set(seen.patients)
    if shared:
        raise SplitError(f"{checkpoint} was trained on {len(shared)} of these patients: judge it on another split")


def open_for(model: Any, source: FileSource, options: argparse.Namespace) -> Loader:
    """Every image once and in order, as the model takes it."""
    return open_loader(
        source,
        batch=options.batch,
        image=model.transform,
        text=WholeText(),
        tokenizer=model.tokenizer,
        train=False,
        workers=options.workers,
    )


def run(options: argparse.Namespace) -> None:
    """Evaluate, write, print. What can be wrong is looked at before the model is loaded."""
    prompts = load_prompts(options.prompts)
    deid = Deidentifier.from_file(default_salt_file(), create=True)
    source = read_split(options, options.split, deid)
    valid = None if options.thresholds_from is None else read_split(options, options.thresholds_from, deid)
    for checkpoint in options.checkpoint:
        refuse_known_patients(checkpoint, source, deid)
    models = load_ensemble(options.checkpoint, options.device)
    result = zero_shot(
        models,
        open_for(models[0], source, options),
        prompts,
        valid_loader=None if valid is None else open_for(models[0], valid, options),
        policy=LabelPolicy(uncertain=options.uncertain, missing=options.missing),
        resamples=options.resamples,
        checkpoint=options.checkpoint,
    )
    ensemble = "-ensemble" if len(models) > 1 else ""
    out = options.out or options.checkpoint[0].parent / "eval" / f"chexpert-{options.split}{ensemble}"
    paths = write_results(result.results, out, result.predictions())
    page = write_zero_shot_page(
        result,
        out / "index.html",
        model=f"{models[0].name} ({', '.join(path.name for path in options.checkpoint)})",
        data=f"CheXpert, {options.split}" + (", frontal views" if options.frontal_only else ""),
        date=datetime.date.today().isoformat(),
        pixels=source.pixels,
    )
    print(result.table())
    print()
    for path in (*paths, page):
        print(path)


def main() -> None:
    """Run, and say in one line what is wrong where something is."""
    options = arguments()
    try:
        run(options)
    except MedvlError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
