"""Complete passes over a loader, and the identity of what an evaluation read."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from medvl.common.ranks import exchange_bytes
from medvl.data.loading.sources import check_real
from medvl.errors import EvaluationError, ShardError, SplitError
from medvl.eval.core.results import checkpoint_sha256
from medvl.schema import Batch, Embeddings, Sample

# Protocols of the models, loaders and sources that evaluators accept.


class SupportsSimilarity(Protocol):
    """A model with a similarity of images and texts."""

    def similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return similarity_NM without temperature: the cosine, or a similarity with a local
        term.
        """


class Model(SupportsSimilarity, Protocol):
    """A dual-encoder."""

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Return embeddings of pixels for `similarity`."""

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Return embeddings of texts for `similarity`."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Same as `torch.nn.Module.parameters`."""

    def modules(self) -> Iterator[torch.nn.Module]:
        """Same as `torch.nn.Module.modules`."""


class Source(Protocol):
    """Random access to the samples behind a loader."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the label columns."""

    @property
    def fingerprint(self) -> str | None:
        """Hash of the content of the source; None if unknown."""

    def __len__(self) -> int: ...

    def sample(self, position: int) -> Sample:
        """Return the sample at a position, from 0."""

    def pixels(self, position: int) -> NDArray[np.uint8]:
        """Return the decoded image (H, W) or (H, W, C) at a position."""


class Loader(Protocol):
    """Loader of every readable sample of `source` exactly once."""

    @property
    def source(self) -> Source:
        """Source of the samples."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """Counts of unreadable samples by reason since the loader was opened."""

    def __iter__(self) -> Iterator[Batch]: ...


Values = Mapping[str, Tensor | list[str]]
"""Values that an evaluation computes from a batch: tensors and texts, by name."""


class FullPass:
    """Pass over the batches of a loader; checks that every sample of the source comes exactly once.

    Iterating reads a loader of one rank. `compute` also reads loaders of several ranks, which take
    whole batches in turn: a batch has the same samples on any number of ranks, so the values are
    the same.

    Raises SplitError where images of the source are synthetic, unless `synthetic` allows them: a
    probe may be trained on synthetic images, but no test set may be synthetic. After the last batch
    both raise `EvaluationError` if a sample came twice, was neither yielded nor skipped, or if
    there was no sample at all.

    Attributes:
        keys: keys of all samples yielded, in the order of the loader.
        unreadable: counts of samples that the loader skipped, by reason; with `keys` they cover the
            whole source.
    """

    def __init__(self, loader: Loader, *, synthetic: bool = False) -> None:
        if not synthetic:
            check_real(loader.source)
        self._loader = loader
        ranks: tuple[int, int] = getattr(loader, "ranks", (0, 1))
        self._rank, self._world = ranks
        self.keys: list[str] = []
        self.unreadable: dict[str, int] = {}

    def __iter__(self) -> Iterator[Batch]:
        if self._world > 1:
            message = "this evaluation cannot be divided among ranks; start it on one process"
            raise EvaluationError(message, "unsupported", field="ranks")
        before = Counter(self._loader.skipped)
        for batch in self._loader:
            self.keys += batch.keys
            yield batch
        self.unreadable = dict(Counter(self._loader.skipped) - before)
        self._check(len(self._loader.source))

    def compute(self, function: Callable[[Batch], Values]) -> list[Values]:
        """Return the values of every batch, in the order of the loader, on all ranks; tensors are
        on the CPU.

        Collective call where the loader is one of several ranks.
        """
        if self._world == 1:
            return [_on_cpu(function(batch)) for batch in self]
        loader: Any = self._loader  # `medvl.data.Loader` has more than the interface
        before = Counter(self._loader.skipped)
        own = []
        for batch in loader:
            number = loader.last_batch * self._world + self._rank
            own.append(_pack(number, batch.keys, _on_cpu(function(batch))))
        skipped = Counter(self._loader.skipped) - before
        counts = [
            json.loads(data) for data in exchange_bytes(json.dumps([len(own), skipped]).encode())
        ]
        self.unreadable = dict(sum((Counter(reasons) for _, reasons in counts), Counter[str]()))
        gathered = {}
        for turn in range(max(batches for batches, _ in counts)):  # a batch of each rank at a time
            for data in exchange_bytes(own[turn] if turn < len(own) else b""):
                if data:
                    number, keys, values = _unpack(data)
                    gathered[number] = keys, values
        for number in sorted(gathered):
            self.keys += gathered[number][0]
        self._check(len(self._loader.source))
        return [gathered[number][1] for number in sorted(gathered)]

    def _check(self, expected: int) -> None:
        yielded = len(self.keys)
        skipped = sum(self.unreadable.values())
        duplicates = yielded - len(set(self.keys))
        if duplicates:
            message = (
                f"expected every image once, got {duplicates} more than once; open the "
                f"loader with train=False"
            )
            raise EvaluationError(message, "mismatch")
        if yielded + skipped != expected:
            message = (
                f"expected {expected} images, got {yielded} and {skipped} skipped; use "
                f"train=False and one rank"
            )
            raise EvaluationError(message, "mismatch")
        if not yielded:
            raise EvaluationError("expected images to evaluate, got none", "empty")


def column(parts: Iterable[Values], name: str) -> Tensor:
    """Return the tensor of this name over all batches."""
    return torch.cat([value for part in parts if isinstance(value := part[name], Tensor)])


def _on_cpu(values: Values) -> Values:
    return {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()
    }


def _pack(number: int, keys: Sequence[str], values: Values) -> bytes:
    """Return the values of a batch as the bytes of safetensors, with keys and texts in their
    header.
    """
    tensors = {
        name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)
    }
    texts = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    return safetensors.torch.save(tensors, {"batch": json.dumps([number, list(keys), texts])})


def _unpack(data: bytes) -> tuple[int, list[str], Values]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    number, keys, texts = json.loads(header["__metadata__"]["batch"])
    return number, keys, {**safetensors.torch.load(data), **texts}


def samples_by_key(source: Source) -> dict[str, tuple[int, Sample]]:
    """Return position and sample by key, without samples that cannot be read (the loader counts
    them).
    """
    samples = {}
    for position in range(len(source)):
        try:
            sample = source.sample(position)
        except ShardError:
            continue
        samples[sample.key] = (position, sample)
    return samples


def check_disjoint_patients(valid: Iterable[str], test: Iterable[str]) -> None:
    """Raise SplitError if a patient of the validation images is also in the test images."""
    shared = len({*valid} & {*test})
    if shared:
        message = (
            f"{shared} patients are in both validation and test; use splits that are "
            f"disjoint by patient"
        )
        raise SplitError(message, "leak")


def input_hashes(checkpoint: str | Path | None, **loaders: Loader | None) -> dict[str, str | None]:
    """Return the hashes of the checkpoint and, by name, of the source of each loader, for
    `Results.inputs`.

    Missing inputs are None. Raises `EvaluationError` if the checkpoint does not exist.
    """
    return {
        "checkpoint": None if checkpoint is None else checkpoint_sha256(checkpoint),
        **{
            name: None if loader is None else loader.source.fingerprint
            for name, loader in loaders.items()
        },
    }


def slices_of(loader: Loader) -> dict[str, int]:
    """Return the entry for `Results.config` of stacks of slices; nothing for images."""
    slices: int | None = getattr(loader, "slices", None)
    return {"slices": slices} if slices is not None and slices > 1 else {}


# Embeddings of batches of images and of any number of texts.

_TEXT_BATCH = 256


def encode_batch(
    model: Model, batch: Batch, device: torch.device, autocast: torch.dtype | None
) -> Embeddings:
    """Return the embeddings of a batch of images, volumes or stacks of slices on `device`;
    `autocast` applies to the encoder only.

    Slices of a volume are images: their vectors are averaged, and their local vectors are those of
    the volume.
    """
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        if batch.slices_BNCHW is not None:
            slices_BNCHW = batch.slices_BNCHW.to(device, non_blocking=True)
            embedded = model.embed_images(slices_BNCHW.flatten(0, 1))
            return _pool_slices(embedded, slices_BNCHW.shape[1])
        images = [each.to(device, non_blocking=True) for each in batch.embedded]
        return model.embed_images(*images)


def _pool_slices(embedded: Embeddings, slices: int) -> Embeddings:
    """Return the embeddings of volumes of so many slices each."""
    if embedded.weight_NP is not None or embedded.pair_N is not None:
        message = "this model's embeddings cannot be averaged over slices; use a model of volumes"
        raise EvaluationError(message, "unsupported", field="checkpoint")
    vectors_NSE = embedded.global_NE.float().unflatten(0, (-1, slices))
    mean_NE = vectors_NSE.mean(dim=1)
    ones = torch.ones((), device=mean_NE.device)
    if torch.allclose(vectors_NSE.norm(dim=2), ones, atol=1e-2):
        mean_NE = F.normalize(mean_NE, dim=1)
    local, mask = embedded.local_NPE, embedded.mask_NP
    return Embeddings(
        mean_NE,
        None if local is None else local.unflatten(0, (-1, slices)).flatten(1, 2),
        None if mask is None else mask.unflatten(0, (-1, slices)).flatten(1, 2),
    )


def embed_texts(
    model: Model, texts: Sequence[str], embed: Callable[[Sequence[str]], Embeddings] | None = None
) -> Embeddings:
    """Return the embeddings of any number of texts, encoded in chunks by `embed`, by default the
    model's own.

    Raises EvaluationError if there is no text.
    """
    if not texts:
        raise EvaluationError("expected at least one text, got none", "empty", field="texts")
    embed = embed or model.embed_texts
    return concatenate(
        [embed(texts[start : start + _TEXT_BATCH]) for start in range(0, len(texts), _TEXT_BATCH)]
    )


def concatenate(parts: Sequence[Embeddings]) -> Embeddings:
    """Concatenate embeddings; local features are padded to the longest, with mask False."""
    global_NE = torch.cat([part.global_NE for part in parts])
    locals_ = [part.local_NPE for part in parts if part.local_NPE is not None]
    if not locals_:
        return Embeddings(global_NE)
    longest = max(local_NPE.shape[1] for local_NPE in locals_)
    local_NPE = torch.cat([F.pad(local, (0, 0, 0, longest - local.shape[1])) for local in locals_])
    masks = [
        torch.ones(local.shape[:2], dtype=torch.bool, device=local.device)
        if part.mask_NP is None
        else part.mask_NP
        for part, local in zip(parts, locals_, strict=True)
    ]
    mask_NP = torch.cat([F.pad(mask, (0, longest - mask.shape[1])) for mask in masks])
    return Embeddings(global_NE, local_NPE, mask_NP)
