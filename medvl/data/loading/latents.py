"""Loader of latents and text states that frozen networks computed once, in place of images and
texts.

    CACHE/moments.npy  float16 (N, 2Z, H, W): mean and log variance of each image's latents
    CACHE/texts.npy    int32 (N,): the row of each image's text in the next files CACHE/ids.npy
    int32 (U, T), and lengths.npy, int32 (U,): the tokens of each distinct text CACHE/states.npy
    float16 (U, T, D): states of a frozen text encoder; missing where it is trained CACHE/keys.json
    keys of the images

Files are memory-mapped, so a cache may be larger than memory.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from medvl.common.ranks import check_ranks
from medvl.data.loading.items import SkippedSample
from medvl.data.loading.loader import Loader, check_settings
from medvl.data.loading.sampler import batch_sampler
from medvl.errors import ShardError
from medvl.schema import Batch

FILES = ("moments", "texts", "ids", "lengths", "states")


@dataclasses.dataclass(kw_only=True, slots=True)
class LatentBatch(Batch):
    """A batch with latents in place of pixels: `image_BCHW` is empty."""

    moments_BCHW: Tensor | None = None
    """float32: mean and log variance of the latents, before scaling."""
    states_BTD: Tensor | None = None
    """float32 states of a frozen text encoder; None where it is trained."""


class LatentCache:
    """A folder of latents, memory-mapped; it takes the place of a loader's source.

    Attributes:
        fingerprint: name of the folder, a hash of what it was computed from.
    """

    label_names: Sequence[str] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fingerprint = folder.name
        try:
            self.keys: list[str] = json.loads((folder / "keys.json").read_text())
            self.arrays: dict[str, Any] = {
                name: np.load(folder / f"{name}.npy", mmap_mode="r")
                for name in FILES
                if name != "states" or (folder / "states.npy").is_file()
            }
        except (OSError, ValueError) as error:
            message = (
                f"{folder} is not a complete cache of latents ({type(error).__name__}); remove it"
            )
            raise ShardError(message, "malformed") from error

    def __len__(self) -> int:
        return len(self.keys)

    def batch(self, positions: Sequence[int]) -> LatentBatch:
        """Return the batch of these images."""
        texts = self.arrays["texts"][positions]
        lengths = torch.from_numpy(self.arrays["lengths"][texts].astype(np.int64))
        longest = int(lengths.max())
        states = self.arrays.get("states")
        return LatentBatch(
            keys=[self.keys[position] for position in positions],
            image_BCHW=torch.empty(len(positions), 0, 0, 0, dtype=torch.uint8),
            ids_BT=torch.from_numpy(self.arrays["ids"][texts, :longest].astype(np.int64)),
            mask_BT=torch.arange(longest) < lengths[:, None],
            labels_BL=torch.empty(len(positions), 0),
            texts=[""] * len(positions),
            moments_BCHW=torch.from_numpy(self.arrays["moments"][positions].astype(np.float32)),
            states_BTD=None
            if states is None
            else torch.from_numpy(states[texts, :longest].astype(np.float32)),
        )

    def collate(self, positions: Sequence[int]) -> tuple[LatentBatch, list[SkippedSample]]:
        """Return the batch of these images; none is skipped."""
        return self.batch(positions), []


class _Positions(Dataset[int]):
    """Positions of a cache, indexed by (epoch, position)."""

    def __getitem__(self, place: tuple[int, int]) -> int:
        return place[1]


def open_latent_loader(
    cache: LatentCache,
    *,
    batch: int,
    train: bool,
    seed: int = 0,
    rank: int | None = None,
    world: int | None = None,
) -> Loader:
    """Open a loader of latents with the order and resuming of `open_loader`; arguments and
    errors as there.
    """
    rank, world = check_ranks(rank, world, train=train)
    check_settings(len(cache), batch, train, world, 0)
    source: Any = cache
    sampler = batch_sampler(source, batch, seed, rank, world, train=train)
    dataset: Any = _Positions()
    return Loader(source, sampler, dataset, cache.collate, workers=0, max_skipped=0, timeout=0)
