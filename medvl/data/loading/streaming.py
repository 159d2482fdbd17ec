"""Shards that are not on this machine: streamed through webdataset.

A folder is named by its address: `https://host/mimic-cxr/train` or `s3://bucket/mimic-cxr/train` (through the `aws`
command). Its manifest is read first; then each rank streams shards of its own, in an order decided by (seed, epoch),
through a shuffle buffer. Randomness of a sample is that of the local loader: (seed, epoch, key).

What streaming cannot do as the local loader does: the order depends on the number of ranks and workers, a sample is
seen about once an epoch and not exactly once, and a position inside an epoch is gone back to by reading up to it.
Copy the shards to a local disk where that matters.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from medvl.data.images.codecs import decode_image
from medvl.data.loading.collate import Collate, Failure, Item, ItemMaker, SkipCount, start_worker
from medvl.data.loading.worker_errors import TIMEOUT, watched
from medvl.data.shards.format import IMAGE_SUFFIXES, MANIFEST, Manifest, sample_from_json
from medvl.data.shards.tar_reader import samples
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import ImageTransform
from medvl.data.transforms.text import TextPolicy
from medvl.errors import ConfigError, ImageError, ShardError
from medvl.schema import Batch

_ADDRESS = re.compile(r"(?:https?|s3)://[A-Za-z0-9._~:/@%+=-]+")
_MAX_MANIFEST_BYTES = 1 << 30


def is_address(text: str) -> bool:
    """Whether `text` names remote shards and no folder."""
    return text.startswith(("https://", "http://", "s3://"))


def open_manifest(address: str) -> Manifest:
    """The manifest of a remote folder. Raises ConfigError on an odd address, ShardError when it cannot be read."""
    import webdataset

    try:
        with webdataset.gopen(_url(address, MANIFEST)) as stream:
            data = stream.read(_MAX_MANIFEST_BYTES)
        return Manifest.parse(json.loads(data), address)
    except (OSError, ValueError) as error:
        raise ShardError(
            f"{address}/{MANIFEST} cannot be read ({type(error).__name__}): check address and access"
        ) from None


def _url(address: str, file: str) -> str:
    """What webdataset opens. Addresses go into a command line, so nothing but plain characters is let through."""
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(f"{address!r} is no plain https:// or s3:// address")
    url = f"{address.rstrip('/')}/{file}"
    return f"pipe:aws s3 cp --quiet {url} -" if url.startswith("s3://") else url


class _Stream(IterableDataset[tuple[Batch | None, list[Failure]]]):
    """Batches of one worker of one rank: endless, because shards divide unevenly and batches must not."""

    def __init__(
        self,
        urls: list[str],
        maker: ItemMaker,
        tokenizer: Tokenizer,
        *,
        local_batch: int,
        rank: int,
        world: int,
        buffer: int,
        color: bool,
    ) -> None:
        self.urls, self.maker, self.collate = urls, maker, Collate(tokenizer)
        self.local_batch, self.rank, self.world = local_batch, rank, world
        self.buffer, self.color = buffer, color
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[Batch | None, list[Failure]]]:
        items: list[Item | Failure] = []
        for raw in self._shuffled(self._raw()):
            items.append(self._item(raw))
            if len(items) == self.local_batch:
                yield self.collate(items)
                items = []

    def _rng(self, purpose: str) -> np.random.Generator:
        worker = get_worker_info()
        seeds = [self.maker.seed, self.epoch, self.rank, worker.id if worker and purpose == "buffer" else 0]
        return np.random.default_rng(seeds if purpose == "buffer" else seeds[:2])

    def _raw(self) -> Iterator[Mapping[str, Any]]:
        """Members of this worker's shards, by sample, again and again."""
        import webdataset

        worker = get_worker_info()
        part = self.rank * (worker.num_workers if worker else 1) + (worker.id if worker else 0)
        parts = self.world * (worker.num_workers if worker else 1)
        while True:
            # All ranks and workers shuffle alike, so that their parts do not overlap.
            order = self._rng("shards").permutation(len(self.urls))[part::parts]
            for url in (self.urls[number] for number in order):
                try:
                    with webdataset.gopen(url) as stream:
                        yield from samples(stream, url)
                except (OSError, ValueError) as error:
                    raise ShardError(f"{url} broke off ({type(error).__name__}): check network and access") from None

    def _shuffled(self, samples: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        rng, kept = self._rng("buffer"), list[Mapping[str, Any]]()
        for sample in samples:
            if len(kept) < self.buffer:
                kept.append(sample)
                continue
            place = int(rng.integers(self.buffer))
            kept[place], sample = sample, kept[place]
            yield sample

    def _item(self, raw: Mapping[str, Any]) -> Item | Failure:
        key = str(raw.get("__key__", "?"))
        try:
            sample = sample_from_json(raw["json"])
            data = next(raw[suffix] for suffix in IMAGE_SUFFIXES if suffix in raw)
            return self.maker(sample, decode_image(data, color=self.color), self.epoch)
        except ImageError as error:
            return Failure(key, error.code)
        except (ValueError, KeyError, StopIteration):
            return Failure(key, "sample_unreadable")


class RemoteLoader:
    """Training batches of remote shards; what `medvl.train.train` takes."""

    def __init__(self, stream: _Stream, manifest: Manifest, address: str, *, workers: int, max_skipped: float) -> None:
        self.global_batch = stream.local_batch * stream.world
        self.steps_per_epoch = manifest.samples // self.global_batch
        self.manifest = manifest
        self._stream, self._workers = stream, workers
        self._batch = 0
        budget = max_skipped if max_skipped >= 1 else max_skipped * manifest.samples
        self._skips = SkipCount(address, int(budget))

    @property
    def epoch(self) -> int:
        """Number of the epoch that iterating would continue."""
        return self._stream.epoch

    @property
    def skipped(self) -> Counter[str]:
        """Samples that could not be read so far, by reason."""
        return self._skips.reasons

    def __iter__(self) -> Iterator[Batch]:
        batches = DataLoader(
            self._stream,
            batch_size=None,
            num_workers=self._workers,
            worker_init_fn=start_worker,
            timeout=TIMEOUT if self._workers else 0,
            pin_memory=torch.cuda.is_available(),
        )
        for number, (batch, failures) in zip(range(self.steps_per_epoch), watched(batches), strict=False):
            if number < self._batch:
                continue
            self._batch = number + 1
            if failures:
                self._skips.add(failures)
            if batch is None:
                raise self._skips.empty_batch(failures)
            yield batch
        self._stream.epoch += 1
        self._batch = 0

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches handed out, and what they are a position of; JSON values."""
        return {"epoch": self.epoch, "batch": self._batch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position: the next iteration reads up to it. Raises ConfigError when it was that of another run."""
        differing = [name for name, value in self._identity().items() if state.get(name) != value]
        if differing:
            raise ConfigError(f"the loader's position was saved with another {', '.join(differing)}")
        self._stream.epoch, self._batch = int(state["epoch"]), int(state["batch"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._stream.maker.seed,
            "global_batch": self.global_batch,
            "fingerprint": self.manifest.fingerprint,
            "ranks": self._stream.world,
            "workers": self._workers,
        }


def open_remote_loader(
    address: str,
    *,
    batch: int,
    image: ImageTransform,
    text: TextPolicy,
    tokenizer: Tokenizer,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    workers: int = 2,
    buffer: int = 2000,
    color: bool = False,
    max_skipped: float = 0.001,
) -> RemoteLoader:
    """A training loader over remote shards; arguments as for `open_loader`, `buffer` samples being held for shuffling.

    Raises ConfigError when the address is odd, the batch does not divide by the ranks or exceeds the data, or there
    are fewer shards than readers; ShardError when the manifest cannot be read.
    """
    manifest = open_manifest(address)
    readers = world * max(1, workers)
    if batch < 1 or batch % world or batch > manifest.samples:
        raise ConfigError(f"a global batch of {batch} does not go with {world} ranks and {manifest.samples} samples")
    if len(manifest.shards) < readers:
        raise ConfigError(
            f"{address} has {len(manifest.shards)} shards for {readers} readers ({world} ranks of {max(1, workers)} "
            "workers): take fewer workers, or make the shards smaller (--samples-per-shard)"
        )
    stream = _Stream(
        [_url(address, f"{shard.name}.tar") for shard in manifest.shards],
        ItemMaker(image, text, manifest.label_names, seed),
        tokenizer,
        local_batch=batch // world,
        rank=rank,
        world=world,
        buffer=min(buffer, manifest.samples // readers // 2 + 1),
        color=color,
    )
    return RemoteLoader(stream, manifest, address, workers=workers, max_skipped=max_skipped)
