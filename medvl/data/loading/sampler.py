"""Batch samplers: which samples form each batch of this rank, from any position on.

The order of an epoch is one permutation of all samples, determined by (seed, epoch). Global batch b
of an epoch is the b-th slice of it, so neither the number of ranks nor that of workers changes the
content of a global batch.
"""

import abc
import copy
from collections.abc import Iterator, Sequence

import numpy as np

from medvl.data.loading.sources import ConcatSource, Source


class BatchSampler(abc.ABC):
    """Positions of the samples of each batch. `epoch` and `batch` are the current position and
    can be set.
    """

    together = 1

    def __init__(self, count: int, global_batch: int, seed: int, rank: int, world: int) -> None:
        self.count = count
        self.global_batch = global_batch
        self.seed = seed
        self.rank = rank
        self.world = world
        self.epoch = 0
        self.batch = 0

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of batches per epoch on this rank."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield (epoch, position) of each sample of each batch, starting at `self.batch` of
        `self.epoch`.
        """


class TrainSampler(BatchSampler):
    """Shuffled full global batches, divided evenly among the ranks. The remainder of an epoch is
    dropped.

    Args:
        images_N: number of each sample's image; samples of one image follow one another in groups
            of `together`. None: no grouping.
        together: size of these groups.
    """

    def __init__(
        self,
        count: int,
        global_batch: int,
        seed: int,
        rank: int,
        world: int,
        *,
        images_N: np.ndarray | None = None,
        together: int = 1,
    ) -> None:
        super().__init__(count, global_batch, seed, rank, world)
        self.images_N = images_N
        self.together = together

    def order(self, epoch: int) -> np.ndarray:
        """Return the positions of all samples in the order of an epoch."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        order_N = generator.permutation(self.count)
        return (
            order_N
            if self.images_N is None
            else _group_by_image(order_N, self.images_N, self.together)
        )

    def __len__(self) -> int:
        return self.count // self.global_batch

    def passes(self, epoch: int) -> np.ndarray:
        """Return (N, 2) int64: the epoch and the position of each sample of an epoch, in order."""
        order_N = self.order(epoch)
        return np.stack([np.full_like(order_N, epoch), order_N], axis=1)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        passes_N2 = self.passes(self.epoch)
        local = self.global_batch // self.world
        for batch in range(self.batch, len(self)):
            start = batch * self.global_batch + self.rank * local
            yield [
                (number, position) for number, position in passes_N2[start : start + local].tolist()
            ]


class MixedSampler(TrainSampler):
    """Shuffled global batches of a source whose parts are drawn in stated shares.

    An epoch has as many draws as the source has samples. A part is passed through again and again,
    over epochs too, each time in another order, so that all its samples are drawn equally often, up
    to one. The draws of an epoch are determined by (seed, epoch); each comes with the number of its
    pass in place of the epoch, so that a sample which is drawn twice in an epoch is augmented in
    two ways.

    Args:
        counts: samples of each part; the parts follow one another.
        weights: share of each part, of any sum.
    """

    def __init__(
        self,
        counts: Sequence[int],
        weights: Sequence[float],
        global_batch: int,
        seed: int,
        rank: int,
        world: int,
    ) -> None:
        super().__init__(sum(counts), global_batch, seed, rank, world)
        self.counts = tuple(counts)
        ends = np.rint(np.cumsum(weights) / np.sum(weights) * self.count).astype(int)
        self.draws = np.diff(ends, prepend=0).tolist()

    def passes(self, epoch: int) -> np.ndarray:
        """Return (N, 2) int64: the number of the pass and the position of each draw of an epoch,
        in order.
        """
        parts = []
        start = 0
        for part, (count, draws) in enumerate(zip(self.counts, self.draws, strict=True)):
            draw_N = np.arange(epoch * draws, (epoch + 1) * draws)
            for number in np.unique(draw_N // count).tolist():
                sequence = np.random.SeedSequence([self.seed, part, number, 1])
                order_N = np.random.Generator(np.random.PCG64(sequence)).permutation(count)
                place_K = draw_N[draw_N // count == number] % count
                parts.append(
                    np.stack([np.full(len(place_K), number), start + order_N[place_K]], axis=1)
                )
            start += count
        return np.concatenate(parts)[self.order(epoch)]


class EvalSampler(BatchSampler):
    """Every sample once, in order. Ranks take whole batches in turn, so a batch's content does
    not depend on them.
    """

    def __len__(self) -> int:
        batches = -(-self.count // self.global_batch)
        return len(range(self.rank, batches, self.world))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for start in range(
            self.rank * self.global_batch, self.count, self.world * self.global_batch
        ):
            yield [
                (0, position)
                for position in range(start, min(start + self.global_batch, self.count))
            ]


def batch_sampler(
    source: Source, batch: int, seed: int, rank: int, world: int, *, train: bool, together: int = 1
) -> BatchSampler:
    """Return the batches of this rank: in training shuffled, in stated shares where the source
    has any.
    """
    if not train:
        return EvalSampler(len(source), batch, seed, rank, world)
    if isinstance(source, ConcatSource) and source.weights is not None:
        return MixedSampler(source.counts, source.weights, batch, seed, rank, world)
    image_keys: Sequence[str] | None = getattr(source, "image_keys", None)
    images_N = np.unique(np.array(image_keys), return_inverse=True)[1] if together > 1 else None
    return TrainSampler(len(source), batch, seed, rank, world, images_N=images_N, together=together)


class AllEpochs:
    """Batches of the current epoch of a sampler and of all later ones.

    It moves a copy of the sampler, whose own position counts the batches that were yielded.
    """

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        sampler = copy.copy(self._sampler)
        while len(sampler):
            yield from sampler
            sampler.epoch += 1
            sampler.batch = 0


def _group_by_image(order_N: np.ndarray, images_N: np.ndarray, together: int) -> np.ndarray:
    """Reorder `order_N` so that each sample is followed by up to `together` - 1 later samples of
    the same image.
    """
    images_N = images_N[order_N]
    by_image_N = np.argsort(images_N, kind="stable")
    _, start, count = np.unique(images_N[by_image_N], return_index=True, return_counts=True)
    nth_N = np.empty(len(order_N), int)
    nth_N[by_image_N] = np.arange(len(order_N)) - np.repeat(start, count)
    group_N = images_N * (count.max() // together + 1) + nth_N // together
    _, first, group_N = np.unique(group_N, return_index=True, return_inverse=True)
    return order_N[np.argsort(first[group_N], kind="stable")]
