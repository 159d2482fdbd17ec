"""`medvl shards` and `medvl merge`: convert a corpus to shards. Each command returns the text to
print.
"""

import dataclasses
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.corpora.table import TableColumns
from medvl.data.storage.location import locate
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.corpora.common.tables import Plan
    from medvl.data.privacy import Deidentifier
    from medvl.data.shards.format import Manifest

T = TypeVar("T")
Flat = Annotated[T, tyro.conf.arg(name="")]
"""A dataclass whose fields become options without a prefix: --out, not --run.out."""

_IDENTIFYING = (
    "Texts and pixels are stored unchanged. Those counted as possible_* or says_burned_in may "
    "name a person: check "
    "them, and de-identify the corpus and convert it again before you share the shards."
)
_FRACTIONS = ("train=0.8", "validate=0.1", "test=0.1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """Options of every conversion."""

    run: Flat[ShardRun]
    """output folder, budget, workers"""
    options: Flat[ShardOptions]
    """storage format of the images"""

    def replace(self, **options: Any) -> "ConversionOptions":
        """Return a copy with other values of `ShardOptions`."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **options))

    def textless(self) -> "ConversionOptions":
        """Return a copy for a corpus of images without texts."""
        return self.replace(keep_textless=True)

    def deidentifier(self) -> "Deidentifier":
        """Return the hasher of ids; errors as `deidentifier`."""
        return deidentifier(self.run.salt_file, new_salt=self.run.new_salt)


def mimic_cxr(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    reports: Path | None = None,
    labeler: Literal["chexpert", "negbio"] = "chexpert",
    views: tuple[str, ...] = (),
    without: tuple[Path, ...] = (),
) -> str:
    """Convert MIMIC-CXR (DICOM) or MIMIC-CXR-JPG, with the official split.

    Args:
        root: folder of the release: files/ and the tables.
        shared: output, resources and storage format.
        reports: folder with the reports' files/; default root.
        labeler: labels of CheXpert or NegBio.
        views: keep only these values of ViewPosition, such as PA AP.
        without: folders of shards whose patients are excluded, such as MS-CXR for evaluation.
    """
    from medvl.data.convert.plan import hold_out
    from medvl.data.corpora.reports import mimic_cxr as corpus

    deid = shared.deidentifier()
    links = shared.options.follow_links
    plan = corpus.plan(
        root, deid, reports=reports, labeler=labeler, views=views, follow_links=links
    )
    return convert(hold_out(plan, without, deid), deid, shared)


def chexpert(root: Path, shared: Flat[ConversionOptions], *, frontal_only: bool = False) -> str:
    """Convert CheXpert, which has labels and no text.

    Args:
        root: the folder CheXpert-v1.0-small or CheXpert-v1.0.
        shared: output, resources and storage format.
        frontal_only: exclude lateral views.
    """
    from medvl.data.corpora.labels import chexpert as corpus

    return convert_corpus(corpus, root, shared.textless(), frontal_only=frontal_only)


def roco(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    references: Path | None = None,
    non_radiology: bool = False,
    splits: Literal["official", "repaired", "by-article"] = "official",
) -> str:
    """Convert ROCO or ROCOv2, figures with captions.

    Args:
        root: folder with train/, validation/ and test/ (ROCO) or train_captions.csv (ROCOv2).
        shared: output, resources and storage format.
        references: folder of MedICaT's roco_*_references.jsonl: sentences about the figures of
            ROCO.
        non_radiology: convert the drawings and photographs of ROCO instead of its radiology.
        splits: official refuses splits that share an article; repaired excludes the figures of
            shared articles from the training splits; by-article draws new splits.
    """
    from medvl.data.corpora.figures import roco as corpus

    return convert_corpus(
        corpus, root, shared, references=references, non_radiology=non_radiology, splits=splits
    )


def medicat(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    radiology_only: bool = False,
    splits: tuple[str, ...] = _FRACTIONS,
) -> str:
    """Convert MedICaT, figures with captions and the sentences that refer to them.

    Args:
        root: folder of the release: the table of figures and figures/.
        shared: output, resources and storage format.
        radiology_only: only figures that the release classifies as radiology.
        splits: fractions of the splits, by article.
    """
    from medvl.data.corpora.figures import medicat as corpus

    return convert_corpus(
        corpus, root, shared, radiology_only=radiology_only, fractions=split_fractions(splits)
    )


def openi(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    images: Path | None = None,
    views: tuple[str, ...] = (),
    splits: tuple[str, ...] = _FRACTIONS,
) -> str:
    """Convert Open-i, chest radiographs of Indiana University with reports and 15 labels from their
    MeSH terms.

    Args:
        root: folder with ecgen-radiology/ or NLMCXR_reports.tgz.
        shared: output, resources and storage format.
        images: folder of the PNG files; default NLMCXR_png in root.
        views: keep only FRONTAL or LATERAL images; needs the table of projections.
        splits: fractions of the splits, by report.
    """
    from medvl.data.corpora.reports import openi as corpus

    return convert_corpus(
        corpus, root, shared, images=images, views=views, fractions=split_fractions(splits)
    )


def r2gen_annotation(
    root: Path, shared: Flat[ConversionOptions], *, images: Path | None = None
) -> str:
    """Convert R2Gen's preparation of IU X-ray (two views) or MIMIC-CXR, with its split.

    Args:
        root: folder with annotation.json.
        shared: output, resources and storage format.
        images: folder of the images; default images/ in root.
    """
    from medvl.data.corpora.reports import r2gen_annotation as corpus

    return convert_corpus(corpus, root, shared, images=images)


def medvill_jsonl(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    source: Literal["openi", "mimic"] = "openi",
    images: Path | None = None,
    patients: Path | None = None,
) -> str:
    """Convert MedViLL's preparation of Open-i or MIMIC-CXR (JSON lines), with its split.

    Args:
        root: folder with Train.jsonl, Valid.jsonl, Test.jsonl, or some of them.
        shared: output, resources and storage format.
        source: corpus that the files were made from.
        images: folder that image paths are relative to; default root.
        patients: mimic-cxr-2.0.0-split.csv(.gz), which names the patients of MIMIC-CXR.
    """
    from medvl.data.corpora.reports import medvill_jsonl as corpus

    return convert_corpus(corpus, root, shared, source=source, images=images, patients=patients)


def m3ae_arrow(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    splits: Literal["official", "repaired", "by-article"] = "official",
) -> str:
    """Convert M3AE's preparation of ROCO, MedICaT or MIMIC-CXR (Arrow files), with its split.

    The images are unpacked into the private folder first, and removed from it at the end.

    Args:
        root: folder with NAME_train.arrow, NAME_val.arrow, NAME_test.arrow.
        shared: output, resources and storage format.
        splits: rule for articles in several splits: official refuses them, repaired keeps each in
            one split, by-article splits anew.
    """
    from medvl.data.convert.conversion import PrivateFolder
    from medvl.data.corpora.figures import m3ae_arrow as corpus

    deid = shared.deidentifier()
    unpacked = PrivateFolder(shared.run.local_out).create() / "images"
    plan = corpus.plan(
        root, deid, unpacked, splits=splits, follow_links=shared.options.follow_links
    )
    lines = convert(plan, deid, shared)
    shutil.rmtree(unpacked)
    return lines


def table(
    table: Path,
    columns: Flat[TableColumns],
    shared: Flat[ConversionOptions],
    *,
    name: str = "table",
    image_root: Path | None = None,
    where: tuple[str, ...] = (),
    splits: tuple[str, ...] = _FRACTIONS,
    parse_reports: bool = False,
    keep_imageless: bool = False,
) -> str:
    """Convert your own table with one row per image, or per text without an image.

    Without a text column, all images are kept, for their labels; without an image column, all
    texts.

    Args:
        table: .csv, .jsonl (also .gz) or .parquet.
        columns: names of its columns.
        shared: output, resources and storage format.
        name: name of the corpus.
        image_root: folder that image paths are relative to; default: the folder of the table.
        where: keep only rows with these values, such as source=nih.
        splits: fractions of the splits, for a table without a split column.
        parse_reports: split each text into report sections.
        keep_imageless: keep rows with an empty image cell, as texts without an image.
    """
    from medvl.data.corpora import table as corpus

    deid = shared.deidentifier()
    plan = corpus.plan(
        table,
        columns,
        deid,
        name=name,
        image_root=image_root,
        where=named_values(where, "--where"),
        fractions=split_fractions(splits),
        parse_reports=parse_reports,
        follow_links=shared.options.follow_links,
        keep_imageless=keep_imageless,
    )
    textless = shared.options.keep_textless or not columns.text_column
    return convert(plan, deid, shared.replace(keep_textless=textless))


def merge(out: Path, parts: tuple[Path, ...]) -> str:
    """Merge the parts of `medvl shards ... --part i/n` and verify the result.

    Args:
        out: output folder with one subfolder per split, byte-identical to one run over the whole
            corpus.
        parts: the --out of every part, in any order, with their private folders beside them.
    """
    from medvl.data.convert.merge import merge_parts

    lines = _report(out, merge_parts(out, parts, progress=sys.stderr.isatty()))
    lines.append(
        f"Wrote {out} and verified every byte. The parts and their private folders can be deleted."
    )
    return "\n".join(lines)


def deidentifier(salt_file: Path | None, *, new_salt: bool = False) -> "Deidentifier":
    """Return a hasher with the salt of the file, or of the default one, which is created on first
    use.

    Raises ConfigError where a salt file that was named, by option or variable, does not exist and
    `new_salt` is False: with a new salt by mistake, patients would no longer be recognised in other
    corpora.
    """
    from medvl.data.privacy import Deidentifier, default_salt_file

    path = salt_file or default_salt_file()
    create = new_salt or not (salt_file or os.environ.get("MEDVL_SALT_FILE"))
    if not path.exists():
        if not create:
            message = (
                f"the salt file {path} does not exist; correct its path, or create it "
                f"with --new-salt"
            )
            raise ConfigError(message, "not_found", field="salt_file")
        print(
            f"Creating the salt file {path}: keep it, all corpora need the same one.",
            file=sys.stderr,
        )
    return Deidentifier.from_file(path, create=create)


def padchest(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    images: Path | None = None,
    annotators: Literal["all", "physician"] = "all",
    text: Literal["english", "spanish"] = "english",
    views: tuple[str, ...] = (),
    splits: tuple[str, ...] = _FRACTIONS,
) -> str:
    """Convert PadChest: labels, and sentences of findings with their places.

    Args:
        root: folder with the table.
        shared: output, resources and storage format.
        images: folder with 0/ to 54/, or with all PNG files; default root.
        annotators: physician excludes images labelled by a model only.
        text: english writes sentences from the names of findings and places; spanish keeps the
            reports' word stems.
        views: keep only these of PA, AP, LATERAL and COSTAL.
        splits: fractions of the splits, by patient.
    """
    from medvl.data.corpora.reports import padchest as corpus

    return convert_corpus(
        corpus, root, shared, images=images, annotators=annotators, text=text, views=views,
        fractions=split_fractions(splits),
    )  # fmt: skip


def convert_corpus(
    corpus: ModuleType, root: Path, shared: ConversionOptions, **settings: Any
) -> str:
    """Plan a corpus with these settings and convert it, as `convert`."""
    deid = shared.deidentifier()
    return convert(
        corpus.plan(root, deid, follow_links=shared.options.follow_links, **settings), deid, shared
    )


def convert(plan: "Plan", deid: "Deidentifier", shared: ConversionOptions) -> str:
    """Convert a plan. Returns one line per split with its counts, and the warnings."""
    from medvl.data.convert.pipeline import write_shards

    run = shared.run
    lines = _report(run.local_out, write_shards(plan, deid, run, shared.options))
    if plan.rows.messages:
        lines.append(f"skipped rows: {plan.rows.describe_skipped()}")
    if run.part is not None:
        lines.append(
            f"Part {run.part} is finished. When all are: medvl merge OUT PART ..., with the "
            f"--out of each."
        )
    if run.staging is not None:
        lines.append(
            f"Uploaded to {locate(run.out)} and compared every byte. {run.local_out} can be "
            f"deleted."
        )
    private = run.local_out.with_name(f"{run.local_out.name}-private")
    lines.append(
        f"Wrote {run.local_out}. Do not share {private.name}: it names the source of each sample."
    )
    return "\n".join(lines)


def split_fractions(items: tuple[str, ...]) -> dict[str, float]:
    """Parse `NAME=FRACTION ...`. Raises ConfigError."""
    try:
        return {name: float(value) for name, value in named_values(items, "--splits").items()}
    except ValueError:
        message = f"expected --splits as NAME=FRACTION, got {' '.join(items)}"
        raise ConfigError(message, "malformed", field="splits") from None


def _report(out: Path, manifests: "Mapping[str, Manifest]") -> list[str]:
    """Return the counts of the corpus, one line per split, the warnings of all splits, and
    advice about them.
    """
    from medvl.data.convert.conversion import Conversion, PrivateFolder

    rows = dict.fromkeys(
        corpus_line(manifest) for manifest in manifests.values()
    )  # the same in all splits
    lines = [
        *filter(None, rows),
        *(_summary(split, manifest) for split, manifest in manifests.items()),
    ]
    warnings = sum((Counter(manifest.warnings) for manifest in manifests.values()), Counter[str]())
    of_corpus = Conversion.read(PrivateFolder(out)).corpus_warnings  # included in every manifest
    warnings -= Counter({name: count * (len(manifests) - 1) for name, count in of_corpus.items()})
    if warnings["no_image"] == sum(manifest.samples for manifest in manifests.values()):
        del warnings["no_image"]  # a corpus of texts
    if warnings:
        lines.append(
            "warnings: " + ", ".join(f"{count} {name}" for name, count in sorted(warnings.items()))
        )
    if any(name.startswith("possible_") or name == "says_burned_in" for name in warnings):
        lines.append(_IDENTIFYING)
    return lines


def _summary(split: str, manifest: "Manifest") -> str:
    counts = sorted({**manifest.excluded, **manifest.skipped}.items())
    omitted = "".join(f", {count} {reason}" for reason, count in counts)
    return f"{split}: {manifest.samples} samples of {len(manifest.patients)} patients{omitted}"


def corpus_line(manifest: "Manifest") -> str:
    """Return a line with the rows of the whole corpus that were read, kept and left out; ""
    without such counts.
    """
    from medvl.data.corpora.common.rows import RowCounts, listed

    rows = RowCounts.from_json(manifest.rows, manifest.excluded_from_corpus)
    if rows is not None:
        return f"{manifest.corpus}: {rows}"
    excluded = Counter(manifest.excluded_from_corpus)
    return (
        f"{manifest.corpus}: {excluded.total()} left out before conversion ({listed(excluded)})"
        if excluded
        else ""
    )


def named_values(items: tuple[str, ...], option: str) -> dict[str, str]:
    """Return NAME -> VALUE of items NAME=VALUE. Raises ConfigError ("malformed"), which names
    `option`, for others.
    """
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"expected {option} as NAME=VALUE, got {item!r}",
                "malformed",
                field=option.strip("-"),
            )
        pairs[name] = value
    return pairs
