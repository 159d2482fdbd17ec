"""A fine-tuning recipe's data: which shards, whose questions, and loaders opened for this rank."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from medvl.data.shards.format import MANIFEST
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import check_against
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.train.tasks.pretraining import DataLoaders, describe


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuestionConfig:
    """Where the questions come from."""

    train: Path
    """Folder of shards with questions."""
    train_split: str = "train"
    """Of the questions; in a corpus that splits questions and not images, both splits lie in one folder."""
    valid: Path | None
    """Folder of shards for validation; None validates nothing."""
    valid_split: str = "validate"
    image: ConVIRTAugmentation | EvalTransform
    """Of the training images; validation takes the model's own transform. A flip would leave "left" and "right" of
    the answers behind: keep it off."""
    workers: int = 8
    """Processes of each rank that read ahead. They change nothing but the speed."""
    valid_batch: int = 128
    max_skipped: float = 0.001
    """Budget of questions whose image cannot be read: below 1 a share, else a number."""
    together: int = 1
    """Questions about one image that follow one another in training. They share it and its crop, and it is encoded
    once: 4 take about half the time of 1."""
    seed: int = 0
    """Of the order of the questions, and of the augmentation."""

    def __post_init__(self) -> None:
        if self.image.flip != "off":
            raise ConfigError(f"image.flip is {self.image.flip!r}: answers name sides, so it must be off")

    def check(self, how: str) -> None:
        """Raises ConfigError when a folder is missing. `how` names the commands that make them."""
        wanted = [("data.train", self.train), ("data.valid", self.valid)]
        missing = [f"{name} {path}" for name, path in wanted if path is not None and not (path / MANIFEST).is_file()]
        if missing:
            raise ConfigError(f"not there: {', '.join(missing)}\n{how}")


def open_questions(
    data: QuestionConfig, model: Any, answers: Sequence[str], normalize: Callable[[str], str], batch: int
) -> DataLoaders:
    """Open the loaders of a fine-tuning recipe for this rank; `answers` are the columns of the labels.

    Raises ShardError when a folder is damaged, CorpusError when it has no question of the split, SplitError when two
    folders share a patient, ConfigError when the batch does not fit the ranks or the model has no tokenizer.
    """
    from medvl.data.loading.loader import open_loader
    from medvl.data.loading.vqa_source import QuestionSource
    from medvl.train.parallel.distributed import rank_and_world

    if model.tokenizer is None:
        raise ConfigError("the model has no tokenizer: start from a checkpoint that has one, or name a folder of one")
    rank, world = rank_and_world()
    common: dict[str, Any] = {
        "tokenizer": model.tokenizer,
        "text": WholeText(sections=("question",)),
        "seed": data.seed,
        "max_skipped": data.max_skipped,
    }
    shards = ShardSource(data.train)
    source = QuestionSource(shards, data.train_split, answers, normalize)
    train = open_loader(
        source,
        batch=batch,
        train=True,
        image=data.image,
        rank=rank,
        world=world,
        workers=data.workers,
        together=data.together,
        **common,
    )
    described = {
        "data": {"train": describe(shards.manifest)},
        "train_manifest": dataclasses.asdict(shards.manifest),
    }
    if data.valid is None:
        return DataLoaders(train, None, None, described)
    held_out = ShardSource(data.valid)
    if held_out.fingerprint != shards.fingerprint:  # one folder for both is a corpus that splits questions
        check_against(shards.manifest, held_out.manifest)
    described["data"]["valid"] = describe(held_out.manifest)
    questions = QuestionSource(held_out, data.valid_split, answers, normalize)
    common |= {"batch": data.valid_batch, "image": model.transform, "train": False}
    few = min(data.workers, 2)
    loss_loader = open_loader(questions, rank=rank, world=world, workers=few, **common)
    eval_loader = open_loader(questions, workers=few if rank == 0 else 0, **common)
    return DataLoaders(train, loss_loader, eval_loader, described)
