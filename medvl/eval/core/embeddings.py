"""Embeddings of batches of images and of any number of texts."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from medvl.errors import EvaluationError
from medvl.eval.core.interfaces import Model
from medvl.schema import Batch, Embeddings

_TEXT_BATCH = 256


def encode_batch(model: Model, batch: Batch, device: torch.device, autocast: torch.dtype | None) -> Embeddings:
    """Return the embeddings of a batch of images on `device`; `autocast` applies to the encoder only."""
    image_BCHW = batch.image_BCHW.to(device, non_blocking=True)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        return model.embed_images(image_BCHW)


def embed_texts(
    model: Model, texts: Sequence[str], embed: Callable[[Sequence[str]], Embeddings] | None = None
) -> Embeddings:
    """Return the embeddings of any number of texts, encoded in chunks by `embed`, by default the model's own.

    Raises EvaluationError where there is no text.
    """
    if not texts:
        raise EvaluationError("expected at least one text, got none", "empty", field="texts")
    embed = embed or model.embed_texts
    return concatenate([embed(texts[start : start + _TEXT_BATCH]) for start in range(0, len(texts), _TEXT_BATCH)])


def concatenate(parts: Sequence[Embeddings]) -> Embeddings:
    """Concatenate embeddings; local features are padded to the longest, with mask False."""
    global_NE = torch.cat([part.global_NE for part in parts])
    locals_ = [part.local_NPE for part in parts if part.local_NPE is not None]
    if not locals_:
        return Embeddings(global_NE)
    longest = max(local_NPE.shape[1] for local_NPE in locals_)
    local_NPE = torch.cat([F.pad(local, (0, 0, 0, longest - local.shape[1])) for local in locals_])
    masks = [
        torch.ones(local.shape[:2], dtype=torch.bool, device=local.device) if part.mask_NP is None else part.mask_NP
        for part, local in zip(parts, locals_, strict=True)
    ]
    mask_NP = torch.cat([F.pad(mask, (0, longest - mask.shape[1])) for mask in masks])
    return Embeddings(global_NE, local_NPE, mask_NP)
