"""Losses and gradients of saved CLIP models on two ranks."""

from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import medvl
from medvl.schema import Batch

COUNTS = (4, 3)
"""Rows of the two ranks."""
BATCH = "batch.safetensors"


def whole_batch(folder: Path, rows: slice = slice(None)) -> Batch:
    """Return the batch of a folder, or some rows of it. One text is missing."""
    parts = {
        name: tensor[rows] for name, tensor in safetensors.torch.load_file(folder / BATCH).items()
    }
    size = len(parts["ids"])
    return Batch(
        keys=[""] * size,
        image_BCHW=parts["image"],
        ids_BT=parts["ids"],
        mask_BT=parts["mask"],
        labels_BL=torch.zeros(size, 0),
        texts=[""] * size,
        has_text_B=parts["has_text"],
    )


def step(model: torch.nn.Module, module: torch.nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return loss and gradients of the model, called as `module`."""
    loss = module(batch).total
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": loss.detach(),
        **{name: gradient for name, gradient in gradients.items() if gradient is not None},
    }


def steps_of_this_rank(folders: list[Path]) -> list[dict[str, Tensor]]:
    """Return loss and gradients of the model of each folder, after DDP's average."""
    mine = slice(0, COUNTS[0]) if dist.get_rank() == 0 else slice(COUNTS[0], sum(COUNTS))
    found = []
    for folder in folders:
        loaded = medvl.load(folder)
        parallel = DistributedDataParallel(loaded)
        found.append(step(loaded, parallel, whole_batch(folder, mine)))
    return found
