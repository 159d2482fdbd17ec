"""Benchmark of a text encoder's training step on texts of different lengths: padded and packed.

    python scripts/benchmark_text.py                                        # a small BERT on the CPU
    python scripts/benchmark_text.py --device cuda --size base --batch 256  # in bf16, also with compiled layers
    python scripts/benchmark_text.py --pretraining                          # masked words, beside a plain loop

Forward and backward. Lengths follow a normal distribution of 70 +- 30 tokens, clipped to 8 to 128,
and are padded to the longest text of a batch. Attention dropout is 0, so that a GPU can use its
variable-length kernel. CPU times are CPU seconds of this process, to reduce the influence of other
load.

With `--pretraining`, the complete update of a masked language model (AdamW, 15 % of the tokens) is
compared with a plain loop on transformers' `BertForMaskedLM` with the same weights: padded batches,
scores of the vocabulary at all positions. The forms take turns, and the median of the steps is
printed, with the losses of the first step, which are equal.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medvl.data import TextBatch
from medvl.encoders import TextEncoder, create_text_encoder
from medvl.models import MaskedText, MaskedTextConfig

SIZES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "tiny": {
        "hidden_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 768,
    },
    "base": {},
}
MAX_LENGTH, MIN_LENGTH, MEAN_LENGTH, LENGTH_STD = 128, 8, 70.0, 30.0
VOCABULARY, MASK_ID, RATE = 28_996, 4, 0.15


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each form")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--pretraining", action="store_true", help="masked language models, beside a plain loop"
    )
    parser.add_argument(
        "--bf16", action="store_true", help="with --pretraining: 16-bit autocast on a CPU too"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=VOCABULARY, help="with --pretraining: number of words"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads would wait for cores that are busy
    device = torch.device(options.device)
    batches = [inputs(options.batch, device, seed) for seed in range(options.steps)]
    real = sum(int(mask_BT.sum()) for _, mask_BT in batches)
    share = real / sum(mask_BT.numel() for _, mask_BT in batches)
    print(f"{options.size}, batches of {options.batch}, {share:.0%} of the tokens real")
    if options.pretraining:
        compare_pretraining(options, batches, device)
        return
    seconds: dict[str, float] = {}
    for name, packed, compiled in list_forms(device):
        encoder = make_encoder(options.size, device, packed, compiled)
        run = make_step(encoder, device)
        run_all(
            run, batches if compiled else batches[:1]
        )  # compilation for new lengths is not timed
        seconds[name] = measure(functools.partial(run_all, run, batches), device)
        rate, ratio = real / seconds[name], seconds["padded"] / seconds[name]
        print(f"{name:16} {rate:12,.0f} real tokens/s  {ratio:5.2f} of padded")


def compare_pretraining(
    options: argparse.Namespace, batches: Sequence[tuple[Tensor, Tensor]], device: torch.device
) -> None:
    """Time complete updates of the three forms in turns, and print their rates."""
    known = [(5 + ids_BT % (options.vocabulary - 5), mask_BT) for ids_BT, mask_BT in batches]
    masked = [mask_words(ids_BT, mask_BT, seed) for seed, (ids_BT, mask_BT) in enumerate(known)]
    forms = {
        name: make_update(name, options, device) for name in ("plain loop", "padded", "packed")
    }
    losses = {
        name: float(update(*masked[0])) for name, update in forms.items()
    }  # the first step is not timed
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for batch in masked:
        real = int(batch[1].sum())
        for name, update in forms.items():
            seconds[name].append(measure(functools.partial(update, *batch), device) / real)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        ratio = medians["plain loop"] / median
        print(
            f"{name:16} {1 / median:12,.0f} real tokens/s  {ratio:5.2f} of plain loop  first "
            f"loss {losses[name]:.4f}"
        )
    print(f"packing alone: {medians['padded'] / medians['packed']:.2f} of padded")


def mask_words(ids_BT: Tensor, mask_BT: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and a random order of masking for 15 % of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    order_BT = torch.rand(ids_BT.shape, generator=generator).to(ids_BT.device)
    return ids_BT, mask_BT, order_BT.masked_fill(~mask_BT, torch.inf)


def make_update(
    name: str, options: argparse.Namespace, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function that makes one update on masked texts and returns the loss, without
    waiting for the device.
    """
    half = options.bf16 or device.type == "cuda"
    model = (
        make_language_model(options.size, options.vocabulary, packed=name == "packed")
        .to(device)
        .train()
    )
    net: nn.Module = plain_model(model).to(device).train() if name == "plain loop" else model
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=device.type == "cuda" or None)

    def update(ids_BT: Tensor, mask_BT: Tensor, order_BT: Tensor) -> Tensor:
        replaced_BT = torch.full_like(ids_BT, MASK_ID)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            if name == "plain loop":
                chosen_BT = order_BT < RATE
                ids = torch.where(chosen_BT, replaced_BT, ids_BT)
                labels_BT = ids_BT.masked_fill(~chosen_BT, -100)
                loss = net(input_ids=ids, attention_mask=mask_BT.long(), labels=labels_BT).loss
            else:
                loss = net(text_batch(ids_BT, mask_BT, order_BT, replaced_BT)).total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return update


def text_batch(ids_BT: Tensor, mask_BT: Tensor, order_BT: Tensor, masked_BT: Tensor) -> TextBatch:
    """Return a batch as the loader makes it."""
    rows = len(ids_BT)
    return TextBatch(
        keys=[str(row) for row in range(rows)],
        image_BCHW=ids_BT.new_zeros(rows, 1, 0, 0),
        ids_BT=ids_BT,
        mask_BT=mask_BT,
        labels_BL=ids_BT.new_zeros(rows, 0),
        texts=[""] * rows,
        types_BT=torch.zeros_like(ids_BT),
        order_BT=order_BT,
        masked_BT=masked_BT,
        pair_B=ids_BT.new_full((rows,), -100),
    )


def make_language_model(size: str, vocabulary: int, packed: bool) -> MaskedText:
    """Return medvl's model with the same random weights in each call, without dropout."""
    torch.manual_seed(0)
    dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    arguments = {**SIZES[size], **dropout}
    config = MaskedTextConfig(
        text_encoder="bert", text_arguments=arguments, vocab_size=vocabulary, pairs="none"
    )
    model = MaskedText.build(config, pretrained=False, tokenizer=None)
    model.text_encoder.pack(packed)
    return model


def plain_model(model: MaskedText) -> nn.Module:
    """Return transformers' model with the same weights."""
    import transformers

    backbone: Any = model.text_encoder.backbone
    net: Any = transformers.BertForMaskedLM(backbone.config)
    net.bert.load_state_dict(backbone.state_dict())
    head = net.cls.predictions
    head.transform.dense.load_state_dict(model.word_head.dense.state_dict())
    head.transform.LayerNorm.load_state_dict(model.word_head.norm.state_dict())
    net.tie_weights()
    plain: nn.Module = net
    return plain


def run_all(
    run: Callable[[Tensor, Tensor], None], batches: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Run one step on each batch."""
    for batch in batches:
        run(*batch)


def list_forms(device: torch.device) -> list[tuple[str, bool, bool]]:
    """Return (name, packed, compiled) of the compared forms."""
    plain = [("padded", False, False), ("packed", True, False)]
    return (
        plain
        if device.type == "cpu"
        else [*plain, ("padded compiled", False, True), ("packed compiled", True, True)]
    )


def make_encoder(size: str, device: torch.device, packed: bool, compiled: bool) -> TextEncoder:
    """Return a BERT with random weights in train mode; layers are compiled one by one, for any
    length.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES[size], "attention_probs_dropout_prob": 0.0}
    encoder = (
        create_text_encoder("bert", vocab_size=VOCABULARY, pool="mean", **sizes).to(device).train()
    )
    encoder.pack(packed)
    if compiled:
        backbone: Any = encoder.backbone
        for layer in backbone.encoder.layer:
            layer.compile(dynamic=True)
    return encoder


def inputs(batch: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask."""
    generator = torch.Generator().manual_seed(seed)
    length_B = (
        (MEAN_LENGTH + LENGTH_STD * torch.randn(batch, generator=generator))
        .round()
        .clamp(MIN_LENGTH, MAX_LENGTH)
        .long()
    )
    longest = int(length_B.max())
    ids_BT = torch.randint(5, VOCABULARY, (batch, longest), generator=generator)
    return ids_BT.to(device), (torch.arange(longest) < length_B[:, None]).to(device)


def make_step(encoder: TextEncoder, device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """Return a function that runs a forward and backward pass, on a GPU in bf16."""

    def run(ids_BT: Tensor, mask_BT: Tensor) -> None:
        encoder.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            features = encoder(ids_BT, mask_BT)
        features.pooled_BD.float().square().mean().backward()

    return run


def measure(work: Callable[[], object], device: torch.device) -> float:
    """Return wall-clock seconds on a GPU, CPU seconds of this process on a CPU."""
    if device.type == "cpu":
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
