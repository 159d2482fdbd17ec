"""Losses and gradients of contrastive systems on two ranks, where both, one or none have a complete
pair.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from helpers.contrastive_systems import SYSTEMS, make_batch
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.schema import Embeddings

FIRST, SECOND = slice(0, 4), slice(4, 7)
"""Rows of the two ranks."""


def sample_pairs(rows: slice) -> Pairs:
    """Return some of seven pairs with words of unequal lengths and a third side of three rows a
    pair, of all parts.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(7)[rows]
    mask_BW = torch.arange(5) < (numbers[:, None] % 4 + 1)
    words_BWE = torch.randn(7, 5, 3, generator=generator)[rows] * mask_BW[:, :, None]
    longest = int(mask_BW.sum(dim=1).max()) if len(numbers) else 0
    third_NE = torch.randn(21, 3, generator=generator).unflatten(0, (7, 3))[rows].flatten(0, 1)
    return Pairs(
        images=Embeddings(
            torch.randn(7, 3, generator=generator)[rows],
            torch.randn(7, 4, 3, generator=generator)[rows],
        ),
        texts=Embeddings(
            torch.randn(7, 3, generator=generator)[rows],
            words_BWE[:, :longest],
            mask_BW[:, :longest],
            words_BWE[:, :longest, 0],
        ),
        others={
            "sentences": Embeddings(
                third_NE, pair_N=torch.arange(len(numbers)).repeat_interleave(3)
            )
        },
        groups=(numbers // 2,),
        labels_BL=numbers[:, None].float(),
    )


def flat(pairs: Pairs) -> dict[str, Tensor]:
    """Return all tensors of some pairs by name."""
    tensors = {f"group{number}": group_B for number, group_B in enumerate(pairs.groups)}
    for name, side in pairs.sides.items():
        fields = {field.name: getattr(side, field.name) for field in dataclasses.fields(side)}
        tensors |= {
            f"{name}.{field}": tensor for field, tensor in fields.items() if tensor is not None
        }
    return tensors if pairs.labels_BL is None else {**tensors, "labels": pairs.labels_BL}


def losses_and_gradients() -> dict[str, Tensor]:
    """Return the losses and gradients of every system in all cases, after DDP's average, and
    gathered pairs.
    """
    rank = dist.get_rank()
    results = {
        f"pairs/{name}": tensor
        for name, tensor in flat(sample_pairs((FIRST, SECOND)[rank]).gather()).items()
    }
    for name, create in SYSTEMS.items():
        model = create().eval()
        parallel = DistributedDataParallel(model)
        for case in ("both", "one", "none"):
            model.zero_grad(set_to_none=True)
            batch = make_batch(name, (FIRST, SECOND)[rank])
            if case == "none" or (case == "one" and rank == 1):
                batch = dataclasses.replace(
                    batch, has_text_B=torch.zeros(len(batch), dtype=torch.bool)
                )
            losses = parallel(batch)
            losses.total.backward()
            results |= {
                f"{name}/{case}/{key}": p.grad
                for key, p in model.named_parameters()
                if p.grad is not None
            }
            results |= {
                f"{name}/{case}/loss/{key}": term.detach() for key, term in losses.terms.items()
            }
            results[f"{name}/{case}/loss"] = losses.total.detach()
    return {name: tensor.clone() for name, tensor in results.items()}
