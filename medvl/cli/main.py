"""The `medvl` command: thin, and quick to answer --help."""

import fnmatch
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import tyro

from medvl.cli import (
    compare,
    doctor,
    eval_classify,
    eval_dense,
    eval_grounding,
    eval_probe,
    eval_report_generation,
    eval_retrieval,
    eval_retrieval_by_class,
    eval_vqa,
    eval_zero_shot,
    import_export,
    phantom,
    phantom_vqa,
    shards,
    shards_labels,
    shards_vqa,
)
from medvl.errors import ConfigError, MedvlError, SplitError

if TYPE_CHECKING:
    from medvl.data.shards.format import Manifest


def vocab(shards: Path, out: Path, *, size: int = 8000, min_frequency: int = 2, max_tokens: int = 128) -> None:
    """Train a WordPiece vocabulary on the text of a folder of shards.

    Args:
        shards: folder with a manifest, usually the train split.
        out: folder that gets the tokenizer.
        size: most entries.
        min_frequency: how often a piece must occur.
        max_tokens: length at which texts are cut.
    """
    from medvl.data.shards.source import ShardSource
    from medvl.data.tokenizer.tokenizer import train_wordpiece

    source = ShardSource(shards)
    studies: dict[str, list[str]] = {}  # images of one study share their report: count it once
    for position in range(len(source)):
        sample = source.sample(position)
        studies.setdefault(sample.study, list(sample.sections.values()))
    texts = [text for sections in studies.values() for text in sections]
    tokenizer = train_wordpiece(texts, vocab_size=size, min_frequency=min_frequency, max_tokens=max_tokens)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out)
    print(f"Wrote {out}: {tokenizer.vocab_size} entries from {len(studies)} reports")


def verify(folder: Path, *, against: Path | None = None, decode: bool = False, full: bool = False) -> None:
    """Prove a folder of shards, or a folder of splits, against its manifest; and that splits share no patient.

    Args:
        folder: a split's folder, or the folder that holds all splits.
        against: another folder that must share neither patient nor image with it; prints the pairs of images that are
            the same by their pixels (key, other key, how many of 255 bits of their perceptual hashes differ).
        decode: decode every image too.
        full: demand the counts of the full release (the data card's).
    """
    from medvl.data.shards.verify import verify_folder
    from medvl.data.splits import check_disjoint

    found = [verify_folder(part, decode=decode, progress=sys.stderr.isatty()) for part in _split_folders(folder)]
    for one in found:
        manifest = one.manifest
        left_out = sum(manifest.excluded.values()) + sum(manifest.skipped.values())
        state = "sound" if not one.problems else f"{len(one.problems)} PROBLEMS"
        print(
            f"{manifest.corpus}/{manifest.split}: {manifest.samples} samples of {len(manifest.patients)} patients "
            f"in {len(manifest.shards)} shards, {left_out} left out: {state}"
        )
        for problem in one.problems[:20]:
            print(f"  {problem}")
    manifests = {one.manifest.split: one.manifest for one in found}
    check_disjoint({split: manifest.patients for split, manifest in manifests.items()}, str(folder))
    _compare_with_card(manifests, full)
    if any(one.problems for one in found):
        raise MedvlError(f"{folder} is damaged: copy or make it again")
    if against is not None:
        _compare_folders(folder, against)


def list_everything(kind: Literal["models", "image-encoders", "text-encoders", "prompts"], *, match: str = "*") -> None:
    """List what there is by name.

    Args:
        kind: of what.
        match: wildcard.
    """
    from medvl import encoders, models

    if kind == "prompts":
        from medvl.eval.zero_shot_classification.prompts import list_prompts

        names = fnmatch.filter(list_prompts(), match)
    else:
        listers: dict[str, Callable[[str], list[str]]] = {
            "models": models.list_models,
            "image-encoders": encoders.list_image_encoders,
            "text-encoders": encoders.list_text_encoders,
        }
        names = listers[kind](match)
    print("\n".join(names))


def _compare_with_card(manifests: "Mapping[str, Manifest]", full: bool) -> None:
    from medvl.data.corpora import (
        chexpert,
        covidx,
        medicat,
        mimic_cxr,
        nih_cxr14,
        openi,
        path_vqa,
        roco,
        rsna,
        siim,
        slake,
        vqa_med,
        vqa_rad,
    )
    from medvl.data.shards.verify import compare_counts

    modules = (mimic_cxr, chexpert, medicat, openi, vqa_rad, slake, vqa_med, path_vqa, rsna, siim, nih_cxr14, covidx)
    corpora = {**{module.NAME: module.COUNTS for module in modules}, **roco.COUNTS}
    expected = corpora.get(next(iter(manifests.values())).corpus)
    if expected is None:
        return
    differing = compare_counts(manifests, expected)
    for name, (found, count) in differing.items():
        print(f"not the full release: {found} of {count} {name}")
    if differing and full:
        raise MedvlError("this is not the full release: see the counts above")


def _compare_folders(folder: Path, against: Path) -> None:
    from medvl.data.shards.verify import find_overlaps

    images = patients = 0
    for overlap in find_overlaps(_split_folders(folder), _split_folders(against), progress=sys.stderr.isatty()):
        known = overlap.patients
        told = f"{len(known)} patients" if known is not None else "patients unknown (hashed with different salts)"
        print(f"{overlap.name} and {overlap.other} share {len(overlap.images)} images, {told}")
        for pair in overlap.images:
            print(f"  {pair.key} {pair.other} {pair.distance}")
        for reason, count in sorted(overlap.not_compared.items()):
            print(f"  {count} images not compared: {reason}")
        images, patients = images + len(overlap.images), patients + len(known or ())
    if images or patients:
        raise SplitError(
            f"{folder} and {against} share {images} pairs of images and {patients} patients: "
            "a score on one is not held out from the other"
        )


def _split_folders(folder: Path) -> list[Path]:
    from medvl.data.shards.format import MANIFEST

    if (folder / MANIFEST).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST}")) or [folder]


_GROUPS: dict[str, dict[str, Callable[..., Any]]] = {
    "phantom": {
        "mimic-cxr": phantom.mimic_cxr,
        "mimic-cxr-jpg": phantom.mimic_cxr_jpg,
        "ms-cxr": phantom.ms_cxr,
        "chexpert": phantom.chexpert,
        "rsna": phantom.rsna,
        "siim": phantom.siim,
        "roco": phantom.roco,
        "medicat": phantom.medicat,
        "vqa-rad": phantom_vqa.vqa_rad,
        "slake": phantom_vqa.slake,
        "contact-sheet": phantom.contact_sheet,
    },
    "shards": {
        "mimic-cxr": shards.mimic_cxr,
        "chexpert": shards.chexpert,
        "roco": shards.roco,
        "medicat": shards.medicat,
        "openi": shards.openi,
        "vqa-rad": shards_vqa.vqa_rad,
        "slake": shards_vqa.slake,
        "vqa-med": shards_vqa.vqa_med,
        "path-vqa": shards_vqa.path_vqa,
        "rsna": shards_labels.rsna,
        "siim": shards_labels.siim,
        "ms-cxr": shards_labels.ms_cxr,
        "nih-cxr14": shards_labels.nih_cxr14,
        "covidx": shards_labels.covidx,
        "table": shards.table,
    },
    "eval": {
        "zero-shot": eval_zero_shot.zero_shot,
        "retrieval": eval_retrieval.retrieval,
        "classify": eval_classify.classify,
        "class-retrieval": eval_retrieval_by_class.class_retrieval,
        "make-retrieval-list": eval_retrieval_by_class.make_retrieval_list,
        "grounding": eval_grounding.grounding,
        "detection": eval_dense.detection,
        "segmentation": eval_dense.segmentation,
        "probe": eval_probe.probe,
        "vqa": eval_vqa.vqa,
        "report-generation": eval_report_generation.report_generation,
    },
}
_COMMANDS: dict[str, Callable[..., Any]] = {
    "merge": shards.merge,
    "vocab": vocab,
    "verify": verify,
    "compare": compare.compare,
    "import": import_export.import_published,
    "export": import_export.export_checkpoint,
    "list": list_everything,
}
_READING_ON_THEIR_OWN: dict[str, Callable[[list[str]], str]] = {"doctor": doctor.doctor}
"""What follows these commands is the command line of a recipe."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `medvl` command. Bad input or a full disk ends it with status 1 and one line that says why."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else "--help"
    try:
        if command in _GROUPS:
            group = _GROUPS[command]
            told = tyro.extras.subcommand_cli_from_dict(
                group, prog=f"medvl {command}", args=arguments[1:], config=[tyro.conf.OmitArgPrefixes]
            )
        elif command in _COMMANDS:
            positional = tyro.conf.configure(tyro.conf.PositionalRequiredArgs)(_COMMANDS[command])
            told = tyro.cli(positional, prog=f"medvl {command}", args=arguments[1:])
        elif command in _READING_ON_THEIR_OWN:
            told = _READING_ON_THEIR_OWN[command](arguments[1:])
        else:
            _usage(command)
            return
        if told:
            print(told)
    except MedvlError as error:
        _end(str(error))
    except OSError as error:
        _end(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))


def _end(reason: str) -> NoReturn:
    print(f"medvl: {reason}", file=sys.stderr)
    raise SystemExit(1) from None


def _usage(command: str) -> None:
    lines = ["usage: medvl COMMAND ...", ""]
    for name, group in _GROUPS.items():
        lines += [f"  {f'{name} {sub}':24} {_summary(function)}" for sub, function in group.items()]
    lines += [f"  {name:24} {_summary(function)}" for name, function in (_COMMANDS | _READING_ON_THEIR_OWN).items()]
    lines += ["", "medvl COMMAND --help says more. Training: torchrun recipes/convirt_mimic.py --help"]
    print("\n".join(lines))
    if command not in ("-h", "--help"):
        raise ConfigError(f"there is no command {command!r}")


def _summary(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    main()
