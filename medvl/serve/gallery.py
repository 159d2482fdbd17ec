"""Nearest neighbours of an image among the images of shards, by the embeddings of each model."""

import base64
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from medvl.data.images.codecs import encode_jpeg, resize_short_side
from medvl.data.reports.sentences import join_texts
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, ImageError, ShardError
from medvl.serve.models import ServedModel

_BATCH = 32
_THUMBNAIL = 160
_TEXT = 400


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gallery:
    """Embeddings of the images of shards, by the title of the model."""

    source: ShardSource
    positions: np.ndarray
    """Position of each embedded image in the source."""
    embeddings: tuple[torch.Tensor | None, ...]
    """(N, E) for each model that embeds images, None for others."""

    @classmethod
    def build(cls, shards: Path, models: Sequence[ServedModel], limit: int) -> "Gallery":
        """Embed at most `limit` images, evenly spread over the shards. Images that cannot be read are left out.

        Raises ShardError for damaged shards, ConfigError where no model or no image can be embedded.
        """
        source = ShardSource(shards)
        able = [served.abilities["neighbors"] for served in models]
        if not any(able):
            message = "no checkpoint embeds images alone; give that of a dual-encoder, or leave the gallery out"
            raise ConfigError(message, "unsupported", field="gallery")
        chosen = np.linspace(0, len(source) - 1, min(limit, len(source))).round().astype(int)
        kept: list[int] = []
        parts: list[list[torch.Tensor]] = [[] for _ in models]
        for start in tqdm(range(0, len(chosen), _BATCH), desc="gallery", unit="batch", disable=None):
            images = []
            for position in chosen[start : start + _BATCH].tolist():
                try:
                    images.append(source.pixels(position))
                except (ImageError, ShardError):
                    continue
                kept.append(position)
            for served, embeds, part in zip(models, able, parts, strict=True):
                if embeds and images:
                    part.append(served.embed(images))
        if not kept:
            raise ConfigError(f"{shards} has no image that can be read", "empty", field="gallery")
        embeddings = tuple(torch.cat(part) if part else None for part in parts)
        return cls(source=source, positions=np.array(kept), embeddings=embeddings)

    def __len__(self) -> int:
        return len(self.positions)

    def neighbors(self, model: int, image_1E: torch.Tensor, count: int = 6) -> list[dict[str, Any]]:
        """Return the most similar images with a thumbnail, their labels and the beginning of their text."""
        gallery_NE = self.embeddings[model]
        if gallery_NE is None:
            raise ConfigError("this model does not embed images alone", "unsupported", field="neighbors")
        cosine_N = (gallery_NE @ image_1E.T)[:, 0]
        best = cosine_N.topk(min(count, len(cosine_N)))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [self._card(cosine, int(self.positions[index])) for cosine, index in pairs]

    def _card(self, cosine: float, position: int) -> dict[str, Any]:
        sample, pixels = self.source.sample(position), self.source.pixels(position)
        text = join_texts(sample.sections.values())
        jpeg = encode_jpeg(resize_short_side(pixels, _THUMBNAIL), 85)
        return {
            "cosine": cosine,
            "position": position,
            "labels": [name for name, value in sample.labels.items() if value == 1],
            "view": sample.view,
            "text": text[:_TEXT] + ("…" if len(text) > _TEXT else ""),
            "image": "data:image/jpeg;base64," + base64.b64encode(jpeg).decode(),
        }
