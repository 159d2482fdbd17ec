"""`medvl fit-pixelhop`: PixelHop++ fitted to the images of shards."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from medvl.data.loading.subset import Subset
    from medvl.data.shards.source import ShardSource
    from medvl.data.transforms.image import EvalTransform


def fit_pixelhop(
    data: Path,
    out: Path,
    *,
    images: int = 2000,
    image_size: int = 224,
    fit: Literal["crop", "pad", "squash"] = "crop",
    units: int = 3,
    window: int = 5,
    cutoff: float = 1e-3,
    discard: float = 1e-4,
    tokens: int = 15,
    token_dim: int = 64,
    cells: int = 16,
    batch: int = 16,
    workers: int = 2,
) -> str:
    """Fit PixelHop++ to the images of training shards: an image encoder without gradients, for BERTHop.

    Reads the images once for each unit and once for the tokens; memory does not depend on their number.

    Args:
        data: folder of shards, of training patients only.
        out: new folder of the encoder: create_image_encoder("pixelhop", pretrained=OUT).
        images: images to fit to, a random choice; 0 takes all.
        image_size: side of the images in pixels.
        fit: method that makes an image square.
        units: PixelHop++ units, with maximum pooling between them.
        window: side of the windows in pixels.
        cutoff: share of the energy above which a node is transformed further.
        discard: share of the energy below which a node is dropped.
        tokens: visual tokens, the nodes with the highest energy.
        token_dim: numbers of a token, principal components.
        cells: side of the grid to which the map of a node is averaged.
        batch: images at once.
        workers: loader processes.
    """
    from medvl.data.shards.source import ShardSource
    from medvl.data.transforms.image import EvalTransform
    from medvl.encoders.image.pixelhop_fit import PixelHopSettings, fit_pixelhop as fit_encoder, save_pixelhop

    settings = PixelHopSettings(
        units=units,
        window=window,
        cutoff=cutoff,
        discard=discard,
        tokens=tokens,
        token_dim=token_dim,
        cells=cells,
        image_size=image_size,
    )
    source = ShardSource(data)
    chosen = choose_images(source, images)
    passes = functools.partial(_read, chosen, EvalTransform(size=image_size, fit=fit), batch, workers)
    encoder = fit_encoder(passes, settings)
    described = {"shards": source.fingerprint, "images": len(chosen), "settings": dataclasses.asdict(settings)}
    save_pixelhop(encoder, out, described)
    nodes, further = encoder.config["nodes"], encoder.config["intermediate"]
    of_units = ", ".join(f"{count} ({kept})" for count, kept in zip(nodes, further, strict=True))
    return f"Fitted {tokens} tokens to {len(chosen)} images of {data}; nodes (transformed further): {of_units}"


def _read(images: "Subset", transform: "EvalTransform", batch: int, workers: int) -> "Iterator[Tensor]":
    from medvl.eval.core.open import open_for_evaluation

    return (part.image_BCHW for part in open_for_evaluation(images, transform, batch=batch, workers=workers))


def choose_images(source: "ShardSource", count: int) -> "Subset":
    """Return a random choice of images in the order of the shards; 0 takes all."""
    import numpy as np

    from medvl.data.loading.subset import Subset

    return Subset(source, np.sort(np.random.default_rng(0).permutation(len(source))[: count or len(source)]))
