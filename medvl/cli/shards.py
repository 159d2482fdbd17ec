"""`medvl shards`: a corpus in, a folder of shards out. Each command returns what it has to say."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.corpora.table import TableColumns
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.corpora.common.tables import Plan
    from medvl.data.privacy.deidentify import Deidentifier
    from medvl.data.shards.format import Manifest

T = TypeVar("T")
Flat = Annotated[T, tyro.conf.arg(name="")]
"""A dataclass whose fields become options without a prefix: --out, not --run.out."""

_SHARES = ("train=0.8", "validate=0.1", "test=0.1")


def mimic_cxr(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    reports: Path | None = None,
    labeler: Literal["chexpert", "negbio"] = "chexpert",
    views: tuple[str, ...] = (),
    without: tuple[Path, ...] = (),
) -> str:
    """Make shards of MIMIC-CXR (DICOM) or MIMIC-CXR-JPG, with the official split.

    Args:
        root: folder of the release: files/ and the tables.
        run: where to.
        options: how images are stored.
        reports: folder that holds the reports' files/, if not root.
        labeler: whose labels.
        views: keep only these values of ViewPosition, such as PA AP.
        without: folders of shards whose patients are left out, such as those of MS-CXR, which is judged on.
    """
    from medvl.data.convert.hold_out import leave_out
    from medvl.data.corpora import mimic_cxr as corpus

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(root, deid, reports=reports, labeler=labeler, views=views)
    return convert(leave_out(plan, without, deid), deid, run, options)


def chexpert(root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, frontal_only: bool = False) -> str:
    """Make shards of CheXpert, which has labels and no text.

    Args:
        root: the folder CheXpert-v1.0-small or CheXpert-v1.0.
        run: where to.
        options: how images are stored.
        frontal_only: leave out lateral views.
    """
    from medvl.data.corpora import chexpert as corpus

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(root, deid, frontal_only=frontal_only)
    return convert(plan, deid, run, dataclasses.replace(options, keep_textless=True))


def roco(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    references: Path | None = None,
    non_radiology: bool = False,
    splits: Literal["official", "repaired", "by-article"] = "official",
) -> str:
    """Make shards of ROCO or ROCOv2, figures with captions.

    Args:
        root: folder that holds train/, validation/ and test/ (ROCO) or train_captions.csv (ROCOv2).
        run: where to.
        options: how images are stored.
        references: folder of MedICaT's roco_*_references.jsonl: sentences about the figures of ROCO.
        non_radiology: the drawings and photographs of ROCO instead of its radiology.
        splits: official refuses splits that share an article; repaired leaves its figures out of the splits that are
            trained on; by-article draws all anew.
    """
    from medvl.data.corpora import roco as corpus

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(root, deid, references=references, non_radiology=non_radiology, splits=splits)
    return convert(plan, deid, run, options)


def medicat(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    radiology_only: bool = False,
    splits: tuple[str, ...] = _SHARES,
) -> str:
    """Make shards of MedICaT, figures with captions and the sentences that refer to them.

    Args:
        root: folder of the release: the table of figures and figures/.
        run: where to.
        options: how images are stored.
        radiology_only: only figures that the release takes for radiology.
        splits: shares of the splits, by article.
    """
    from medvl.data.corpora import medicat as corpus

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(root, deid, radiology_only=radiology_only, fractions=split_shares(splits))
    return convert(plan, deid, run, options)


def openi(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    images: Path | None = None,
    splits: tuple[str, ...] = _SHARES,
) -> str:
    """Make shards of Open-i, chest radiographs of Indiana University with reports.

    Args:
        root: folder that holds ecgen-radiology/ or NLMCXR_reports.tgz.
        run: where to.
        options: how images are stored.
        images: folder of the PNG files, if not NLMCXR_png in root.
        splits: shares of the splits, by report.
    """
    from medvl.data.corpora import openi as corpus

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(root, deid, images=images, fractions=split_shares(splits))
    return convert(plan, deid, run, options)


def table(
    table: Path,
    columns: Flat[TableColumns],
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    name: str = "table",
    image_root: Path | None = None,
    where: tuple[str, ...] = (),
    splits: tuple[str, ...] = _SHARES,
    parse_reports: bool = False,
) -> str:
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

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(
        table,
        columns,
        deid,
        name=name,
        image_root=image_root,
        where=_pairs(where, "--where"),
        fractions=split_shares(splits),
        parse_reports=parse_reports,
    )
    return convert(plan, deid, run, options)


def merge(out: Path, parts: tuple[Path, ...]) -> str:
    """Put the parts of `medvl shards ... --part i/n` together, and prove the whole.

    Args:
        out: gets one folder a split: what one run over the whole corpus would have made, to the byte.
        parts: the --out of every part, in any order, their private folders beside them.
    """
    from medvl.data.convert.merge import merge_parts

    lines = [
        _told(split, manifest) for split, manifest in merge_parts(out, parts, progress=sys.stderr.isatty()).items()
    ]
    lines.append(f"Wrote {out}: every byte is as its part wrote it. The parts, with their private folders, can go.")
    return "\n".join(lines)


def deidentifier(salt_file: Path | None) -> "Deidentifier":
    """With the salt of the file, or of the default one; made on first use."""
    from medvl.data.privacy.deidentify import Deidentifier, default_salt_file

    return Deidentifier.from_file(salt_file or default_salt_file(), create=True)


def convert(plan: "Plan", deid: "Deidentifier", run: ShardRun, options: ShardOptions) -> str:
    """Write the shards of a plan; what became of it, a line a split."""
    from medvl.data.convert.pipeline import write_shards

    lines = [_told(split, manifest) for split, manifest in write_shards(plan, deid, run, options).items()]
    if run.part is not None:
        lines.append(f"Part {run.part} is done. When all are: medvl merge OUT PART ..., with the --out of each.")
    lines.append(f"Wrote {run.out}. Keep {run.out.name}-private to yourself: it names the source of each sample.")
    return "\n".join(lines)


def split_shares(items: tuple[str, ...]) -> dict[str, float]:
    """`NAME=SHARE ...` as the shares of the splits. Raises ConfigError."""
    try:
        return {name: float(value) for name, value in _pairs(items, "--splits").items()}
    except ValueError:
        raise ConfigError(f"--splits takes NAME=SHARE, got {' '.join(items)}") from None


def _told(split: str, manifest: "Manifest") -> str:
    counts = sorted({**manifest.excluded, **manifest.skipped}.items())
    left_out = "".join(f", {count} {reason}" for reason, count in counts)
    return f"{split}: {manifest.samples} samples of {len(manifest.patients)} patients{left_out}"


def _pairs(items: tuple[str, ...], option: str) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} takes NAME=VALUE, got {item!r}")
        pairs[name] = value
    return pairs
