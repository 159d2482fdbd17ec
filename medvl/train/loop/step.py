"""One update of the weights, and the preparation of a model for training."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.compilation import round_up
from medvl.common.seeding import derive, reseed
from medvl.encoders import TextEncoder, checkpoint_activations
from medvl.encoders.base import Encoder
from medvl.errors import ConfigError
from medvl.models.base import System
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.schema import Batch, Inputs, Losses
from medvl.train.config import TrainConfig
from medvl.train.fault_tolerance.guards import BufferGuard, LossSpikeDetector, propagate_nonfinite
from medvl.train.optim.optimizer import Precision, set_lr, trainable
from medvl.train.parallel.distributed import RankInfo, average_gradients, place
from medvl.train.parallel.model import DDPModel, FSDPModel, ParallelModel

if TYPE_CHECKING:
    from medvl.train.rewards.task import RewardTask

_log = logging.getLogger(__name__)

# Large contrastive batches in the memory of small ones (GradCache: Gao et al., arXiv 2101.06983,
# section 3.2).
#
#     encode every part, without a graph     embeddings of the complete batch
#     loss over all of them, backward        a gradient for every embedding and the temperature
#     encode every part again, with a graph  backward from its embeddings' gradients
#
# The gradient equals that of the complete batch up to the order of sums. A part draws the same
# random numbers (dropout) both times. Batch norm is the exception: it uses the statistics of a
# part, as under any other splitting of a batch.


class GradCache:
    """Forward and backward pass of a batch in parts.

    The gradients are those of this rank, before averaging
    (`medvl.train.parallel.distributed.average_gradients`).

    Args:
        model: a contrastive dual-encoder, whose loss depends on the embeddings of a batch only.
        part: maximum number of pairs encoded at a time.
        precision: as for the step.

    Raises ConfigError for any other model.
    """

    def __init__(self, model: nn.Module, part: int, precision: Precision) -> None:
        if not (isinstance(model, DualEncoder) and model.compares_pairs):
            raise ConfigError(
                "grad_cache needs a contrastive dual-encoder, whose loss depends on the embeddings "
                "only (ConVIRT, CLIP, GLoRIA, ...), got "
                f"{getattr(model, 'name', type(model).__name__)}; leave it unset",
                "unsupported",
                field="grad_cache",
            )
        self._model = model
        self._part = part
        self._precision = precision
        self._buffers = BufferGuard(model)

    def __call__(self, batch: Batch, count: int, seed_part: Callable[[int], None]) -> Losses:
        """Add the gradient of the total loss divided by `count` to the parameters; return the
        losses.

        `seed_part` seeds the generators for a part, given its number.
        """
        parts = list(_split(batch, self._part))
        with torch.no_grad():
            self._buffers.save()
            encoded = [self._encode(part, number, seed_part) for number, part in enumerate(parts)]
            # so that running statistics are updated by the second pass only
            self._buffers.restore()
        leaves = [[tensor.requires_grad_() for tensor in pairs.tensors()] for pairs in encoded]
        with self._precision.autocast():
            losses = self._model.pair_losses(Pairs.cat(encoded))
        self._precision.backward(propagate_nonfinite(losses.total) / count)
        for number, (part, leaves_of_part) in enumerate(zip(parts, leaves, strict=True)):
            embeddings = self._encode(part, number, seed_part).tensors()
            # Embeddings of a frozen encoder have no graph, and a level of weight 0 has no gradient.
            pairs = [
                (embedding, leaf.grad)
                for embedding, leaf in zip(embeddings, leaves_of_part, strict=True)
                if embedding.requires_grad and leaf.grad is not None
            ]
            torch.autograd.backward(
                [embedding for embedding, _ in pairs], [gradient for _, gradient in pairs]
            )
        return losses

    def _encode(self, part: Batch, number: int, seed_part: Callable[[int], None]) -> Pairs:
        seed_part(number)
        with self._precision.autocast():
            return self._model.encode_pairs(part)


def _split(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield the rows of a batch in as few and as even parts as possible, so that batch norms
    have rows enough.
    """
    columns = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    parts = -(-len(batch) // size)
    for number in range(parts):
        rows = slice(number * len(batch) // parts, (number + 1) * len(batch) // parts)
        part: dict[str, Any] = {
            name: None if column is None else column[rows] for name, column in columns.items()
        }
        yield Batch(**part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of an update. Tensors stay on the device: the step waits for the finite check only."""

    losses: list[Losses]
    """Detached losses of each micro-batch."""
    grad_norm: Tensor
    """Norm before clipping, over all ranks."""
    keys: list[list[str]]
    """Sample keys of each micro-batch of this rank."""
    updated: bool
    """Whether the weights were updated: not after a non-finite loss or gradient, or a loss
    spike.
    """
    spike: bool = False
    """Whether the loss was finite, but far above the losses before it."""
    scale_search: bool = False
    """Whether the update was skipped because fp16's loss scale was too large, which the data did
    not cause.
    """

    @property
    def pairs(self) -> int:
        """Pairs of this rank."""
        return sum(map(len, self.keys))

    def nonfinite_keys(self) -> list[str]:
        """Return the keys of this rank's micro-batches whose loss was not finite."""
        pairs = zip(self.keys, self.losses, strict=True)
        return [key for keys, losses in pairs if not bool(losses.total.isfinite()) for key in keys]


class Step:
    """Forward pass, backward pass, finite check and update.

    Args:
        model: the model on its ranks.
        optimizer, precision: see `medvl.train.optim`.
        seed: seed of everything random in the steps.
        clip_norm, clip_value, channels_last, grad_cache: as in `OptimConfig` and `TrainConfig`.
        spikes: detector of loss spikes; None accepts every finite loss.
        rewards: training on rewards, in place of the model's loss.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        *,
        seed: int,
        clip_norm: float | None,
        channels_last: bool,
        clip_value: float | None = None,
        grad_cache: int | None = None,
        spikes: LossSpikeDetector | None = None,
        rewards: "RewardTask | None" = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.precision = precision
        self._spikes = spikes
        self._rewards = rewards
        self._seed = seed
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self._channels_last = channels_last
        self._parameters = trainable(optimizer)
        self._cache = (
            None if grad_cache is None else GradCache(model.trained, grad_cache, precision)
        )
        self._longest = longest_text(model.trained) if model.compiled else None
        self._buffers = BufferGuard(model.trained)

    def __call__(self, step: int, lr: float, batches: Iterable[Batch], count: int) -> StepResult:
        """Make update number `step` with the rate `lr` from `count` micro-batches, whose losses are
        averaged.

        After a loss or gradient that is not finite, on any rank and in any micro-batch, and after a
        loss spike, the weights, optimiser and buffers stay as they were. All ranks take the same
        decision, because they take it from the gradient after its reduction and from the mean of
        all losses.
        """
        self._buffers.save()
        self.model.before_step(step)
        losses = []
        keys = []
        for micro, batch in enumerate(self._with_counts(step, batches, count)):
            self.model.check(batch)
            losses.append(self._accumulate(step, micro, batch, count))
            keys.append(batch.keys)
        # a gradient cache has many backward passes, and DDP would average after the first
        if self._cache is not None:
            average_gradients(self._parameters, self.model.ranks)
        self.precision.unscale(self.optimizer)
        grad_norm = self.model.clip(self._parameters, self._clip_norm, self._clip_value)
        set_lr(self.optimizer, lr)
        device_decides = self._device_decides()
        finite = self._update_first(grad_norm) if device_decides else bool(grad_norm.isfinite())
        spike = finite and self._spikes is not None and self._spikes.observe(self._mean(losses))
        updated = finite and not spike
        scale_search = False
        if updated:
            if not device_decides:
                self.precision.step(self.optimizer)
            self.model.after_step(step)
        else:
            nonfinite_loss = not all(bool(loss.total.isfinite()) for loss in losses)
            # after a spike too: gradients are unscaled once a step
            searching = self.precision.skip_step()
            scale_search = searching and not spike and not self.model.ranks.any(nonfinite_loss)
            self._buffers.restore()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(
            losses=losses,
            grad_norm=grad_norm,
            keys=keys,
            updated=updated,
            spike=spike,
            scale_search=scale_search,
        )

    def _device_decides(self) -> bool:
        """Return whether the update itself is left out on the device after a non-finite norm: as
        Adam's fused one.
        """
        fused = (
            isinstance(self.optimizer, torch.optim.Adam) and self.optimizer.param_groups[0]["fused"]
        )
        by_host = (
            self._spikes is not None or self.precision.scaler.is_enabled() or self.model.sharded
        )
        return bool(fused) and not by_host

    def _update_first(self, grad_norm: Tensor) -> bool:
        """Queue the update, which leaves the weights as they are unless the norm is finite, then
        wait for the norm.

        The device computes the update while the host goes on to the next step. Returns whether the
        norm is finite.
        """
        is_finite = on_host = grad_norm.isfinite()
        norm_is_known = None
        if is_finite.is_cuda:
            on_host = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(
                is_finite, non_blocking=True
            )
            norm_is_known = torch.cuda.Event()
            norm_is_known.record()
        optimizer: Any = self.optimizer
        # torch's GradScaler sets it to make an optimiser skip a step
        optimizer.found_inf = (~is_finite).float()
        optimizer.step()
        del optimizer.found_inf
        if norm_is_known is not None:
            norm_is_known.synchronize()  # the step's only wait for the device
        return bool(on_host)

    def _with_counts(self, step: int, batches: Iterable[Batch], count: int) -> Iterable[Batch]:
        """Give each batch the mean counts of all micro-batches and ranks, where the model's losses
        are sums over them; and sampled texts, in training on rewards.

        A loss divided by its mean count is, averaged over micro-batches and ranks, the mean over
        all elements, however unevenly they are divided. Such an update's batches are held at once.
        """
        model = self.model.trained
        if not isinstance(model, System) or type(model).loss_counts is System.loss_counts:
            return batches
        on_device = [self.place(batch) for batch in batches]
        if self._rewards is None:
            counts = [
                counts_K
                for batch in on_device
                if (counts_K := model.loss_counts(batch)) is not None
            ]
        else:
            with self.precision.autocast():
                pairs = [self._rewards.sample(batch, step) for batch in on_device]
            on_device = [batch for batch, _ in pairs]
            counts = [counts_K for _, counts_K in pairs]
        sum_K = self.model.ranks.sum(torch.stack(counts).sum(dim=0))
        if self._rewards is not None:
            *_, tokens, seconds = sum_K.tolist()
            self._rewards.spend(tokens, seconds / self.model.ranks.size)
        mean_K = sum_K / (count * self.model.ranks.size)
        return [dataclasses.replace(batch, mean_counts_K=mean_K) for batch in on_device]

    def place(self, batch: Batch) -> Batch:
        """Return the batch on this rank's device, in the model's memory format.

        From the first batch on in which rows share an image or lack one, cuDNN does not benchmark
        its algorithms for each number of images, which takes seconds; `machine_settings` restores
        this. Nor are CUDA graphs recorded for each number. Texts of a compiled model are padded to
        few lengths.
        """
        if not (
            batch.image_of_B is None and batch.has_image_B is None and batch.has_text_B is None
        ):
            torch.backends.cudnn.benchmark = False
            if self.model.compiled == "graphs":
                compile_model(self.model, "rows of a batch share an image, or lack one or a text")
        batch = place(batch, self.model.ranks.device, self._channels_last)
        return batch if self._longest is None else pad_texts(batch, self._longest)

    def _accumulate(self, step: int, micro: int, batch: Batch, count: int) -> Losses:
        """Add the gradients of a micro-batch; return its detached losses."""
        seed = functools.partial(self._reseed, step, micro, self.model.ranks.rank)
        if self._cache is not None:
            loss = self._cache(self.place(batch), count, seed)
        else:
            seed()
            if self.model.compiled == "graphs":
                torch.compiler.cudagraph_mark_step_begin()
            # gradients are reduced in the last micro-batch only
            with self.model.reduction(on=micro == count - 1):
                with self.precision.autocast():
                    loss = self.model.forward(
                        self.place(batch), None if self._rewards is None else self._rewards.losses
                    )
                self.precision.backward(propagate_nonfinite(loss.total) / count)
        # As copies: the next step of a CUDA graph overwrites its results.
        terms = {name: term.detach().clone() for name, term in loss.terms.items()}
        return Losses(total=loss.total.detach().clone(), terms=terms)

    def _reseed(self, *position: int) -> None:
        """Seed the generators from the position in the run, so that a resumed run draws the same
        numbers.
        """
        reseed(derive(self._seed, "step", *position), self.model.ranks.device)

    def _mean(self, losses: list[Losses]) -> float:
        """Return the mean loss of the update over micro-batches and ranks."""
        local = float(torch.stack([loss.total for loss in losses]).double().mean())
        return sum(self.model.ranks.exchange(local)) / self.model.ranks.size


# Preparation of a model for training: device, memory format, packing, checkpointing, compilation,
# parallelism.


def prepare(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Move the model to its device, switch to train mode, and apply the settings of its
    computation.

    Raises ConfigError where `packed_text` or `checkpoint_activations` does not apply to this model.
    """
    model.to(device)
    if config.channels_last:
        torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    model.train()
    encoders = [module for module in model.modules() if isinstance(module, Encoder)]
    if config.packed_text:
        _pack(model)
    if config.checkpoint_activations:
        _checkpoint(encoders)


def parallelize(model: nn.Module, config: TrainConfig, ranks: RankInfo) -> ParallelModel:
    """Prepare the model, and wrap it for the ranks: sharded where the settings say so and there are
    several.

    Raises ConfigError as `prepare` does.
    """
    if not config.shard_weights or ranks.size == 1:
        prepare(model, config, ranks.device)
        parallel = DDPModel(model, ranks, config.find_unused_parameters)
        if config.compile:
            compile_model(parallel, against_cuda_graphs(parallel))
        return parallel
    # The complete model may not fit on the device, and sharding needs contiguous weights. Blocks
    # are compiled alone.
    complete = dataclasses.replace(config, channels_last=False)
    prepare(model, complete, torch.device("cpu"))
    return FSDPModel(model, ranks, compile=config.compile)


def against_cuda_graphs(model: ParallelModel) -> str | None:
    """Return why CUDA graphs cannot record the forward and backward pass; None where they can.

    A graph is recorded for every combination of shapes, and each step overwrites the results of
    the last one.
    """
    if model.ranks.device.type != "cuda":
        return "they need a GPU"
    if model.ranks.size > 1:
        return "ranks exchange gradients within the backward pass"
    if not _has_few_shapes(model.trained):
        name = getattr(model.trained, "name", type(model.trained).__name__)
        return f"{name} has shapes that change from batch to batch"
    return None


def _has_few_shapes(model: nn.Module) -> bool:
    """Return whether all shapes of a step follow from the lengths of `pad_texts` and of packed rows
    (`medvl.encoders.text.packing`), and from the number of masked words, which is filled up too.
    """
    from medvl.models.fusion_encoders.bases.bert_stream import JointStream
    from medvl.models.fusion_encoders.bases.region_model import RegionModel
    from medvl.models.fusion_encoders.streams import StreamModel

    contrastive = isinstance(model, DualEncoder) and model.compares_pairs
    fuses = isinstance(model, StreamModel | JointStream) and not isinstance(model, RegionModel)
    if not (isinstance(model, System) and (contrastive or fuses)):
        return False
    return dataclasses.replace(model.inputs, second_image=False, second_text=False) == Inputs()


def compile_model(model: ParallelModel, against: str | None) -> None:
    """Compile the model, with CUDA graphs unless there is a reason against them, and log which."""
    if against is None:
        model.trained.compile(mode="reduce-overhead")
    else:
        model.trained.compile()
    model.compiled = "graphs" if against is None else "kernels"
    graphs = "with CUDA graphs" if against is None else f"without CUDA graphs: {against}"
    _log.info("the model is compiled, %s", graphs)


_TEXT_PARTS, _TEXT_LEAST = 4, 8
"""Lengths of text between two powers of two, and what all are multiples of."""
_FILLING: dict[str, float] = {"mention_BT": -1, "sentence_BT": -1, "order_BT": torch.inf}
"""Field of a batch -> its value on padding, where that is not 0."""


def longest_text(model: nn.Module) -> int | None:
    """Return the length to which texts may be padded; None for a model without a text encoder."""
    encoder = getattr(model, "text_encoder", None)
    if not isinstance(encoder, TextEncoder):
        return None
    tokenizer = getattr(model, "tokenizer", None)
    longest = encoder.max_tokens
    return longest if tokenizer is None else min(longest, tokenizer.max_tokens)


def pad_texts(batch: Batch, longest: int) -> Batch:
    """Pad the texts of a batch to one of few lengths, at most `longest` tokens, so that compiled
    code and CUDA graphs are used again.

    No value changes but by random numbers (masked words, dropout), which depend on the length.
    """
    padded: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value_BT = getattr(batch, field.name)
        if value_BT is None or not field.name.endswith("_BT"):
            continue
        width = value_BT.shape[1]
        filling = min(round_up(width, _TEXT_PARTS, _TEXT_LEAST), longest) - width
        if width and filling > 0:
            padded[field.name] = F.pad(value_BT, (0, filling), value=_FILLING.get(field.name, 0))
    return dataclasses.replace(batch, **padded) if padded else batch


def _pack(model: nn.Module) -> None:
    """Pack the text encoders, and the text's stream of a dual-stream fusion-encoder."""
    from medvl.models.fusion_encoders.parts.encoder import DualStream

    modules = list(model.modules())
    if not any(isinstance(module, TextEncoder) for module in modules):
        raise ConfigError(
            "the model has no text encoder; leave packed_text unset",
            "unsupported",
            field="packed_text",
        )
    for module in modules:
        if isinstance(module, (TextEncoder, DualStream)):
            module.pack()


def _checkpoint(encoders: Sequence[Encoder]) -> None:
    """Checkpoint the activations of all encoders that support it; a CNN beside a Transformer is
    left unchanged.
    """
    refusals = []
    for encoder in encoders:
        try:
            checkpoint_activations(encoder)
        except ConfigError as error:
            refusals.append(str(error))
    if len(refusals) == len(encoders):
        reasons = "; ".join(refusals) or "the model has no encoder"
        raise ConfigError(
            f"{reasons}; leave checkpoint_activations unset",
            "unsupported",
            field="checkpoint_activations",
        )
