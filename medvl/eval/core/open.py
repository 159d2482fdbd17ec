"""Models and data loaders for an evaluation: checkpoints loaded onto a device, shards without
training patients, webdataset tars as shards.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medvl.common.files import RunLock, subfolder
from medvl.common.ranks import rank_and_world
from medvl.data.annotations import MIXED
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.convert.plan import PrivateFolder
from medvl.data.corpora.registry import FileAccess
from medvl.data.corpora.webdataset_tars import WebdatasetTars
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.readers import read_slices
from medvl.data.loading.sources import Source, check_real, color_for, no_text, region_manifest_of
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import MANIFEST
from medvl.data.shards.regions import find_regions
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import check_against
from medvl.data.storage.cache import Cache
from medvl.data.storage.location import Location
from medvl.data.storage.webdataset_tars import (
    TarFields,
    check_tars,
    describe_tars,
    expand_tars,
    is_tar_pattern,
)
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, ImageError, SplitError
from medvl.eval.core.results import (
    OutputFolder,
    checkpoint_sha256,
    default_folder,
)
from medvl.models.base import System
from medvl.models.checkpoint import load
from medvl.models.checkpoint_folder import described_model, detector_of, train_manifests
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.registry import system
from medvl.schema import Inputs

_log = logging.getLogger(__name__)

SLICES = 16
"""Axial slices of each volume that a model of images reads in an evaluation."""


def resolve_device(device: str) -> str:
    """Return the name of the device; "auto" is CUDA where available, else the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(checkpoint: Path, device: str = "auto") -> System:
    """Load the model of a checkpoint, in eval mode, onto a device. Raises CheckpointError.

    On a CPU convolutions compute in `channels_last`, which is up to twice as fast there and equal
    up to rounding.
    """
    where = resolve_device(device)
    model = load(checkpoint).to(where)
    if where == "cpu":
        torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    return model


def load_ensemble(checkpoints: Sequence[Path], device: str = "auto") -> list[DualEncoder]:
    """Load the dual-encoders of an ensemble, all in memory at once.

    Raises:
        CheckpointError: a checkpoint cannot be loaded.
        ConfigError: a model is not a dual-encoder, or uses another image transform than the first,
            or one was trained in colour and one in grey, so that they cannot share a loader.
    """
    models: list[DualEncoder] = []
    for checkpoint in checkpoints:
        model = load_model(checkpoint, device)
        if not isinstance(model, DualEncoder):
            raise unsupported_model(checkpoint, model, "give the checkpoint of a dual-encoder")
        models.append(model)
        first = models[0].transform
        color = model.transform.trained_color
        if model.transform != first or bool(color) != bool(first.trained_color):
            message = (
                f"{checkpoint} and {checkpoints[0]} have different image transforms; "
                f"evaluate them separately"
            )
            raise ConfigError(message, "mismatch", field="checkpoint")
    return models


def unsupported_model(
    checkpoint: Path, model: System | type[System], advice: str, *, field: str = "checkpoint"
) -> ConfigError:
    """Return the error for a checkpoint of a system that an evaluation does not support."""
    return ConfigError(f"{checkpoint} is a {model.name}, which this evaluation does not "
                       f"support; {advice}",
                       "unsupported", field=field)  # fmt: skip


def open_source(
    data: str | Location, checkpoints: Sequence[Path] = (), *, synthetic: bool = False
) -> ShardSource:
    """Open shards for evaluating checkpoints, with their regions for those that were trained with
    regions.

    Args:
        data: folder of shards, or its address; or webdataset tars (with braces, ending in .tar),
            which are converted to shards in the folder of the cache, once.
        checkpoints: folders of the checkpoints.
        synthetic: allow synthetic images, for training a probe.

    Raises:
        CheckpointError: a checkpoint is missing or damaged.
        ConfigError: the checkpoints were trained with regions of different detectors.
        ShardError: the folder is missing or damaged, or has no regions of the checkpoint's
            detector.
        SplitError: a checkpoint, or one that its training started from, was trained on a patient of
            the folder; or the images are synthetic.
    """
    detectors = {
        detector for checkpoint in checkpoints if (detector := detector_of(checkpoint)) is not None
    }
    if len(detectors) > 1:
        message = (
            "the checkpoints were trained with regions of different detectors; evaluate "
            "them separately"
        )
        raise ConfigError(message, "mismatch", field="checkpoint")
    if is_tar_pattern(data):
        data = cached_shards(str(data))
    source = ShardSource(data, regions=find_regions(data, detectors.pop()) if detectors else None)
    if not synthetic:
        check_real(source)
    for checkpoint in checkpoints:
        refuse_training_patients(checkpoint, source)
    return source


def refuse_training_patients(checkpoint: Path, source: ShardSource) -> None:
    """Raise SplitError if the checkpoint, or one that its run started from, was trained on a
    patient of the shards.

    Checkpoints without a manifest cannot be checked. Patients hashed with another salt cannot be
    compared, which is logged as a warning. A corpus that splits questions instead of images shares
    images between its splits by design (see the data cards), so it is not compared with itself.
    """
    for training in train_manifests(checkpoint):
        if source.manifest.split == MIXED and training.corpus == source.manifest.corpus:
            continue
        if training.salt == source.manifest.salt:
            try:
                check_against(training, source.manifest)
            except SplitError as error:
                advice = "evaluate it on other patients, such as those of the test split"
                raise error.prefixed(
                    f"{checkpoint} was trained on patients of {source.folder}: {advice}. "
                ) from None
            continue
        _log.warning(
            "%s was trained on %s/%s, whose patients were hashed with another salt than those of "
            "%s: shared patients would not be noticed; convert both with one --salt-file",
            checkpoint,
            training.corpus,
            training.split,
            source.folder,
        )


def open_for_evaluation(
    source: Source,
    transform: EvalTransform,
    tokenizer: Tokenizer | None = None,
    *,
    batch: int,
    workers: int,
    sections: Sequence[str] = (),
    inputs: Inputs | None = None,
    ranks: tuple[int, int] = (0, 1),
    slices: int = 1,
    keep_imageless: bool = False,
) -> Loader:
    """Open a loader that yields every sample of a source once, in order.

    Images are in colour or in grey as the model was trained, as of original files (`color_for`).

    Args:
        source: the samples.
        transform: the model's image transform.
        tokenizer: the model's tokenizer; None for models that read no text.
        batch: samples per batch.
        workers: loader processes; 0 loads in this process.
        sections: report sections that make up the text; empty for the whole text.
        inputs: optional parts of the batches, such as prior images. Regions are read from a source
            that has them.
        ranks: rank and number of ranks that take whole batches in turn; `FullPass.compute` brings
            the results together. By default this process reads everything, also in a process group.
        slices: axial slices of each volume that a model of images reads.
        keep_imageless: also samples without an image, for models that read none.
    """
    inputs = dataclasses.replace(inputs or Inputs(), regions=region_manifest_of(source) is not None)
    return open_loader(
        source,
        batch=batch,
        image=transform,
        text=WholeText(sections=tuple(sections)) if sections else WholeText(),
        tokenizer=tokenizer or no_text,
        train=False,
        rank=ranks[0],
        world=ranks[1],
        workers=workers,
        color=color_for(source, transform),
        inputs=inputs,
        slices=slices,
        keep_imageless=keep_imageless,
    )


def shown_pixels(source: ShardSource) -> Callable[[int], np.ndarray]:
    """Return a function of the position of a sample: its image on a page, of a volume the middle
    axial slice.
    """
    if not source.has_volumes:
        return source.pixels

    def middle(position: int) -> np.ndarray:
        slices = read_slices(source, position, source.sample(position))
        if slices is None:
            raise ImageError(f"sample {source.key(position)} has no volume", "no_image")
        middle_HWC: np.ndarray = slices[0]
        return middle_HWC

    return middle


_SPLIT = "test"


def cached_shards(pattern: str, fields: TarFields | None = None) -> Path:
    """Return a folder of shards with the samples of webdataset tars; it is made on first use, and
    kept in the cache.

    Every sample is treated as its own patient, so training patients or articles in the tars cannot
    be detected; a warning is logged. The folder is identified by the names and sizes of the tars.

    Raises ConfigError, ShardError, StorageError and CorpusError as
    `medvl.data.corpora.webdataset_tars.WebdatasetTars.plan`.
    """
    tars = expand_tars([pattern])
    fields = fields or TarFields()
    check_tars(tars)
    sizes = [(str(tar), tar.stat().st_size) for tar in tars]
    names = [fields.image, fields.text, fields.key_end, *fields.where]
    identity = hashlib.sha256(json.dumps([sizes, *names]).encode()).hexdigest()
    out = subfolder(Cache.from_environment().make_private(), "webdataset") / identity[:32]
    _log.warning(
        "%s: tars without a manifest; patients or articles that the model was trained on are "
        "not noticed",
        describe_tars(tars),
    )
    with RunLock(out.with_name(f"{out.name}-lock"), error=ConfigError, field="data"):
        if not (out / _SPLIT / MANIFEST).is_file():
            deid = Deidentifier(hashlib.sha256(b"webdataset tars").digest())
            access = FileAccess(copies=PrivateFolder(out).create() / "copies")
            tars_of = WebdatasetTars(tars=(pattern,), members=fields, splits=(f"{_SPLIT}=1",))
            plan = tars_of.plan(deid, access)
            write_shards(
                plan,
                deid,
                ShardRun(out=out, max_skipped=0.05),
                ShardOptions(color=True, keep_textless=True),
            )
            shutil.rmtree(PrivateFolder(out).path)
    return out / _SPLIT


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Output and device."""

    out: Path | None = None
    """folder for the output files; default RUN/eval/STEP/TASK, or CHECKPOINT/eval/TASK outside
    of a run
    """
    replace: bool = False
    """replace results of another checkpoint or of other data in the output folder"""
    resamples: int = 1000
    """bootstrap resamples"""
    device: str = "auto"
    """auto, cpu or cuda"""
    all: bool = False
    """print all rows; by default, those that fit on one screen"""

    def folder(self, evaluated: Path | None, task: str, *, hashed: bool = True) -> OutputFolder:
        """Return the output folder. Called before an evaluation, so that its hours are not lost at
        its end.

        Args:
            evaluated: the evaluated checkpoint, or a file of predictions.
            task: name of the folder.
            hashed: whether the results hold the hash of `evaluated`; False for ensembles and
                random weights.

        Raises:
            ConfigError: neither something evaluated nor --out is given.
            EvaluationError: the folder cannot be written, or holds results of another checkpoint
                without --replace.
        """
        if evaluated is None:
            if self.out is None:
                message = "--encoder needs --out: there is no run to hold the results"
                raise ConfigError(message, "missing", field="out")
            return OutputFolder(self.out, replace=self.replace)
        kind = "predictions" if evaluated.is_file() else "checkpoint"
        model = {kind: functools.partial(checkpoint_sha256, evaluated)} if hashed else {}
        folder = self.out or default_folder(evaluated, task)
        return OutputFolder(folder, model, replace=self.replace)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(OutputOptions):
    """Output, device and batches."""

    batch: int = 64
    """batch size"""
    workers: int = 2
    """loader processes"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallBatchOptions(RunOptions):
    """Output, device and batches."""

    batch: int = 32
    """batch size"""


class Setup:
    """The model and data of an evaluation, each opened once, and the folder of its results.

    Args:
        options: device, batches and resamples.
        output: folder of the results; None where another program writes them.
        trained: further checkpoints, on whose training patients nothing may be evaluated.
    """

    def __init__(
        self,
        options: OutputOptions,
        output: OutputFolder | None = None,
        *,
        trained: Sequence[Path] = (),
    ) -> None:
        self.options = options
        self.folder: Path | None = None
        """Folder of the results, once the data is known."""
        self._output = output
        self._trained = tuple(trained)
        self._models: dict[Path, System] = {}

    @property
    def resamples(self) -> int:
        """Number of bootstrap resamples."""
        return self.options.resamples

    @property
    def features(self) -> Path | None:
        """Folder of features that evaluations of one checkpoint share; None without a folder of
        results.
        """
        return None if self._output is None else self._output.path.parent / "features"

    def settle(self, **data: str | None) -> None:
        """Decide the folder of the results, and print it.

        Args:
            data: hash of the data by its name in `Results.inputs`; none where the results hold no
                such hash.

        Raises EvaluationError where the folder cannot be written, or holds results of another model
        without --replace.
        """
        if self._output is not None:
            self.folder = self._output.settle(**data)

    def model(
        self,
        checkpoint: Path,
        fits: tuple[type[System], ...] = (System,),
        advice: str = "give another checkpoint",
        *,
        field: str = "checkpoint",
    ) -> Any:
        """Return the model of a checkpoint, in eval mode on the device.

        Args:
            checkpoint: folder of the checkpoint.
            fits: classes that the evaluation supports.
            advice: what the error for other systems advises.
            field: option that names the checkpoint.

        Raises ConfigError for other systems, and CheckpointError.
        """
        self.check(checkpoint, fits, advice, field=field)
        if checkpoint not in self._models:
            self._models[checkpoint] = load_model(checkpoint, self.options.device)
        return self._models[checkpoint]

    def check(
        self,
        checkpoint: Path,
        fits: tuple[type[System], ...],
        advice: str,
        *,
        field: str = "checkpoint",
    ) -> None:
        """Raise ConfigError for a checkpoint of another system, before its weights are read;
        arguments as of `model`.
        """
        cls = system(described_model(checkpoint)["name"])
        if not issubclass(cls, fits):
            raise unsupported_model(checkpoint, cls, advice, field=field)

    def source(self, data: Path, *checkpoints: Path) -> ShardSource:
        """Open shards on which checkpoints are evaluated, without patients of their training.
        Raises as `open_source`.
        """
        return open_source(data, [*checkpoints, *self._trained])

    def loader(self, source: Source, model: Any, *, text: bool = True, **options: Any) -> Loader:
        """Open a loader of a source for a model, of this rank's batches under torchrun.

        Args:
            source: the samples.
            model: has the image transform and the tokenizer.
            text: tokenize the texts, for a model with a tokenizer.
            options: further arguments of `open_for_evaluation`.
        """
        assert isinstance(self.options, RunOptions)
        return open_for_evaluation(
            source,
            model.transform,
            model.tokenizer if text else None,
            batch=self.options.batch,
            workers=self.options.workers,
            ranks=rank_and_world(),
            keep_imageless=not getattr(model, "reads_images", True),
            **options,
        )

    def valid_loader(
        self,
        data: Path | None,
        model: Any,
        *checkpoints: Path,
        text: bool = True,
        **options: Any,
    ) -> Loader | None:
        """Open a loader of the shards on which thresholds are chosen; None without a folder.

        Args:
            data: folder of shards of other patients.
            model: as in `loader`.
            checkpoints: evaluated checkpoints, whose training patients are refused here too.
            text, options: as in `loader`.
        """
        if data is None:
            return None
        return self.loader(self.source(data, *checkpoints), model, text=text, **options)
