"""The list of `medvl shards` commands, and commands on shards."""

import dataclasses
import filecmp
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from medvl.cli.help import ClassCommands
from medvl.cli.shards.corpora import corpus_command, corpus_line
from medvl.data.corpora.registry import CORPORA, full_counts
from medvl.errors import ConfigError, ShardError, SplitError

if TYPE_CHECKING:
    from medvl.data.convert.regions import RegionDetector
    from medvl.data.shards.format import Manifest
    from medvl.data.shards.verify import RegionVerification
    from medvl.data.tokenizer.tokenizer import Tokenizer


COMMANDS = ClassCommands(CORPORA, corpus_command)

# `medvl verify`: folders of shards against their manifests, data cards and other folders.

_MAX_SHOWN = 20
"""Problems that are printed per split."""


def verify(
    folder: Path, *, against: Path | None = None, decode: bool = False, full: bool = False
) -> None:
    """Verify a folder of shards, or of splits, and its regions against the manifests, and that
    splits share no patient.

    Args:
        folder: folder of a split, or folder that contains all splits; or its address.
        against: folder or address that must share neither patients nor images with it; prints pairs
            of images with nearly equal pixels (key, other key, and how many of the 255 bits of
            their perceptual hashes differ).
        decode: also decode every image.
        full: require the counts of the full release (see the data card).
    """
    from medvl.data.corpora.common.rows import listed
    from medvl.data.shards.format import split_folders
    from medvl.data.shards.verify import verify_folder
    from medvl.data.splits import check_disjoint
    from medvl.data.storage.location import RemotePath, locate

    results = [
        verify_folder(part, decode=decode, progress=sys.stderr.isatty())
        for part in split_folders(folder)
    ]
    for result in results:
        manifest = result.manifest
        counts = Counter(manifest.excluded) + Counter(manifest.skipped)
        left_out = f"{counts.total()} left out{f' ({listed(counts)})' if counts else ''}"
        state = "intact" if not result.problems else f"{len(result.problems)} PROBLEMS"
        print(
            f"{manifest.corpus}/{manifest.split}: {manifest.samples} samples of "
            f"{len(manifest.patients)} patients "
            f"in {len(manifest.shards)} shards, {left_out}: {state}"
        )
        for problem in result.problems[:_MAX_SHOWN]:
            print(f"  {problem}")
        for regions in result.regions:
            _print_regions(regions)
        if isinstance(result.folder, RemotePath) and not result.folder.can_list:
            print(
                "  a web server lists no files: regions and files that are not in the manifest "
                "are not looked for"
            )
    for line in filter(None, dict.fromkeys(corpus_line(result.manifest) for result in results)):
        print(line)
    manifests = {result.manifest.split: result.manifest for result in results}
    check_disjoint(
        {split: manifest.patients for split, manifest in manifests.items()}, str(locate(folder))
    )
    _compare_counts(manifests, full)
    if any(
        result.problems or any(regions.problems for regions in result.regions) for result in results
    ):
        raise ShardError(
            f"{locate(folder)} is damaged; copy or convert it again", "malformed", field="folder"
        )
    if against is not None:
        _compare_folders(folder, against)


def _print_regions(result: "RegionVerification") -> None:
    state = "intact" if not result.problems else f"{len(result.problems)} PROBLEMS"
    if result.manifest is None:
        print(f"  regions {result.name}: {state}")
    else:
        manifest = result.manifest
        counts = (
            f"{manifest.regions} regions of {manifest.images} images, {manifest.skipped} "
            f"images skipped"
        )
        print(f"  regions {result.name} by {manifest.detector}: {counts}: {state}")
    for problem in result.problems[:_MAX_SHOWN]:
        print(f"    {problem}")


def _compare_counts(manifests: "Mapping[str, Manifest]", full: bool) -> None:
    from medvl.data.shards.verify import compare_counts

    expected = full_counts(next(iter(manifests.values())).corpus)
    differing = compare_counts(manifests, expected)
    for name, (count, full_count) in differing.items():
        print(f"not the full release: {count} of {full_count} {name}")
    if differing and full:
        raise ShardError(
            "expected the counts of the full release, got those above", "mismatch", field="full"
        )


def _compare_folders(folder: Path, against: Path) -> None:
    from medvl.data.shards.format import split_folders
    from medvl.data.shards.verify import find_overlaps

    images = patients = 0
    for overlap in find_overlaps(
        split_folders(folder), split_folders(against), progress=sys.stderr.isatty()
    ):
        shared = overlap.patients
        text = (
            "unknown patients (hashed with different salts)"
            if shared is None
            else f"{len(shared)} patients"
        )
        print(f"{overlap.name} and {overlap.other} share {len(overlap.images)} images, {text}")
        for pair in overlap.images:
            print(f"  {pair.key} {pair.other} {pair.distance}")
        for reason, count in sorted(overlap.not_compared.items()):
            print(f"  {count} images not compared: {reason}")
        images = images + len(overlap.images)
        patients = patients + len(shared or ())
    if images or patients:
        message = (
            f"{folder} and {against} share {images} pairs of images and {patients} "
            f"patients: neither is held out"
        )
        raise SplitError(message, "leak", field="against")


# `medvl upload`: folders of shards into an object store.


def upload(folder: Path, address: str) -> str:
    """Upload shards to an object store, and read back and compare every byte.

    The manifests come last, so that an interrupted upload is never taken for a whole one. Run the
    same command again to resume. Private folders are not uploaded.

    Args:
        folder: folder of a split, or folder of splits.
        address: s3://, gs://, az:// or hf:// address of the folder to write.
    """
    from medvl.data.shards.upload import upload_shards

    uploads = upload_shards(folder, address, progress=sys.stderr.isatty())
    return "\n".join(
        f"{one.address}: {one.files} files sent, {one.kept} there already, "
        f"{one.bytes / 1e6:.1f} MB compared"
        for one in uploads
    )


# `medvl vocab`: a vocabulary of a corpus.


def vocab(
    data: Path,
    out: Path,
    *,
    kind: Literal["wordpiece", "words", "r2gen"] = "wordpiece",
    size: int = 8000,
    min_frequency: int = 2,
    max_tokens: int = 128,
    sections: tuple[str, ...] = (),
    compare: tuple[Path, ...] = (),
    compare_on: Path | None = None,
) -> str:
    """Train a vocabulary on the text of a folder of shards, and compare it with others.

    Args:
        data: folder with a manifest, usually the training split.
        out: new output folder of the tokenizer; an equal tokenizer may be there already.
        kind: wordpiece; words, for models that write complete words (R2Gen); or r2gen, words
            cleaned as in its released code, which removes decimal points.
        size: maximum number of entries of a WordPiece vocabulary.
        min_frequency: minimum frequency of a piece or word.
        max_tokens: length at which the tokenizer truncates texts.
        sections: only these sections, such as findings, or question: the questions of the images
            with their options and answers; default all.
        compare: folders of other tokenizers, to print pieces per word beside the new one's.
        compare_on: folder of shards whose words are compared, such as a validation split; default
            the one above.
    """
    from medvl.data.loading.studies import question_texts
    from medvl.data.shards.source import ShardSource
    from medvl.data.tokenizer.tokenizer import load_tokenizer, train_wordpiece, train_words

    # fails before the training
    others = {str(folder): load_tokenizer(folder) for folder in compare}
    reports = 0

    def texts_of(folder: Path) -> Iterator[str]:
        nonlocal reports
        reports = 0
        source = ShardSource(folder)
        for of_study in source.texts_by_study(sections):
            reports += 1
            yield from of_study
        if not sections or "question" in sections:
            yield from question_texts(source)

    texts = texts_of(data)
    options = {"min_frequency": min_frequency, "max_tokens": max_tokens}
    if kind == "wordpiece":
        tokenizer = train_wordpiece(texts, vocab_size=size, **options)
    else:
        tokenizer = train_words(texts, cleaning="r2gen" if kind == "r2gen" else "report", **options)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        tokenizer.save(folder)
        new = {path.name: path for path in Path(folder).iterdir()}
        equal, _, _ = filecmp.cmpfiles(out, folder, new, shallow=False)
        other = sorted({path.name for path in out.iterdir()} - set(equal))
        if other:
            message = (
                f"{out} holds another vocabulary or other files (first {other[0]}); give "
                f"a new folder"
            )
            raise ConfigError(message, "exists", field="out")
        for path in new.values():
            path.replace(out / path.name)
    wrote = f"Wrote {out}: {tokenizer.vocab_size} entries from {reports} texts"
    if not compare:
        return wrote
    return f"{wrote}\n{_compare({str(out): tokenizer, **others}, texts_of(compare_on or data))}"


def _compare(tokenizers: "Mapping[str, Tokenizer]", texts: Iterable[str]) -> str:
    """Return a table of the pieces into which each vocabulary divides the words of the texts."""
    from medvl.data.tokenizer.wordpiece import count_words

    words, _ = count_words(texts, lowercase=False)
    width = max(map(len, tokenizers))
    lines = [
        f"{'vocabulary':{width}} {'entries':>8} {'pieces per word':>16} {'one piece':>10} "
        f"{'unknown':>8}"
    ]
    for name, tokenizer in tokenizers.items():
        pieces, single, unknown = tokenizer.pieces_per_word(words)
        lines.append(
            f"{name:{width}} {tokenizer.vocab_size:8} {pieces:16.3f} {single:10.1%} {unknown:8.2%}"
        )
    return "\n".join([f"{sum(words.values())} words, {len(words)} of them different", *lines])


# `medvl regions`: region features beside shards.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectorOptions:
    """Weights of the detector and number of its regions."""

    weights: str | None = None
    """for a Faster R-CNN a local file, which also decides the number of classes; for a grid a file,
    a folder, OWNER/NAME@COMMIT, or "published"; a checkpoint has its own
    """
    random_weights: bool = False
    """use random weights, for tests"""
    class_names: Path | None = None
    """file with a name of the detector's classes on each line, the background's first"""
    image_size: int | None = None
    """size of the images of grid:ENCODER"""
    fit: Literal["crop", "pad", "squash"] | None = None
    """how grid:ENCODER makes images square; default: pad"""
    all_tokens: bool = False
    """of a grid, store the class token (or the encoder's vector) and all cells, also those outside
    of the image: what a model with this frozen encoder trains on in place of images
    (data.image-features NAME)
    """
    max_regions: int = 36
    """largest number of regions of an image; without --min-regions the number of all (VisualBERT
    and LXMERT: 36)
    """
    min_regions: int | None = None
    """smallest number; in between, regions above --confidence are kept (UNITER: 10 to 100)"""
    confidence: float = 0.2
    """smallest confidence of a region beyond --min-regions"""
    nms_iou_threshold: float = 0.3
    """IoU above which the less confident of two boxes of a class is suppressed"""
    device: str = "auto"
    """cpu, cuda, or auto"""

    def create(self, detector: str) -> "RegionDetector":
        """Create the detector. Raises as `create_region_detector` does."""
        from medvl.eval.core.open import resolve_device
        from medvl.models.downstream.detector import RegionSelection
        from medvl.models.downstream.regions import create_region_detector

        return create_region_detector(
            detector,
            weights=self.weights,
            random_weights=self.random_weights,
            selection=RegionSelection(
                max_regions=self.max_regions,
                min_regions=self.min_regions,
                confidence=self.confidence,
                nms_iou_threshold=self.nms_iou_threshold,
            ),
            image_size=self.image_size,
            fit=self.fit,
            all_tokens=self.all_tokens,
            class_names=None if self.class_names is None else _read_names(self.class_names),
            device=resolve_device(self.device),
        )


def regions(
    data: Path,
    detector: str,
    options: Annotated[DetectorOptions, tyro.conf.arg(name="")] = DetectorOptions(),
    *,
    name: str | None = None,
    batch: int = 8,
    workers: int = 4,
    full_precision: bool = False,
    max_skipped: float = 0.001,
) -> None:
    """Write region features, boxes and classes of all images beside their shards, once, with a
    frozen detector.

    Models with image_encoder regions:WIDTH read them (data.regions NAME). With --all-tokens they
    are the output of a frozen image encoder, for training its model without running it
    (data.image-features NAME). The shards stay as they are. Run the same command again to resume.

    Args:
        data: folder of a split, or folder that contains all splits.
        detector: fasterrcnn_resnet50_fpn or another Faster R-CNN of torchvision; grid:ENCODER for
            the cells of an image encoder; or folder of a checkpoint: the boxes of a detector, or
            the grid of another system's image encoder.
        options: weights of the detector and number of its regions.
        name: name of the regions, a subfolder of DATA/regions; default: derived from the
            detector's name.
        batch: images that the detector reads at once.
        workers: threads that decode images.
        full_precision: store features as float32 instead of float16.
        max_skipped: budget of unreadable images: below 1 a fraction, else a number.
    """
    from medvl.data.convert.regions import RegionOptions, write_regions
    from medvl.data.shards.format import split_folders
    from medvl.data.shards.source import ShardSource

    run = RegionOptions(
        batch=batch, workers=workers, full_precision=full_precision, max_skipped=max_skipped
    )
    opened = options.create(detector)
    name = name or opened.name.replace(":", "-").replace("/", "-")
    for folder in split_folders(data):
        manifest = write_regions(
            ShardSource(folder), opened, name, run, progress=sys.stderr.isatty()
        )
        classes = f", {len(manifest.class_names)} classes" if manifest.class_names else ""
        use = (
            f"data.image_features {name}"
            if options.all_tokens
            else f"image_encoder regions:{manifest.width}"
        )
        print(
            f"Wrote {folder}/regions/{name}: {manifest.regions} regions of {manifest.images} "
            f"images, {manifest.skipped} images skipped; {use}{classes}"
        )


def _read_names(path: Path) -> list[str]:
    from medvl.common.text_files import read_lines

    return read_lines(
        path, ConfigError, field="class_names", what="a file with a name on each line"
    )
