"""Data settings and loaders for visual question answering."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.train.tasks.common import (
    DataLoaders,
    LoaderConfig,
    bind_regions,
    describe,
    open_split,
    open_train,
    open_valid,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VQADataConfig(LoaderConfig):
    """Shards with questions, and the augmentation of their images."""

    train: Path
    """Folder of shards with questions."""
    train_split: str = "train"
    """Split of the questions; in a corpus that splits questions instead of images, one folder has both splits."""
    valid_split: str = "validate"
    image: ConVIRTAugmentation | EvalTransform
    """Transform of the training images, without flips, because answers name sides; validation uses the model's own. An
    `EvalTransform` gives the size alone: training images have the model's fit too."""
    together: int = 1
    """Number of questions about one image in succession in training. They share its crop, and the image is encoded
    once: 4 take about half the time of 1."""

    def __post_init__(self) -> None:
        if self.image.flip != "off":
            raise ConfigError(
                f"expected image.flip 'off', because answers name sides, got {self.image.flip!r}",
                "conflict",
                field="image.flip",
            )


def open_vqa(
    data: VQADataConfig, model: Any, answers: Sequence[str], normalize: Callable[[str], str], batch: int
) -> DataLoaders:
    """Open the loaders of a VQA run for this rank; `answers` are the columns of the labels.

    Raises ShardError where a folder is damaged, CorpusError where it has no question of the split, SplitError where
    two folders share a patient, ConfigError where the batch does not fit the ranks or the model has no tokenizer.
    """
    from medvl.data.loading.vqa_source import QuestionSource

    if model.tokenizer is None:
        raise ConfigError(
            "the model has no tokenizer; start from a checkpoint with one, or set data.tokenizer",
            "missing",
            field="tokenizer",
        )
    text = WholeText(sections=("question",))
    options: dict[str, Any] = {"tokenizer": model.tokenizer, "text": text, "inputs": model.inputs}
    train, valid = open_split(data, one_folder=True)
    regions = bind_regions(model, train)
    questions = QuestionSource(train, data.train_split, answers, normalize)
    image = model.transform if isinstance(data.image, EvalTransform) else data.image
    loader = open_train(data, questions, batch, image=image, together=data.together, **options)
    described = describe(train.manifest, None if valid is None else valid.manifest, **regions)
    if valid is None:
        return DataLoaders(loader, None, None, described)
    held_out = QuestionSource(valid, data.valid_split, answers, normalize)
    options["image"] = model.transform
    losses = open_valid(data, held_out, **options)
    return DataLoaders(loader, losses, open_valid(data, held_out, shared=False, **options), described)
