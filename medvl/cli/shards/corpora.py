"""`medvl shards` and `medvl merge`: convert a corpus to shards. Each command returns the text to
print.
"""

import dataclasses
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medvl.cli.help import Flat
from medvl.data.convert.options import ShardOptions, ShardRun, VolumeShardOptions
from medvl.data.corpora.registry import CORPORA, Corpus, FileAccess
from medvl.data.storage.location import locate
from medvl.data.volumes.options import OrganOptions, VolumeOptions
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.corpora.common.tables import Plan
    from medvl.data.privacy import Deidentifier
    from medvl.data.shards.format import Manifest

_IDENTIFYING = (
    "Texts and pixels are stored unchanged. Those counted as possible_* or says_burned_in may "
    "name a person: check "
    "them, and de-identify the corpus and convert it again before you share the shards."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """Options of every conversion."""

    run: Flat[ShardRun]
    """output folder, budget, workers"""
    options: Flat[ShardOptions]
    """storage format of the images"""

    def shard_options(self) -> ShardOptions:
        """Return the storage format."""
        return self.options


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConversionOptions:
    """Options of every conversion of texts without images."""

    run: Flat[ShardRun]
    """output folder, budget, workers"""
    samples_per_shard: int = 10_000
    """texts per shard."""

    def shard_options(self) -> ShardOptions:
        """Return the storage format, with defaults for images."""
        return ShardOptions(samples_per_shard=self.samples_per_shard)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VolumeConversionOptions:
    """Options of every conversion of volumes."""

    run: Flat[ShardRun]
    """output folder, budget, workers"""
    volume: Flat[VolumeOptions]
    """spacing and size of the volumes"""
    organs: Flat[OrganOptions]
    """masks and texts by organ"""
    keep_textless: bool = False
    """Keep volumes without text (for evaluation by labels)."""
    samples_per_shard: int = 100
    """volumes per shard."""
    follow_links: bool = False
    """Also read files that links outside of the corpus lead to. Only for trees that you trust."""

    def shard_options(self) -> ShardOptions:
        """Return the storage format."""
        return VolumeShardOptions(
            volume=self.volume,
            organs=self.organs,
            keep_textless=self.keep_textless,
            samples_per_shard=self.samples_per_shard,
            follow_links=self.follow_links,
        )


AnyOptions = ConversionOptions | TextConversionOptions | VolumeConversionOptions


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


def corpus_command(name: str) -> Callable[..., str]:
    """Return the function of `medvl shards NAME`, made from the fields of the corpus's class.

    Raises ConfigError where no corpus has this name, or its package does not load.
    """
    cls = CORPORA.get(name)

    def command(corpus: Corpus, shared: AnyOptions) -> str:
        return convert_corpus(corpus, shared)

    flat: Any = Flat  # the classes are known at run time only
    of_images = ConversionOptions if cls.has_images else TextConversionOptions
    shared = VolumeConversionOptions if cls.has_volumes else of_images
    command.__annotations__ = {"corpus": flat[cls], "shared": flat[shared]}
    command.__doc__ = cls.__doc__
    return command


def convert_corpus(corpus: Corpus, shared: AnyOptions) -> str:
    """Plan and convert a corpus. Returns its notes, one line per split with its counts, and the
    warnings.
    """
    from medvl.data.convert.organs import add_organs
    from medvl.data.convert.plan import PrivateFolder, hold_out

    deid = deidentifier(shared.run.salt_file, new_salt=shared.run.new_salt)
    options = shared.shard_options()
    copies = PrivateFolder(shared.run.local_out).path / "copies"
    access = FileAccess(follow_links=options.follow_links, copies=copies)
    plan = hold_out(corpus.plan(deid, access), corpus.excluded_folders(), deid)
    if isinstance(options, VolumeShardOptions):
        plan = add_organs(plan, options.organs, access)
        options = dataclasses.replace(options, modality=getattr(corpus, "modality", "CT"))
    options = dataclasses.replace(
        options,
        keep_textless=options.keep_textless or corpus.keeps_textless(),
        color=options.color or corpus.color,
        crop_background=options.crop_background or corpus.crop_background,
    )
    lines = _convert(plan, deid, shared.run, options)
    if copies.is_dir():
        shutil.rmtree(copies)
    return "\n".join([*corpus.notes(plan), *lines])


def _convert(plan: "Plan", deid: "Deidentifier", run: ShardRun, options: ShardOptions) -> list[str]:
    from medvl.data.convert.pipeline import write_shards

    lines = _report(run.local_out, write_shards(plan, deid, run, options))
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
    return lines


def _report(out: Path, manifests: "Mapping[str, Manifest]") -> list[str]:
    """Return the counts of the corpus, one line per split, the warnings of all splits, and
    advice about them.
    """
    from medvl.data.convert.plan import Conversion, PrivateFolder

    # the same in all splits
    rows = dict.fromkeys(corpus_line(manifest) for manifest in manifests.values())
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
