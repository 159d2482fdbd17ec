"""Inputs of an evaluation of generated images: folders of them, and real shards.

Shape letters: N images, D feature dim.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.convert.generated import generated_sample
from medvl.data.images.generated import GeneratedImages
from medvl.data.loading.sources import ConcatSource, FileSource, SourceView, Subset, label_fraction
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import check_against
from medvl.data.transforms.image import EvalTransform
from medvl.errors import EvaluationError
from medvl.eval.core.metrics import Array
from medvl.eval.core.open import open_for_evaluation, open_source
from medvl.eval.generation.distances import FeatureSet
from medvl.eval.probing.features import FeatureTable, ProbedEncoder, encode_features
from medvl.schema import FINDINGS, ConventionsName

Fit = Literal["crop", "pad", "squash"]


class FramedSource(SourceView):
    """Real images as a generator is trained on them: made square, and at its size.

    Without this, real images would differ from generated ones by their frame and resolution.

    Args:
        source: the real images.
        size: side of the generator's images.
        fit: how they were made square (`EvalTransform.fit`).
    """

    def __init__(self, source: ShardSource | ConcatSource | Subset, size: int, fit: Fit) -> None:
        super().__init__(source, f"{source.fingerprint} {size} {fit}".encode())
        self._transform = EvalTransform(size=size, fit=fit)

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return uint8 (size, size), or (size, size, 3) with `color`. Raises ImageError or
        ShardError.
        """
        pixels = self.source.pixels(position, color)
        image_HWC = self._transform.build()(pixels, np.random.default_rng(0)).image_HWC
        return image_HWC[:, :, 0] if image_HWC.shape[2] == 1 else image_HWC


class GeneratedSource(FileSource):
    """A folder of generated images as a source; the labels are the findings that the prompts state.

    Args:
        images: the folder.
        patients: patient of each key of a real sample; a prompt of none of them is its own patient.
        conventions: what the labeler takes as present and as uncertain in a prompt.

    The fingerprint covers the pixels and the prompts. Pixels are compared with their hash when they
    are read.
    """

    def __init__(
        self,
        images: GeneratedImages,
        patients: Mapping[str, str],
        conventions: ConventionsName = "chexpert",
    ) -> None:
        rows = [
            (row, patients.get(row.source_key or "", f"prompt {row.prompt_key}"))
            for row in images.rows
        ]
        samples = [
            generated_sample(images, number, patient=patient, conventions=conventions)
            for number, (_, patient) in enumerate(rows)
        ]
        super().__init__(samples, FINDINGS)
        self.images = images
        self.folder = images.folder

    @property
    def prompts(self) -> list[str]:
        """Prompt of each image, with white space collapsed."""
        return [" ".join(row.prompt.split()) for row in self.images.rows]

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return uint8 (H, W), or (H, W, 3) with `color`. Raises CorpusError or ImageError."""
        image_HW = self.images.pixels(position)
        return np.repeat(image_HW[:, :, None], 3, axis=2) if color else image_HW


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """How images are read and encoded."""

    batch: int = 64
    workers: int = 0
    cache: Path | None = None
    """Folder of cached features."""

    def features(self, encoder: ProbedEncoder, source: Any) -> FeatureTable:
        """Return the features of every image of a source, from the cache if present."""
        loader = open_for_evaluation(
            source, encoder.transform, batch=self.batch, workers=self.workers
        )
        return encode_features(encoder, loader, cache=self.cache)

    def pixels(self, source: Any, size: int) -> "PixelBatches":
        """Return the images of a source as batches of vectors of their pixels."""
        return PixelBatches(source, size, self)


class PixelBatches:
    """Images of a source as float32 (B, size * size) vectors in [-1, 1], squashed to a square of
    `size` pixels.

    After an iteration, `positions` has the place of each image in the source: unreadable ones are
    skipped.
    """

    def __init__(self, source: Any, size: int, options: LoaderOptions) -> None:
        self._source = source
        self._size = size
        self._options = options
        self.positions: list[int] = []

    def __iter__(self) -> Any:
        transform = EvalTransform(size=self._size, fit="squash")
        loader = open_for_evaluation(
            self._source, transform, batch=self._options.batch, workers=self._options.workers
        )
        place = {
            self._source.sample(position).key: position for position in range(len(self._source))
        }
        self.positions = []
        for batch in loader:
            self.positions += [place[key] for key in batch.keys]
            yield batch.image_BCHW.float().mean(dim=1).flatten(1) / 127.5 - 1

    def stacked(self) -> Tensor:
        """Return all vectors at once."""
        return torch.cat(list(self))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RealData:
    """Real shards: the classifier's and the generator's training images, validation and test
    images.
    """

    train: FramedSource
    valid: FramedSource
    test: FramedSource
    all_train: FramedSource
    """All training images, also those of other views: what a generator may have memorised."""
    shards: frozenset[str]
    """Hashes of the shards of all training images."""
    framing: Mapping[str, Any]
    """Size and fit of the images."""

    @classmethod
    def open(
        cls,
        train: Sequence[Path],
        valid: Path | None,
        test: Path,
        *,
        folders: Sequence[GeneratedImages],
        fit: Fit | None = None,
        views: Sequence[str] = (),
        checkpoints: Sequence[Path] = (),
    ) -> "RealData":
        """Open the shards.

        Args:
            train, valid, test: folders of shards of different patients. Without `valid`, the images
                of a tenth of the training patients take its place in `valid` and are left out of
                `train`, but not of `all_train`.
            folders: the generated images, the main ones first: their size, and their generators,
                which must have been trained on other patients than those of the test.
            fit: how the generator's training images were made square; default: as recorded by the
                generator, or crop.
            views: keep only images of these views; not in `all_train`.
            checkpoints: the models of the evaluation, and the generator if it is there.

        Raises SplitError where a model or a generator was trained on a test patient, the sets share
        a patient, or images are synthetic; EvaluationError where no image has one of the views.
        """
        generation = folders[0].generation
        chosen_fit: Fit = fit or generation.config.get("fit", "crop")
        framed = functools.partial(FramedSource, size=generation.image_size, fit=chosen_fit)
        tested = open_source(test, checkpoints)
        sources = [open_source(folder) for folder in train]
        all_train = sources[0] if len(sources) == 1 else ConcatSource(sources)
        check_against(all_train.manifest, tested.manifest)
        if valid is None:
            trained, validated = _hold_out(all_train)
        else:
            trained = all_train
            validated = open_source(valid)
            check_against(validated.manifest, tested.manifest)
            check_against(all_train.manifest, validated.manifest)
        for images in folders:
            for content in images.train_manifests():
                for manifest in Manifest.parse(content, str(images.folder)).lineage():
                    if manifest.salt == tested.manifest.salt:
                        check_against(manifest, tested.manifest)
        chosen = [framed(_of_views(source, views)) for source in (trained, validated, tested)]
        return cls(
            train=chosen[0],
            valid=chosen[1],
            test=chosen[2],
            all_train=framed(all_train),
            shards=frozenset(shard.sha256 for shard in all_train.manifest.shards),
            framing={"image_size": generation.image_size, "fit": chosen_fit},
        )


def _hold_out(source: ShardSource | ConcatSource) -> tuple[Any, Any]:
    """Return the images of nine tenths of the patients, and those of the others."""
    patients = [source.sample(position).patient for position in range(len(source))]
    held_out = label_fraction(patients, 0.1, seed=0)
    return Subset(source, np.setdiff1d(np.arange(len(source)), held_out)), Subset(source, held_out)


def _of_views(
    source: ShardSource | ConcatSource | Subset, views: Sequence[str]
) -> ShardSource | ConcatSource | Subset:
    if not views:
        return source
    positions = [place for place in range(len(source)) if source.sample(place).view in views]
    if not positions:
        message = (
            f"{source.folder} has no image of the views {', '.join(views)}; give others, "
            f"or none for all"
        )
        raise EvaluationError(message, "empty", field="views")
    return Subset(source, positions)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageSet:
    """Images of one kind with their features and prompts: generated, reconstructed, or the real
    ones of the prompts.
    """

    name: str
    """Name in the results, such as "guidance 3" or "real"."""
    source: Any
    scored: FeatureTable
    """Features that the classifier of findings scores."""
    features: FeatureTable
    """Features of the distances."""
    prompts: tuple[str, ...]
    """Prompt of each row; "" for real images without one."""
    labels_NL: Array
    """Findings that the prompt states, in the columns of `FINDINGS`: 1, 0, -1 or NaN."""

    @property
    def patients(self) -> list[str]:
        """Patient of each image, or its prompt."""
        return self.scored.patients

    @property
    def feature_set(self) -> FeatureSet:
        """Features in float64, with the patients."""
        return FeatureSet(x_ND=self.features.x_ND.double().numpy(), groups=self.features.patients)

    def take(
        self, rows: NDArray[np.int64], name: str, prompts: Sequence[str], labels_NL: Array
    ) -> "ImageSet":
        """Return some images under other prompts, with the labels of these."""
        return ImageSet(
            name=name,
            source=self.source,
            scored=_take(self.scored, rows),
            features=_take(self.features, rows),
            prompts=tuple(prompts),
            labels_NL=labels_NL,
        )


def _take(table: FeatureTable, rows: NDArray[np.int64]) -> FeatureTable:
    indices = rows.tolist()
    return dataclasses.replace(
        table,
        x_ND=table.x_ND[indices],
        labels_NL=table.labels_NL[indices],
        samples=tuple(table.samples[row] for row in indices),
        positions=tuple(table.positions[row] for row in indices),
    )


def read_set(
    name: str,
    source: Any,
    classifier: ProbedEncoder,
    encoder: ProbedEncoder,
    options: LoaderOptions,
) -> ImageSet:
    """Return the images of a source with the features of both encoders, which may be one.

    Raises EvaluationError if an image of a generated folder cannot be read.
    """
    scored = options.features(classifier, source)
    features = scored if encoder is classifier else options.features(encoder, source)
    if scored.positions != features.positions:
        message = (
            f"the two encoders could not read the same images of {getattr(source, 'folder', name)}"
        )
        raise EvaluationError(message, "mismatch", field="features")
    generated = isinstance(source, GeneratedSource)
    prompts = source.prompts if generated else [""] * len(source)
    return ImageSet(
        name=name,
        source=source,
        scored=scored,
        features=features,
        prompts=tuple(prompts[position] for position in scored.positions),
        labels_NL=scored.labels_NL,
    )


def real_of_prompts(generated: ImageSet, real: ImageSet) -> ImageSet | None:
    """Return the real images whose texts are the prompts, each once, with prompts and labels of the
    prompts.

    None where no prompt is the text of one of the real images.
    """
    place = {sample.key: row for row, sample in enumerate(real.scored.samples)}
    rows = []
    row_of = {}
    for row, position in enumerate(generated.scored.positions):
        key = generated.source.images.rows[position].source_key
        if key in place and key not in row_of:
            row_of[key] = row
            rows.append(place[key])
    if not rows:
        return None
    prompts = list(row_of.values())
    return real.take(
        np.array(rows),
        "real",
        [generated.prompts[row] for row in prompts],
        generated.labels_NL[prompts],
    )
