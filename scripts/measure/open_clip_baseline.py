"""open_clip's model under its own trainer, and in a plain training loop: peers of
`lines/clip.py`.
"""

import argparse
import csv
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

# Internals on purpose: both contenders run with the same device and precision code.
from medvl.train.optim.optimizer import Precision
from medvl.train.parallel.distributed import RankInfo

SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "embed_dim": 128,
        "vision_cfg": {
            "image_size": 112,
            "patch_size": 16,
            "width": 192,
            "layers": 4,
            "head_width": 64,
        },
        "text_cfg": {
            "context_length": 77,
            "vocab_size": 49408,
            "width": 192,
            "layers": 3,
            "heads": 3,
        },
    },
    "tiny": {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 32,
            "patch_size": 16,
            "width": 16,
            "layers": 1,
            "head_width": 16,
        },
        "text_cfg": {
            "context_length": 77,
            "vocab_size": 49408,
            "width": 16,
            "layers": 1,
            "heads": 1,
        },
    },
}
"""Configurations, with open_clip's names, of a small CLIP for two cores and one for dry runs."""
LR, WEIGHT_DECAY = 1e-5, 0.2


def model_sizes(model: str) -> dict[str, Any]:
    """Return the configuration of an open_clip model, or one of `SIZES`."""
    import open_clip

    return SIZES[model] if model in SIZES else open_clip.get_model_config(model)


class OpenClip:
    """open_clip's model with its own trainer and with a plain training step."""

    def __init__(
        self, options: argparse.Namespace, world: RankInfo, *, fused: bool = False
    ) -> None:
        import open_clip

        sizes = model_sizes(options.model)
        self.model: nn.Module = open_clip.CLIP(**sizes, output_dict=True).to(world.device)
        self.compiled: Any = torch.compile(self.model) if options.compile else self.model
        self.loss, self.world = open_clip.ClipLoss(), world
        self.train_one_epoch = import_module("open_clip_train.train").train_one_epoch
        no_decay = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        weights = [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]
        groups = [
            {"params": no_decay, "weight_decay": 0.0},
            {"params": weights, "weight_decay": WEIGHT_DECAY},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=LR, betas=(0.9, 0.98), eps=1e-6, fused=fused or None
        )
        self.arguments = SimpleNamespace(
            device=str(world.device),
            precision="amp_bf16" if options.precision == "bf16" else "fp32", distill=False,
            accum_freq=1, skip_scheduler=False, horovod=False, grad_clip_norm=None,
            log_every_n_steps=100, rank=0, local_rank=0, log_local=False, world_size=1,
            batch_size=options.batch, wandb=False,
        )  # fmt: skip
        self.autocast = Precision(options.precision, world.device).autocast

    def trainer(
        self, batches: Iterable[tuple[Tensor, Tensor]], steps: int, mark: Callable[[], None]
    ) -> None:
        """Run `open_clip_train.train.train_one_epoch`; call `mark` before each step and after
        the last one.
        """
        loader = SizedLoader(batches, steps, self.arguments.batch_size)
        data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
        self.train_one_epoch(
            self.compiled,
            data,
            self.loss,
            0,
            self.optimizer,
            None,
            lambda step: mark(),
            None,
            self.arguments,
            tb_writer=None,
        )
        mark()

    def plain(self, images_BCHW: Tensor, ids_BT: Tensor) -> float:
        """Run a training step as in tutorials."""
        device = self.world.device
        return self.bare(images_BCHW.to(device), ids_BT.to(device)).item()

    def bare(self, images_BCHW: Tensor, ids_BT: Tensor) -> Tensor:
        """Run a training step on inputs that are on the device, without waiting for it; return
        the loss.
        """
        self.optimizer.zero_grad()
        with self.autocast():
            loss: Tensor = self.loss(**self.compiled(images_BCHW, ids_BT))
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class SizedLoader:
    """Loader with the attributes that open_clip's trainer needs."""

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor]], steps: int, batch: int) -> None:
        self.batches, self.num_batches, self.num_samples = batches, steps, steps * batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _, batch in zip(range(self.num_batches), self.batches, strict=False):
            yield batch


class PairsOfFiles(Dataset[tuple[Tensor, Tensor]]):
    """Common dataset: a CSV, Pillow and torchvision."""

    def __init__(
        self, table: Path, transform: Callable[[Any], Tensor], tokenize: Callable[[str], Tensor]
    ) -> None:
        with table.open(newline="") as file:
            self.rows = list(csv.DictReader(file, delimiter="\t"))
        self.transform, self.tokenize = transform, tokenize

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        row = self.rows[index]
        return self.transform(Image.open(row["filepath"]).convert("RGB")), self.tokenize(
            row["title"]
        )[0]
