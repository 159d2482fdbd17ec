"""A small GLoRIA and its data, and what two ranks compute."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import medvl
from medvl.data.loading.items import PHRASE_CELLS
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.losses.common import gather_padded
from medvl.models.dual_encoders.gloria import GLoRIA
from medvl.schema import Batch

TEXTS = [
    "There is a small left effusion.",
    "No pneumothorax.",
    "The heart is mildly enlarged and the lungs are clear.",
]
RAGGED = [*TEXTS, "Bibasilar atelectasis, unchanged: no new consolidation.", "", "effusion"]
PHRASES = [["left pneumothorax", "Edema"], [], [], ["a large effusion"], ["Edema"], [], ["heart"]]
"""Of each pair: two on rank 0, three on rank 1."""
FIRST_RANK = 3
"""Pairs of rank 0; the other has the rest."""


def tiny_tokenizer() -> Tokenizer:
    """Return a tokenizer with so small a vocabulary that words are split."""
    return train_wordpiece(TEXTS, vocab_size=45, min_frequency=1)


def tiny_model(tokenizer: Tokenizer | str | None, **settings: Any) -> GLoRIA:
    """Return a small model: 64 pixels, stretched to 96, and 6 x 6 regions."""
    torch.manual_seed(0)
    towers = {"image_encoder": "resnet_tiny", "text_encoder": "tiny_bert", "projection_dim": 24}
    sizes = {"image_size": 64, "margin": 0, "encoder_size": 96}
    model = medvl.create_model("gloria", tokenizer=tokenizer, **{**towers, **sizes, **settings})
    assert isinstance(model, GLoRIA)
    return model


def make_batch(tokenizer: Tokenizer | None, rows: list[int] | None = None) -> Batch:
    """Return seven pairs or some of them; a pair does not depend on the others."""
    assert tokenizer is not None
    rows = list(range(7)) if rows is None else rows
    texts = [([*RAGGED, "A left pneumothorax is large."][row] or "Clear.") for row in rows]
    ids_BT, mask_BT = tokenizer(texts)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (7, 1, 64, 64), dtype=torch.uint8, generator=generator)
    cover = torch.zeros(7, 2, PHRASE_CELLS, PHRASE_CELLS, dtype=torch.uint8)
    for row, phrases in enumerate(PHRASES):
        for place in range(len(phrases) - row // 6):  # the last phrase has no box
            cover[row, place, 2 * row : 2 * row + 9, 20 - 3 * row :] = 255
    return Batch(
        keys=[str(row) for row in rows],
        image_BCHW=pixels[rows],
        ids_BT=ids_BT,
        mask_BT=mask_BT,
        labels_BL=torch.zeros(len(rows), 0),
        texts=texts,
        phrases=[PHRASES[row] for row in rows],
        phrase_cover_BSHW=cover[rows],
    )


def sequences() -> tuple[Tensor, Tensor]:
    """Return seven sequences of different lengths, the longest on rank 1, padded with zeros."""
    mask_BT = torch.arange(6) < torch.tensor([2, 4, 0, 6, 1, 3, 3])[:, None]
    x_BTE = torch.randn(7, 6, 5, generator=torch.Generator().manual_seed(2))
    return x_BTE * mask_BT[:, :, None], mask_BT


def losses_and_gradients(folder: Path) -> dict[str, Tensor]:
    """Return losses and gradients of a model in eval mode, after DDP's average, and the gathered
    sequences.
    """
    rank = dist.get_rank()
    mine = slice(0, FIRST_RANK) if rank == 0 else slice(FIRST_RANK, 7)
    model = medvl.load(folder)
    parallel = DistributedDataParallel(model)  # by name: its hooks must outlive the forward pass
    actual = parallel(make_batch(model.tokenizer, list(range(7))[mine]))
    actual.total.backward()
    tensors = {
        f"loss/{name}": term.detach()
        for name, term in {"total": actual.total, **actual.terms}.items()
    }
    tensors |= {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    x_BTE, mask_BT = sequences()
    longest = int(mask_BT[mine].sum(dim=1).max())
    garbage_BTE = x_BTE.masked_fill(~mask_BT[:, :, None], torch.nan)[mine, :longest]
    tensors["padded"], tensors["mask"] = gather_padded(garbage_BTE, mask_BT[mine, :longest])
    return tensors
