"""The `medvl` command: thin, and quick to answer --help."""

import dataclasses
import fnmatch
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import tyro

from medvl.data.corpora.table import TableColumns
from medvl.data.shard_options import ShardOptions, ShardRun
from medvl.errors import ConfigError, MedvlError
from medvl.eval import command

if TYPE_CHECKING:
    from medvl.data.corpora.base import Plan
    from medvl.data.deid import Deidentifier
    from medvl.data.shards import Manifest

T = TypeVar("T")
Flat = Annotated[T, tyro.conf.arg(name="")]
"""A dataclass whose fields become options without a prefix: --out, not --run.out."""


def phantom_mimic_cxr(
    out: Path, *, patients: int = 400, size: int = 512, seed: int = 0, workers: int | None = None
) -> None:
    """Write the phantom world as MIMIC-CXR 2.0.0: DICOM files, reports and tables.

    Args:
        out: folder to write to.
        patients: how many patients; each has one study or more, each study one image or more.
        size: height and width of the images in pixels.
        seed: of the world.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_mimic_cxr(out, patients=patients, size=size, seed=seed, workers=workers)
    print(f"Wrote {out}. Next: medvl shards mimic-cxr --root {out} --out {out}-shards")


def phantom_mimic_cxr_jpg(
    out: Path, *, patients: int = 400, size: int = 512, seed: int = 0, workers: int | None = None
) -> None:
    """Write the phantom world as MIMIC-CXR-JPG 2.0.0, with the reports beside the images.

    Args:
        out: folder to write to.
        patients: how many patients.
        size: height and width of the images in pixels.
        seed: of the world.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_mimic_cxr_jpg(out, patients=patients, size=size, seed=seed, workers=workers)
    print(f"Wrote {out}. Next: medvl shards mimic-cxr --root {out} --out {out}-shards")


def phantom_chexpert(
    out: Path, *, patients: int = 400, size: int = 320, seed: int = 1, workers: int | None = None
) -> None:
    """Write the phantom world as CheXpert-v1.0-small.

    Args:
        out: folder that gets CheXpert-v1.0-small/.
        patients: how many patients.
        size: height and width of the images in pixels.
        seed: of the world; another one than that of a MIMIC-CXR that was trained on, or the patients are the same.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_chexpert(out, patients=patients, size=size, seed=seed, workers=workers)
    root = out / "CheXpert-v1.0-small"
    print(f"Wrote {root}. Next: python scripts/zeroshot_chexpert.py --checkpoint RUN --root {root}")


def phantom_contact_sheet(out: Path, *, seed: int = 0) -> None:
    """Draw a sheet with every finding at every severity.

    Args:
        out: PNG file.
        seed: of the world.
    """
    from medvl import phantom

    phantom.contact_sheet(phantom.World(seed=seed), out)
    print(f"Wrote {out}")


def shards_mimic_cxr(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    reports: Path | None = None,
    labeler: Literal["chexpert", "negbio"] = "chexpert",
    views: tuple[str, ...] = (),
) -> None:
    """Make shards of MIMIC-CXR (DICOM) or MIMIC-CXR-JPG, with the official split.

    Args:
        root: folder of the release: files/ and the tables.
        run: where to.
        options: how images are stored.
        reports: folder that holds the reports' files/, if not root.
        labeler: whose labels.
        views: keep only these values of ViewPosition, such as PA AP.
    """
    from medvl.data.corpora import mimic_cxr

    deid = _deidentifier(run.salt_file)
    _convert(mimic_cxr.plan(root, deid, reports=reports, labeler=labeler, views=views), deid, run, options)


def shards_chexpert(
    root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, frontal_only: bool = False
) -> None:
    """Make shards of CheXpert, which has labels and no text.

    Args:
        root: the folder CheXpert-v1.0-small or CheXpert-v1.0.
        run: where to.
        options: how images are stored.
        frontal_only: leave out lateral views.
    """
    from medvl.data.corpora import chexpert

    deid = _deidentifier(run.salt_file)
    plan = chexpert.plan(root, deid, frontal_only=frontal_only)
    _convert(plan, deid, run, dataclasses.replace(options, keep_textless=True))


def shards_table(
    table: Path,
    columns: Flat[TableColumns],
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    name: str = "table",
    image_root: Path | None = None,
    where: tuple[str, ...] = (),
    splits: tuple[str, ...] = ("train=0.8", "validate=0.1", "test=0.1"),
    parse_reports: bool = False,
) -> None:
    """Make shards of your own table: a row an image.

    Args:
        table: .csv, .jsonl (also .gz) or .parquet.
        columns: what its columns mean.
        run: where to.
        options: how images are stored.
        name: of the corpus.
        image_root: folder that image paths are relative to; default the table's.
        where: keep only rows with these values, such as source=nih.
        splits: shares of the splits, where the table has none of its own.
        parse_reports: take each text apart into its sections.
    """
    from medvl.data.corpora import table as corpus

    deid = _deidentifier(run.salt_file)
    plan = corpus.plan(
        table,
        columns,
        deid,
        name=name,
        image_root=image_root,
        where=_pairs(where, "--where"),
        fractions=_fractions(splits),
        parse_reports=parse_reports,
    )
    _convert(plan, deid, run, options)


def vocab(shards: Path, out: Path, *, size: int = 8000, min_frequency: int = 2, max_tokens: int = 128) -> None:
    """Train a WordPiece vocabulary on the text of a folder of shards.

    Args:
        shards: folder with a manifest, usually the train split.
        out: folder that gets the tokenizer.
        size: most entries.
        min_frequency: how often a piece must occur.
        max_tokens: length at which texts are cut.
    """
    from medvl.data.shards import ShardSource
    from medvl.data.tokenize import train_wordpiece

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
        against: another folder that must share no patient with it.
        decode: decode every image too.
        full: demand the counts of the full release (the data card's).
    """
    from medvl.data.splits import check_disjoint
    from medvl.data.verify import check_against, verify_folder

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
    if against is not None:
        from medvl.data.shards import Manifest

        for other in _split_folders(against):
            for manifest in manifests.values():
                check_against(manifest, Manifest.read(other))
        print(f"No patient is shared with {against}")
    if any(one.problems for one in found):
        raise MedvlError(f"{folder} is damaged: copy or make it again")


def list_everything(kind: Literal["models", "image-encoders", "text-encoders", "prompts"], *, match: str = "*") -> None:
    """List what there is by name.

    Args:
        kind: of what.
        match: wildcard.
    """
    from medvl import encoders, models

    if kind == "prompts":
        from medvl.eval.prompts import list_prompts

        names = fnmatch.filter(list_prompts(), match)
    else:
        listers: dict[str, Callable[[str], list[str]]] = {
            "models": models.list_models,
            "image-encoders": encoders.list_image_encoders,
            "text-encoders": encoders.list_text_encoders,
        }
        names = listers[kind](match)
    print("\n".join(names))


def _deidentifier(salt_file: Path | None) -> "Deidentifier":
    from medvl.data.deid import Deidentifier, default_salt_file

    return Deidentifier.from_file(salt_file or default_salt_file(), create=True)


def _convert(plan: "Plan", deid: "Deidentifier", run: ShardRun, options: ShardOptions) -> None:
    from medvl.data.sharding import write_shards

    for split, manifest in write_shards(plan, deid, run, options).items():
        print(f"{split}: {manifest.samples} samples of {len(manifest.patients)} patients{_left_out(manifest)}")
    print(f"Wrote {run.out}. Keep {run.out.name}-private to yourself: it names the source of each sample.")


def _left_out(manifest: "Manifest") -> str:
    counts = {**manifest.excluded, **manifest.skipped}
    return "".join(f", {count} {reason}" for reason, count in sorted(counts.items()))


def _compare_with_card(manifests: "Mapping[str, Manifest]", full: bool) -> None:
    from medvl.data.corpora import chexpert, mimic_cxr
    from medvl.data.verify import compare_counts

    corpora = {module.NAME: module.COUNTS for module in (mimic_cxr, chexpert)}
    expected = corpora.get(next(iter(manifests.values())).corpus)
    if expected is None:
        return
    differing = compare_counts(manifests, expected)
    for name, (found, count) in differing.items():
        print(f"not the full release: {found} of {count} {name}")
    if differing and full:
        raise MedvlError("this is not the full release: see the counts above")


def _split_folders(folder: Path) -> list[Path]:
    from medvl.data.shards import MANIFEST

    if (folder / MANIFEST).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST}")) or [folder]


def _pairs(items: tuple[str, ...], option: str) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} takes NAME=VALUE, got {item!r}")
        pairs[name] = value
    return pairs


def _fractions(items: tuple[str, ...]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in _pairs(items, "--splits").items()}
    except ValueError:
        raise ConfigError(f"--splits takes NAME=SHARE, got {' '.join(items)}") from None


_GROUPS: dict[str, dict[str, Callable[..., Any]]] = {
    "phantom": {
        "mimic-cxr": phantom_mimic_cxr,
        "mimic-cxr-jpg": phantom_mimic_cxr_jpg,
        "chexpert": phantom_chexpert,
        "contact-sheet": phantom_contact_sheet,
    },
    "shards": {"mimic-cxr": shards_mimic_cxr, "chexpert": shards_chexpert, "table": shards_table},
    "eval": {"zero-shot": command.zero_shot, "retrieval": command.retrieval},
}
_COMMANDS: dict[str, Callable[..., Any]] = {"vocab": vocab, "verify": verify, "list": list_everything}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `medvl` command. Bad input or a full disk ends it with status 1 and one line that says why."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else "--help"
    try:
        if command in _GROUPS:
            group = _GROUPS[command]
            tyro.extras.subcommand_cli_from_dict(group, prog=f"medvl {command}", args=arguments[1:])
        elif command in _COMMANDS:
            positional = tyro.conf.configure(tyro.conf.PositionalRequiredArgs)(_COMMANDS[command])
            tyro.cli(positional, prog=f"medvl {command}", args=arguments[1:])
        else:
            _usage(command)
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
    lines += [f"  {name:24} {_summary(function)}" for name, function in _COMMANDS.items()]
    lines += ["", "medvl COMMAND --help says more. Training: torchrun recipes/convirt_mimic.py --help"]
    print("\n".join(lines))
    if command not in ("-h", "--help"):
        raise ConfigError(f"there is no command {command!r}")


def _summary(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    main()
