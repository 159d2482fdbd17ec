"""A model, its files and a loader, small enough that a whole training takes a tenth of a second."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from medvl import train as _train  # the package: submodules by name
from medvl.errors import ConfigError
from medvl.losses.common import gather
from medvl.models.checkpoint_folder import read_weights
from medvl.schema import Batch, Losses
from medvl.train import OptimConfig, TrainConfig
from medvl.train.fault_tolerance import checkpoint
from medvl.train.loop.step import Step
from medvl.train.optim.optimizer import Precision, build_optimizer
from medvl.train.parallel.distributed import RankInfo
from medvl.train.parallel.model import DDPModel, ParallelModel

train = _train.train


def one_rank(device: torch.device) -> RankInfo:
    """Return the only rank of a run on a device."""
    return RankInfo(rank=0, size=1, local_size=1, device=device)


ONE_RANK = one_rank(torch.device("cpu"))
SIZE = 6
"""Width and height of the images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowersConfig:
    width: int = 8
    dropout: float = 0.0
    norm: bool = False


class TwoTowers(nn.Module):
    """A contrastive model with a learned temperature; dropout and BatchNorm on demand; negatives
    of all ranks.
    """

    name = "two-towers"

    def __init__(self, config: TwoTowersConfig | None = None, seed: int = 0) -> None:
        super().__init__()
        self.config = config or TwoTowersConfig()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.image = nn.Linear(SIZE * SIZE, self.config.width)
            self.text = nn.Embedding(32, self.config.width)
        self.norm = nn.BatchNorm1d(self.config.width) if self.config.norm else nn.Identity()
        self.dropout = nn.Dropout(self.config.dropout)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: Batch) -> Losses:
        image_BE = self.norm(self.image(batch.image_BCHW.flatten(1).float() / 255))
        text_BE = self.text(batch.ids_BT).mean(dim=1)
        image_NE, text_NE = gather(self.dropout(image_BE)), gather(self.dropout(text_BE))
        logits_NN = self.logit_scale * image_NE @ text_NE.T
        target_N = torch.arange(len(logits_NN), device=logits_NN.device)
        return Losses.sum(
            image_to_text=nn.functional.cross_entropy(logits_NN, target_N),
            text_to_image=nn.functional.cross_entropy(logits_NN.T, target_N),
        )


class Regression(nn.Module):
    """A loss that is a mean over samples, so that accumulation and one big batch must agree."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.linear = nn.Linear(SIZE * SIZE, 1)

    def forward(self, batch: Batch) -> Losses:
        predicted_B = self.linear(batch.image_BCHW.flatten(1).float() / 255)[:, 0]
        return Losses.sum(square=(predicted_B - batch.ids_BT[:, 0] / 32).square().mean())


def make_batch(positions: list[int], epoch: int = 0) -> Batch:
    """Samples by their position; what they hold depends on position and epoch, as with
    augmentation.
    """
    images, ids = [], []
    for position in positions:
        generator = torch.Generator().manual_seed(1000 * epoch + position)
        images.append(
            torch.randint(0, 256, (1, SIZE, SIZE), generator=generator, dtype=torch.uint8)
        )
        ids.append(torch.randint(0, 32, (5,), generator=generator))
    return Batch(
        keys=[f"s{position}" for position in positions],
        image_BCHW=torch.stack(images),
        ids_BT=torch.stack(ids),
        mask_BT=torch.ones(len(positions), 5, dtype=torch.bool),
        labels_BL=torch.zeros(len(positions), 1),
        texts=[""] * len(positions),
    )


class FakeLoader:
    """Minimal loader: global batches of a permutation per epoch, of which each rank gets its
    part.
    """

    def __init__(
        self, samples: int, global_batch: int, rank: int = 0, world: int = 1, data: str = "d0"
    ) -> None:
        self.samples, self.global_batch, self.rank, self.world, self.data = (
            samples,
            global_batch,
            rank,
            world,
            data,
        )
        self.epoch = self.position = 0
        self.handed_out: list[list[str]] = []

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.global_batch

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(
            self.samples, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        local = self.global_batch // self.world
        while self.position < self.steps_per_epoch:
            start = self.position * self.global_batch + self.rank * local
            self.position += 1
            batch = make_batch(order[start : start + local], self.epoch)
            self.handed_out.append(batch.keys)
            yield self.change(batch)
        self.epoch, self.position = self.epoch + 1, 0

    def change(self, batch: Batch) -> Batch:
        """Return the batch; tests override this to change it."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "data": self.data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self.data:
            raise ConfigError("the saved loader position belongs to another fingerprint")
        self.epoch, self.position = state["epoch"], state["position"]


class FakeModelFiles:
    """Replacement of `medvl.models.checkpoint` for any module."""

    def save(
        self, model: nn.Module, folder: Path, run: Mapping[str, Any], *, weights: bool = True
    ) -> None:
        (folder / "config.json").write_text(json.dumps({"format": 2, "run": run}))
        if weights:
            tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            save_file(tensors, folder / "model.safetensors")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.txt").write_text("[PAD]\n")

    def load_weights(self, model: nn.Module, folder: Path) -> None:
        model.load_state_dict(read_weights(folder), strict=True)


def fake_files(files: Callable[[], Any] = FakeModelFiles) -> AbstractContextManager[Any]:
    """Return a context in which checkpoints are written and read by `files`."""
    return mock.patch.object(checkpoint, "model_files", files)


def valid_batches(rank: int = 0, world: int = 1, count: int = 5, size: int = 4) -> list[Batch]:
    """Fixed validation batches, the last one smaller; this rank's share."""
    batches = [
        make_batch(list(range(1000 + i * size, 1000 + (i + 1) * size))) for i in range(count)
    ]
    batches[-1] = make_batch([5000, 5001])
    return batches[rank::world]


def config(run_dir: Path, **changes: Any) -> TrainConfig:
    """A run of two epochs with five batches of four pairs."""
    settings = {
        "epochs": 2,
        "global_batch": 4,
        "log_every": 3,
        "tensorboard": False,
        "num_threads": 1,
        "device": "cpu",
    }
    return TrainConfig(run_dir=run_dir, **{**settings, **changes})


def optim(**changes: Any) -> OptimConfig:
    return OptimConfig(**{"lr": 1e-2, **changes})


def step_of(
    model: nn.Module | ParallelModel,
    config: OptimConfig | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    ranks: RankInfo = ONE_RANK,
    **options: Any,
) -> Step:
    """Return the step of a model as training builds it; the model is moved to the device of its
    ranks.
    """
    parallel = (
        model if isinstance(model, ParallelModel) else DDPModel(model.to(ranks.device), ranks)
    )
    config = config or optim()
    options = {
        "seed": 0,
        "clip_norm": config.clip_norm,
        "clip_value": config.clip_value,
        "channels_last": False,
        **options,
    }
    return Step(
        parallel,
        build_optimizer(parallel.trained, config),
        Precision(precision, ranks.device),
        **options,
    )


def weights(run_dir: Path, name: str = "last") -> dict[str, Tensor]:
    """Return the saved weights of a run."""
    return load_file(run_dir / name / "model.safetensors")


def weights_hash(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "last" / "model.safetensors").read_bytes()).hexdigest()


def records(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without their timing."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("timing", None)
    return [row for row in rows if kind in (None, row["kind"])]
