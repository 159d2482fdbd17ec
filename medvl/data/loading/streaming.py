"""Remote shards: streamed through webdataset.

A folder is given by its address: `https://host/mimic-cxr/train` or `s3://bucket/mimic-cxr/train` (through the `aws`
command). The manifest is read first; then each rank streams its own shards through a shuffle buffer, in an order
determined by (seed, epoch). The randomness of a sample is that of the local loader: (seed, epoch, key).

Differences from the local loader: the order depends on the numbers of ranks and workers, a sample is seen about once
per epoch instead of exactly once, and resuming within an epoch reads up to the position. Copy the shards to a local
disk where this matters.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from medvl.common.ranks import check_ranks
from medvl.common.untrusted import parse_json
from medvl.data.images.codecs import decode_image
from medvl.data.loading.collate import Collate, Item, ItemMaker, SkipBudget, SkippedSample, Tokenize, init_worker
from medvl.data.loading.loader import check_identity
from medvl.data.loading.worker_errors import TIMEOUT, with_worker_errors
from medvl.data.shards.format import IMAGE_SUFFIXES, MANIFEST, Manifest, sample_from_json
from medvl.data.shards.tar_reader import read_samples
from medvl.data.transforms.image import ImageTransform
from medvl.data.transforms.text import TextPolicy
from medvl.errors import ConfigError, ImageError, ShardError
from medvl.schema import Batch, Inputs

_ADDRESS = re.compile(r"(?:https?|s3)://[A-Za-z0-9._~:/@%+=-]+")
_MAX_MANIFEST_BYTES = 1 << 30


def is_address(text: str) -> bool:
    """Return whether `text` is the address of remote shards rather than a folder."""
    return text.startswith(("https://", "http://", "s3://"))


def open_manifest(address: str) -> Manifest:
    """Read the manifest of a remote folder. Raises ConfigError on a malformed address, ShardError on a failed read."""
    import webdataset

    try:
        with webdataset.gopen(_url(address, MANIFEST)) as stream:
            data = stream.read(_MAX_MANIFEST_BYTES)
        return Manifest.parse(parse_json(data), address)
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}; check the address and your access"
        raise ShardError(f"cannot read {address}/{MANIFEST} ({reason})", "unreadable") from None


def _url(address: str, file: str) -> str:
    """Return the URL for webdataset. It may become part of a command line, so only plain characters are accepted."""
    if not _ADDRESS.fullmatch(address):
        message = f"expected an https:// or s3:// address without special characters, got {address!r}"
        raise ConfigError(message, "malformed", field="address")
    url = f"{address.rstrip('/')}/{file}"
    return f"pipe:aws s3 cp --quiet {url} -" if url.startswith("s3://") else url


class _BatchStream(IterableDataset[tuple[Batch | None, list[SkippedSample]]]):
    """Batches of one worker of one rank. Endless, because the shards of the workers hold unequal numbers of samples."""

    def __init__(
        self,
        urls: list[str],
        maker: ItemMaker,
        tokenizer: Tokenize,
        *,
        local_batch: int,
        rank: int,
        world: int,
        buffer: int,
        color: bool,
    ) -> None:
        self.urls, self.maker, self.collate = urls, maker, Collate(tokenizer, maker.inputs)
        self.local_batch, self.rank, self.world = local_batch, rank, world
        self.buffer, self.color = buffer, color
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[Batch | None, list[SkippedSample]]]:
        items: list[Item | SkippedSample] = []
        for members in self._shuffle(self._read()):
            items.append(self._item(members))
            if len(items) == self.local_batch:
                yield self.collate(items)
                items = []

    def _rng(self, purpose: str) -> np.random.Generator:
        worker = get_worker_info()
        seeds = [self.maker.seed, self.epoch, self.rank, worker.id if worker and purpose == "buffer" else 0]
        return np.random.default_rng(seeds if purpose == "buffer" else seeds[:2])

    def _read(self) -> Iterator[Mapping[str, Any]]:
        """Yield the tar members of each sample in this worker's shards, repeatedly."""
        import webdataset

        worker = get_worker_info()
        part = self.rank * (worker.num_workers if worker else 1) + (worker.id if worker else 0)
        parts = self.world * (worker.num_workers if worker else 1)
        while True:
            # All ranks and workers use the same permutation, so that their parts do not overlap.
            order = self._rng("shards").permutation(len(self.urls))[part::parts]
            for url in (self.urls[number] for number in order):
                try:
                    with webdataset.gopen(url) as stream:
                        yield from read_samples(stream, url)
                except (OSError, ValueError) as error:
                    message = f"{url} broke off ({type(error).__name__}); check the network and your access"
                    raise ShardError(message, "unreadable") from None

    def _shuffle(self, samples: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        rng, buffer = self._rng("buffer"), list[Mapping[str, Any]]()
        for sample in samples:
            if len(buffer) < self.buffer:
                buffer.append(sample)
                continue
            place = int(rng.integers(self.buffer))
            buffer[place], sample = sample, buffer[place]
            yield sample

    def _item(self, members: Mapping[str, Any]) -> Item | SkippedSample:
        key = str(members.get("__key__", "?"))
        try:
            sample = sample_from_json(members["json"])
            data = next((members[suffix] for suffix in IMAGE_SUFFIXES if suffix in members), None)
            if data is None:
                return self.maker.row(sample, self.maker.placeholder(self.color), self.epoch)
            return self.maker(sample, decode_image(data, color=self.color), self.epoch)
        except ImageError as error:
            return SkippedSample(key, error.code)
        except (ValueError, KeyError):
            return SkippedSample(key, "sample_unreadable")


class RemoteLoader:
    """Training batches of remote shards; open one with `open_remote_loader`."""

    def __init__(
        self, stream: _BatchStream, manifest: Manifest, address: str, *, workers: int, max_skipped: float
    ) -> None:
        self.global_batch = stream.local_batch * stream.world
        self.steps_per_epoch = manifest.samples // self.global_batch
        self.manifest = manifest
        self._stream, self._workers = stream, workers
        self._batch = 0
        self._skips = SkipBudget(address, max_skipped, manifest.samples)

    @property
    def epoch(self) -> int:
        """Number of the current epoch."""
        return self._stream.epoch

    @property
    def skipped(self) -> Counter[str]:
        """Number of skipped samples so far, by reason."""
        return self._skips.reasons

    def __iter__(self) -> Iterator[Batch]:
        batches = DataLoader(
            self._stream,
            batch_size=None,
            num_workers=self._workers,
            worker_init_fn=init_worker,
            timeout=TIMEOUT if self._workers else 0,
            pin_memory=torch.cuda.is_available(),
        )
        for number, (batch, skipped) in zip(range(self.steps_per_epoch), with_worker_errors(batches), strict=False):
            if number < self._batch:
                continue
            self._batch = number + 1
            if skipped:
                self._skips.add(skipped)
            if batch is None:
                self._skips.check_empty_batch(skipped)
                continue
            yield batch
        self._stream.epoch += 1
        self._batch = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the data and settings it belongs to; JSON values only."""
        return {"epoch": self.epoch, "batch": self._batch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position; the next iteration reads up to it. Raises ConfigError if it is of another run."""
        check_identity(state, self._identity())
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
    tokenizer: Tokenize,
    seed: int = 0,
    rank: int | None = None,
    world: int | None = None,
    workers: int = 2,
    buffer: int = 2000,
    color: bool = False,
    max_skipped: float = 0.001,
    inputs: Inputs | None = None,
) -> RemoteLoader:
    """Open a training loader over remote shards. Arguments as for `open_loader`; `buffer` samples are shuffled at once.

    Raises:
        ConfigError: the address is malformed, the batch is not divisible by the ranks or larger than the data, or
            there are fewer shards than readers.
        ShardError: the manifest cannot be read.
    """
    rank, world = check_ranks(rank, world, train=True)
    manifest = open_manifest(address)
    wanted = inputs or Inputs()
    missing = {
        "prior_image": wanted.prior_image,
        "other_view": wanted.other_view,
        "regions": wanted.regions,
        "labels": wanted.labels and not manifest.label_names,
    }
    for field in (field for field, is_missing in missing.items() if is_missing):
        raise ConfigError(f"the system needs {field}, which {address} does not have", "unsupported", field=field)
    readers = world * max(1, workers)
    if batch < 1 or batch % world or batch > manifest.samples:
        expected = f"a global batch that is a multiple of {world} ranks and at most {manifest.samples} samples"
        raise ConfigError(f"expected {expected}, got {batch}", "conflict", field="batch")
    if len(manifest.shards) < readers:
        needed = f"{len(manifest.shards)} shards are too few for {readers} readers ({world} ranks)"
        message = f"{address}: {needed}; use fewer workers, or smaller shards (--samples-per-shard)"
        raise ConfigError(message, "conflict", field="workers")
    stream = _BatchStream(
        [_url(address, f"{shard.name}.tar") for shard in manifest.shards],
        ItemMaker(image, text, manifest.label_names, seed, inputs),
        tokenizer,
        local_batch=batch // world,
        rank=rank,
        world=world,
        buffer=min(buffer, manifest.samples // readers // 2 + 1),
        color=color,
    )
    return RemoteLoader(stream, manifest, address, workers=workers, max_skipped=max_skipped)
