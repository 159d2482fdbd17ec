"""Text encoders: pretraining on masked words beside a plain loop, and the cost of attention
dropout.

The plain loop trains transformers' `BertForMaskedLM` with the same weights on padded batches, with
scores of the vocabulary at all positions. Lengths follow a normal distribution of 70 +- 30 tokens,
clipped to 8 to 128. CPU times are CPU seconds of this process.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure.bench import Bench
from measure.line import Line, Report, TableRow, ratio, report
from measure.medvl_step import medvl_step
from measure.timing import Contender, Flops, Run, measure_in_turns, repeat
from torch import Tensor, nn

from medvl.data import TextBatch
from medvl.encoders import create_text_encoder
from medvl.models import MaskedText, MaskedTextConfig

SIZES: dict[str, dict[str, int]] = {
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


UNIT = "texts/s"
TINY = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
}


def measure_masked_words(bench: Bench) -> Report:
    """Measure complete updates of a small BERT in float32: a plain loop, medvl padded and packed.

    Rates are of real tokens, at the median step; the losses of the first step are equal.
    """
    device = torch.device("cpu")
    size, steps, vocabulary = bench.size((64, 5, 8000), (4, 1, 200))
    options = argparse.Namespace(size="tiny", vocabulary=vocabulary, bf16=False)
    batches = [inputs(size, device, seed) for seed in range(steps)]
    masked = [
        mask_words(5 + ids_BT % (vocabulary - 5), mask_BT, seed)
        for seed, (ids_BT, mask_BT) in enumerate(batches)
    ]
    forms = {
        name: make_update(name, options, device) for name in ("plain loop", "padded", "packed")
    }
    # The first step is not timed.
    losses = {name: float(update(*masked[0])) for name, update in forms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for batch in masked:
        real = int(batch[1].sum())
        for name, update in forms.items():
            started = time.process_time()
            update(*batch)
            seconds[name].append((time.process_time() - started) / real)
    rates = {name: 1 / statistics.median(values) for name, values in seconds.items()}
    first = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    return report([], {f"{name} tokens/s": rate for name, rate in rates.items()}, f"losses {first}")


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


def measure_pretraining(bench: Bench) -> Report:
    """Measure complete updates on texts of 128 real tokens: medvl's step and a loop on
    transformers' model.
    """
    size, flops = bench.large_batch(1024, 4), Flops()
    length, vocabulary = bench.size((MAX_LENGTH, VOCABULARY), (12, 200))
    bert = bench.size("base", "tiny")
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(5, vocabulary, (size, length), generator=generator).to(bench.device)
    words = mask_words(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), seed=0)
    batch = text_batch(*words, torch.full_like(ids_BT, MASK_ID))

    def ours(packed: bool, compiled: bool) -> Run:
        model = make_language_model(bert, vocabulary, packed=False)
        flops.count(model, batch, bench)
        return medvl_step(bench, model, [batch], packed_text=packed, compile=compiled)

    def plain() -> Run:
        options = argparse.Namespace(size=bert, vocabulary=vocabulary, bf16=True)
        update = make_update("plain loop", options, bench.device)
        return repeat(lambda _: update(*words))

    contenders = [
        Contender(name=name, build=build, samples=size, unit=UNIT, flops=flops)
        for name, build in (
            (
                "medvl: packed (preset `paper` of PubMedBERT)",
                functools.partial(ours, packed=True, compiled=False),
            ),
            ("medvl: padded, compiled", functools.partial(ours, packed=False, compiled=True)),
            ("stock: loop over BertForMaskedLM", plain),
        )
    ]
    rows = measure_in_turns(bench, contenders)
    best = max(rows[:2], key=lambda row: row.rate or 0.0)
    figures = {"TFLOP/s": best.tflops, "times the stock loop": ratio(best.rate, rows[2].rate)}
    return report(
        rows,
        figures,
        f"B = {size:,}",
        "operations: scores of the vocabulary at masked positions only, for all rows",
    )


def measure_attention_dropout(bench: Bench) -> Report:
    """Measure the encoder of ConVIRT with and without attention dropout, each layer compiled,
    and eager.
    """
    size, length = bench.size((256, MAX_LENGTH), (4, 12))
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(5, VOCABULARY, (size, length), generator=generator).to(bench.device)
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    sizes: dict[str, Any] = bench.size(SIZES["base"], TINY)

    def build(dropout: float, compiled: bool) -> Run:
        torch.manual_seed(0)
        arguments = {**sizes, "attention_probs_dropout_prob": dropout}
        encoder = (
            create_text_encoder("bert", vocab_size=VOCABULARY, pool="max", **arguments)
            .to(bench.device)
            .train()
        )
        fused = bench.device.type == "cuda" or None
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-5, fused=fused)
        backbone: Any = encoder.backbone
        for layer in backbone.encoder.layer if compiled else ():
            layer.compile()

        def step(number: int) -> None:
            with bench.precision.autocast():
                pooled_BD = encoder(ids_BT, mask_BT).pooled_BD
            bench.precision.backward(pooled_BD.float().square().mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return repeat(step)

    forms = {
        f"{'layers compiled' if compiled else 'eager'}, attention dropout {dropout:g}": (
            dropout,
            compiled,
        )
        for compiled in (True, False)
        for dropout in (0.1, 0.0)
    }
    rows = measure_in_turns(
        bench,
        [
            Contender(name=name, build=functools.partial(build, *form), samples=size, unit=UNIT)
            for name, form in forms.items()
        ],
    )
    compiled, eager = ratio(rows[0].ms, rows[1].ms), ratio(rows[2].ms, rows[3].ms)
    return report(
        rows, {"times the time without, compiled": compiled, "times the time without, eager": eager}
    )


LINES = (
    Line(
        name="masked-words",
        device="cpu",
        measures="masked words, a small BERT of 8,000 words in float32: the update, beside "
        "`BertForMaskedLM`",
        unit="tokens/s",
        rows=(
            TableRow(
                title="masked words, packed, float32",
                peer="`BertForMaskedLM`: {plain loop tokens/s:,.0f} tokens/s",
                ours="{packed tokens/s:,.0f} tokens/s",
            ),
        ),
        seconds=60,
        function=measure_masked_words,
    ),
    Line(
        name="bert",
        device="gpu",
        measures="BERT-base on masked words, B = 1,024 texts (512 below 100 GB) of 128 tokens: "
        "the update",
        unit="TFLOP/s",
        rows=(
            TableRow(
                title="`bert`: BERT-base on masked words",
                target="314 TFLOP/s",
                peer="`BertForMaskedLM`: {rows[2].rate:,.0f} texts/s",
                ours="{TFLOP/s:.0f} TFLOP/s, {times the stock loop:.2f} times",
            ),
        ),
        seconds=75,
        function=measure_pretraining,
    ),
    Line(
        name="attention-dropout",
        device="gpu",
        measures="what attention dropout costs BERT-base with compiled layers, B = 256, 128 tokens",
        unit="times",
        rows=(
            TableRow(
                title="`attention-dropout`: BERT-base with it, compiled",
                peer="without: {rows[1].ms:.1f} ms",
                ours="{times the time without, compiled:.2f} times the time",
            ),
        ),
        seconds=40,
        function=measure_attention_dropout,
    ),
)
