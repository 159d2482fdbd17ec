"""Losses and gradients of saved CLIP models on two ranks.

torchrun --standalone --nproc-per-node 2 clip_ranks.py FOLDER...
"""

import sys
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
BATCH, RESULTS = "batch.safetensors", "results.safetensors"


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = slice(0, COUNTS[0]) if rank == 0 else slice(COUNTS[0], sum(COUNTS))
    for folder in map(Path, sys.argv[1:]):
        loaded = medvl.load(folder)
        actual = step(loaded, DistributedDataParallel(loaded), whole_batch(folder, mine))
        if rank == 0:
            safetensors.torch.save_file(actual, folder / RESULTS)
