"""Checks on two ranks: each writes its result to `FOLDER/NAME-RANK.json`."""

import errno
import gc
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers import train_fakes as fakes
from helpers.two_ranks import on_two_ranks
from medvl import losses
from medvl.errors import TrainingError
from medvl.losses.common import gather, no_gather
from medvl.losses.pairs.blockwise import info_nce, pairwise_sigmoid
from medvl.models.base import evaluating
from medvl.models.dual_encoders.parts.layers import MaskedBatchNorm
from medvl.schema import Batch, Losses
from medvl.train import Cosine, rank_and_world
from medvl.train.loop.state import validation_loss
from medvl.train.optim.optimizer import Precision
from medvl.train.parallel.distributed import RankInfo, join

COUNTS = (3, 5)
"""Rows of the two ranks in the uneven checks."""


def rows(total: int = sum(COUNTS), width: int = 4) -> torch.Tensor:
    return torch.randn(
        total, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def weigh(x_NE: torch.Tensor) -> torch.Tensor:
    """Return a loss in which every row depends on every other."""
    return (x_NE @ x_NE.T).softmax(dim=1).square().sum()


def check_gather(folder: Path) -> Any:
    """Return values and gradients of `gather` on the rank that owns the rows."""
    rank, _ = rank_and_world()
    found: dict[str, Any] = {}
    for name, counts in {"uneven": COUNTS, "even": (4, 4), "empty": (0, 8)}.items():
        mine = rows().split(list(counts))[rank].clone().requires_grad_()
        gathered = gather(mine)
        weigh(gathered).backward()
        assert mine.grad is not None
        found[name] = {"value": gathered.tolist(), "grad": mine.grad.tolist()}
    found["flags"] = gather(torch.tensor([rank == 1] * (rank + 1))).tolist()
    found["numbers"] = gather(torch.tensor([rank + 10])).tolist()
    found["regions"] = list(gather(torch.zeros(2, 3, 4, dtype=torch.bfloat16)).shape)
    with no_gather():
        found["alone"] = list(gather(torch.zeros(rank + 1, 2)).shape)
    try:
        gather(torch.zeros(2, 3 + rank))
    except ValueError as error:
        found["error"] = str(error)
    return found


def check_ddp(folder: Path) -> Any:
    """Return DDP's gradients of a contrastive loss with a learned temperature, from uneven
    batches.
    """
    rank, _ = rank_and_world()
    model = fakes.TwoTowers()
    wrapped = DistributedDataParallel(model)
    everything = list(range(sum(COUNTS)))
    mine = everything[: COUNTS[0]] if rank == 0 else everything[COUNTS[0] :]
    total = wrapped(fakes.make_batch(mine)).total
    total.backward()
    grads = {name: parameter.grad.tolist() for name, parameter in model.named_parameters()}
    return {"loss": total.item(), "grads": grads}


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Unit image and text embeddings of all ranks."""
    image_NE, text_NE = rows(width=16), rows(2 * sum(COUNTS), width=16)[sum(COUNTS) :]
    return nn.functional.normalize(image_NE, dim=1).float(), nn.functional.normalize(
        text_NE, dim=1
    ).float()


STUDIES = torch.tensor([0, 1, 2, 1, 3, 4, 2, 2])
"""Of the pairs of all ranks, some on both."""
WORDS = torch.arange(4) < torch.tensor([4, 1, 2, 3, 0, 4, 2, 1])[:, None]
"""Which of four words each text has."""

SIMILARITY = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))

CONTRASTIVE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "convirt": lambda image_NE, text_NE: losses.convirt(image_NE, text_NE),
    "convirt at 0.01": lambda image_NE, text_NE: losses.convirt(
        image_NE, text_NE, temperature=0.01
    ),
    "clip": lambda image_NE, text_NE: losses.clip(image_NE, text_NE, 14.3),
    "clip at 0.01": lambda image_NE, text_NE: losses.clip(image_NE, text_NE, 100.0),
    "siglip": lambda image_NE, text_NE: losses.siglip(image_NE, text_NE, 10.0, -10.0),
    "siglip at 0.01": lambda image_NE, text_NE: losses.siglip(image_NE, text_NE, 100.0, -10.0),
    "convirt with shared positives": lambda image_NE, text_NE: losses.convirt(
        image_NE, text_NE, groups=[STUDIES]
    ),
    "clip in blocks": lambda image_NE, text_NE: info_nce(
        14.3 * image_NE, text_NE, 0.5, [STUDIES], block_rows=3
    ),
    "siglip in blocks": lambda image_NE, text_NE: pairwise_sigmoid(
        10 * image_NE, text_NE, -10.0, block_rows=3
    ),
    "itc": lambda image_NE, text_NE: losses.itc(
        image_NE,
        text_NE,
        image_NE.detach(),
        text_NE.detach(),
        0.1,
        0.4,
        STUDIES[:, None] == STUDIES,
    ),
    "gloria": lambda image_NE, text_NE: torch.stack(
        losses.gloria_local(image_NE.unflatten(1, (4, 4)), text_NE.unflatten(1, (4, 4)), WORDS)
    ).sum(),
    "soft targets": lambda image_NE, text_NE: losses.soft_targets(
        image_NE, text_NE[:7], SIMILARITY[:, :7], 14.3
    ),
}


def normed(x_BE: torch.Tensor, mask_BN: torch.Tensor) -> torch.Tensor:
    """Return a loss of words after a synchronised batch norm, plus the running statistics."""
    norm = MaskedBatchNorm(4, synchronize=True)
    loss = losses.local_uniformity(norm(x_BE.unflatten(1, (4, 4)), mask_BN), mask_BN)
    return loss + torch.stack(list(norm.buffers())[:2]).square().sum()


def judge() -> nn.Module:
    """Return a discriminator of images and texts, the same on every rank."""
    layer = nn.Linear(16, 1)
    layer.weight.data.copy_(torch.linspace(-1, 1, 16))
    layer.bias.data.fill_(0.1)
    return layer


OWN_ROWS: dict[str, Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]] = {
    "within sample": lambda image_BE, text_BE, rows: losses.within_sample_nce(
        *(part_BE.unflatten(1, (4, 4)) for part_BE in (image_BE, text_BE)),
        WORDS[rows],
        SIMILARITY[rows, :4].exp(),
    ),
    "alignment": lambda image_BE, text_BE, rows: losses.local_alignment(
        *(part_BE.unflatten(1, (4, 4)) for part_BE in (image_BE, text_BE)), WORDS[rows]
    ),
    "uniformity": lambda image_BE, text_BE, rows: (
        losses.local_uniformity(image_BE.unflatten(1, (4, 4)), WORDS[rows])
        + losses.local_uniformity(text_BE.unflatten(1, (4, 4)), WORDS[rows])
    ),
    "prototypes": lambda image_BE, text_BE, rows: losses.prototype_swap(
        image_BE, text_BE, SIMILARITY.repeat(1, 2) / 4
    ),
    "Donsker-Varadhan": lambda image_BE, text_BE, rows: losses.dv_bound(
        (image_BE * text_BE).sum(dim=1),
        image_BE @ SIMILARITY.repeat(1, 2).T,
        STUDIES[rows, None] != STUDIES,
    ),
    "Donsker-Varadhan, negatives of one rank": lambda image_BE, text_BE, rows: losses.dv_bound(
        (image_BE * text_BE).sum(dim=1),
        text_BE,
        (torch.arange(8)[rows] < 2)[:, None].expand_as(text_BE),
    ),
    "InfoNCE bound": lambda image_BE, text_BE, rows: losses.info_nce_bound(
        (image_BE * text_BE).sum(dim=1),
        image_BE @ SIMILARITY.repeat(1, 2).T,
        STUDIES[rows, None] != STUDIES,
    ),
    "modality confusion": lambda image_BE, text_BE, rows: losses.modality_confusion(
        judge(), image_BE, text_BE
    ),
    "batch norm": lambda image_BE, text_BE, rows: (
        normed(image_BE, WORDS[rows]) + normed(text_BE, WORDS[rows])
    ),
}
"""Losses that take the rows of this rank, of the given numbers among all."""


def check_losses(folder: Path) -> Any:
    """Return each loss over the pairs of both ranks, and its gradients at this rank's pairs."""
    rank, _ = rank_and_world()
    mine = (slice(0, COUNTS[0]), slice(COUNTS[0], sum(COUNTS)))[rank]
    found = {}
    for name in (*CONTRASTIVE, *OWN_ROWS):
        image_BE, text_BE = (part[mine].clone().requires_grad_() for part in pairs())
        if name in OWN_ROWS:
            value = OWN_ROWS[name](image_BE, text_BE, mine)
        else:
            value = CONTRASTIVE[name](gather(image_BE), gather(text_BE))
        value.backward()
        assert image_BE.grad is not None
        assert text_BE.grad is not None
        found[name] = {
            "value": value.item(),
            "image": image_BE.grad.tolist(),
            "text": text_BE.grad.tolist(),
        }
    return found


def training(folder: Path, loader: fakes.FakeLoader | None = None, **changes: Any) -> Any:
    """Train ten steps with accumulation and validation on all ranks."""
    rank, world = rank_and_world()
    model = changes.pop("model", None) or fakes.TwoTowers(
        fakes.TwoTowersConfig(norm=changes.pop("norm", False))
    )
    settings = {"global_batch": 8, "accumulate": 2, "validate_every": 2, **changes}
    evals = settings.pop("evals", ())
    return fakes.train(
        model,
        loader or fakes.FakeLoader(20, 4, rank, world),
        optim=fakes.optim(schedule=Cosine(), clip_norm=1.0),
        config=fakes.config(folder, **settings),
        valid_loader=fakes.valid_batches(rank, world),
        evals=evals,
    )


def check_train(folder: Path) -> Any:
    rank, world = rank_and_world()
    loader = fakes.FakeLoader(20, 4, rank, world)
    called: list[int] = []

    def evaluator(model: nn.Module) -> dict[str, float]:
        called.append(rank)
        assert not isinstance(model, DistributedDataParallel)
        return {"score": float(model(fakes.make_batch([0, 1])).total)}

    result = training(folder / "train", loader, evals=[evaluator])
    return {
        "step": result.step,
        "called": len(called),
        "metrics": dict(result.metrics),
        "keys": loader.handed_out,
    }


def check_nan(folder: Path) -> Any:
    """Train with an infinite loss (and a finite gradient) on one rank in one step, which all
    ranks must skip.
    """
    rank, _ = rank_and_world()

    class InfiniteLoss(fakes.TwoTowers):
        calls = 0

        def forward(self, batch: Batch) -> Losses:
            found = super().forward(batch)
            self.calls += self.training
            bad = rank == 1 and self.training and self.calls == 5
            return Losses(total=found.total + torch.inf if bad else found.total, terms=found.terms)

    model = InfiniteLoss()
    result = training(folder / "nan", model=model)
    return {"skipped": result.skipped, "weights": model.image.weight.tolist()}


def check_disk(folder: Path) -> Any:
    """Train while rank 0's disk is full for some of the saves."""
    saves = [0]

    class Full(fakes.FakeModelFiles):
        def save(self, *arguments: Any, **options: Any) -> None:
            saves[0] += 1
            if saves[0] in (2, 3):
                raise OSError(errno.ENOSPC, "No space left on device")
            super().save(*arguments, **options)

    with fakes.fake_files(Full):
        result = training(folder / "disk", log_every=1)
    return {"step": result.step, "failures": result.save_failures, "saves": saves[0]}


def check_disagree(folder: Path) -> Any:
    try:
        training(folder / "disagree", seed=rank_and_world()[0])
    except TrainingError as error:
        return str(error)
    return None


def check_lock(folder: Path) -> Any:
    """Return the error of each rank when another process holds the lock."""
    from medvl.common.files import _locked_here

    path = (folder / "lock").resolve() / ".lock"
    _locked_here.add(path)
    try:
        training(folder / "lock")
    except TrainingError as error:
        return str(error)
    finally:
        _locked_here.discard(path)
    return None


def check_validate(folder: Path) -> Any:
    """Return the validation loss of a new model, from this rank's share of the batches."""
    with join("cpu") as ranks:
        return validate(ranks)


def validate(ranks: RankInfo) -> dict[str, float]:
    model = fakes.TwoTowers()
    with evaluating(model):
        return validation_loss(
            model,
            fakes.valid_batches(ranks.rank, ranks.size),
            ranks=ranks,
            precision=Precision("fp32", ranks.device),
            seed=0,
            place=lambda batch: batch,
        )


def check_resume(folder: Path) -> Any:
    return training(folder / "resume", norm=True, epochs=4).step


def check_more_ranks(folder: Path) -> Any:
    """Resume the run of one rank; return its warnings."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("medvl")
    logger.addHandler(handler)
    try:
        result = training(folder / "one", epochs=4)
    finally:
        logger.removeHandler(handler)
    return {"step": result.step, "warnings": lines}


def check_whole(folder: Path) -> Any:
    return training(folder / "whole", norm=True, epochs=4).step


def check_threads(folder: Path) -> Any:
    """Return how many threads this process has after each of three runs in its own process group
    (Linux).
    """
    counts = []
    for number in range(3):
        training(folder / f"threads-{number}", epochs=1)
        counts.append(len(list(Path("/proc/self/task").glob("*"))))
    return counts


def check_signal(folder: Path) -> Any:
    """Send SIGTERM to rank 1 only, within a step; both ranks must stop after the same step with
    status 0.
    """
    rank, world = rank_and_world()

    class SignalledLoader(fakes.FakeLoader):
        def change(self, batch: Batch) -> Batch:
            if rank == 1 and (self.epoch, self.position) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            return batch

    def leave() -> None:
        """DDP that is freed after its group can wait forever."""
        wrapped = [each for each in gc.get_objects() if isinstance(each, DistributedDataParallel)]
        assert not wrapped, "DDP exists when the process group is destroyed"
        destroy()

    destroy = dist.destroy_process_group
    with mock.patch.object(dist, "destroy_process_group", leave):
        training(folder / "resume", SignalledLoader(20, 4, rank, world), norm=True, epochs=4)
    raise AssertionError("train returned after SIGTERM")


def check_error(folder: Path) -> Any:
    """Raise an error within DDP on both ranks; return how many modules its traceback keeps, and
    that have a reducer.
    """
    kept: list[int] = []

    class Failing(fakes.TwoTowers):
        def forward(self, batch: Batch) -> Losses:
            raise ValueError("no losses")

    def leave() -> None:
        wrapped = [each for each in gc.get_objects() if isinstance(each, DistributedDataParallel)]
        kept.extend([len(wrapped), sum(hasattr(each, "reducer") for each in wrapped)])
        destroy()

    destroy = dist.destroy_process_group
    with mock.patch.object(dist, "destroy_process_group", leave):
        try:
            training(folder / "error", model=Failing())
        except ValueError:
            return kept
    raise AssertionError("train returned in spite of an error")


CHECKS: dict[str, Callable[[Path], Any]] = {
    name.removeprefix("check_"): function
    for name, function in globals().items()
    if name.startswith("check_")
}


def run_checks(folder: Path, *names: str) -> None:
    """Run some of `CHECKS` on two ranks. In "signal" and "error", training joins the ranks."""
    on_two_ranks(_run_here, folder, names, group=names not in (("signal",), ("error",)))


def _run_here(folder: Path, names: tuple[str, ...]) -> None:
    with fakes.fake_files():
        for check in names:
            found = json.dumps(CHECKS[check](folder))
            (folder / f"{check}-{rank_and_world()[0]}.json").write_text(found)
