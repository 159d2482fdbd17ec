"""Report generation with cached keys and values, beside encoding the whole sequence for every word.

Both forms generate the same words (tests/models/fusion_encoders/test_report_writing.py,
tests/models/report_generators/test_r2gen.py). FLOPs are counted by torch on the meta device for one
image (two in R2Gen), a multiplication and an addition as two; MedViLL's published size has 256
cells of an image at 512 pixels. The form without a cache is the released one. MedViLL: image block,
words and a mask token through BERT at every step, the image encoder once. R2Gen: memory and decoder
over all words at every step.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from measure.bench import Bench
from measure.line import Line, Report, TableRow, ratio, report
from measure.timing import Contender, Run, measure_in_turns, repeat
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from medvl.models import MedViLL, MedViLLConfig, R2Gen, R2GenConfig

# Internals on purpose: the released form is rebuilt from parts of the model.
from medvl.models.fusion_encoders.medvill import MaskWriter, image_block
from medvl.models.fusion_encoders.parts.encoder import Tokens

SIZES = {
    "paper": MedViLLConfig(attention="seq2seq", objective="report"),
    "tiny": MedViLLConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=256,
        frozen_image_layers=0,
        attention="seq2seq",
        objective="report",
    ),
}
R2GEN = {
    "r2gen": R2GenConfig(vocab_size=761),
    "r2gen-tiny": R2GenConfig(
        image_encoder="resnet_tiny", image_size=64, layers=1, width=32, vocab_size=100
    ),
}
"""The published sizes for IU X-ray, and small ones."""
CLS, SEP, MASK = 1, 2, 3
"""Arbitrary ids, which do not change the arithmetic."""


def count_medvill(bench: Bench) -> Report:
    """Count the operations of MedViLL's report of 100 tokens."""
    config = SIZES[bench.size("paper", "tiny")]
    with torch.device("meta"):
        model = MedViLL.build(config, pretrained=False, tokenizer=None).eval()
    return _count(model, {"cached": cached, "uncached": uncached}, bench.size(100, 2))


def count_r2gen(bench: Bench) -> Report:
    """Count the operations of R2Gen's report of 60 tokens."""
    config = R2GEN[bench.size("r2gen", "r2gen-tiny")]
    with torch.device("meta"):
        model = R2Gen.build(config, pretrained=False, tokenizer=None).eval()
    forms = {"cached": cached_memory, "uncached": uncached_memory}
    return _count(model, forms, bench.size(60, 2))


def _count(
    model: Any, forms: Mapping[str, Callable[[Any, Tensor, int], None]], tokens: int
) -> Report:
    """Return the GFLOP of one report in each form."""
    side, figures = model.config.image_size, {}
    for name, write in forms.items():
        image = torch.zeros(1, 1, side, side, dtype=torch.uint8, device="meta")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            write(model, image, tokens)
        figures[f"{name} GFLOP"] = counter.get_total_flops() / 1e9
    return report([], figures)


def cached(model: MedViLL, image: Tensor, tokens: int) -> None:
    """Generate words as `MedViLL.generate` does, without using them."""
    writer = MaskWriter(model, _block(model, image), MASK)
    row_B = torch.arange(len(image), device=image.device)
    ids_B = writer.first().argmax(dim=1)
    for _ in range(tokens - 1):
        ids_B = writer.next(ids_B, row_B).argmax(dim=1)


def uncached(model: MedViLL, image: Tensor, tokens: int) -> None:
    """Generate words by encoding the whole sequence at every step."""
    cells = model.image_tokens(image)
    ones_B1 = torch.ones(len(image), 1, dtype=torch.int64, device=image.device)
    ids_BT = CLS * ones_B1
    for _ in range(tokens):
        masked_BT = torch.cat([ids_BT, MASK * ones_B1], dim=1)
        text = model.text_tokens(masked_BT, torch.ones_like(masked_BT, dtype=torch.bool))
        states_BD = model.fuse(text, cells).text.states_BND[:, -1]
        ids_BT = torch.cat(
            [ids_BT, model.score_words(states_BD).argmax(dim=1, keepdim=True)], dim=1
        )


def cached_memory(model: R2Gen, image: Tensor, tokens: int) -> None:
    """Generate words as `R2Gen.write_reports` does, without using them."""
    writer = model.writer(model.image_tokens(image, image), 0)
    row_B = torch.arange(len(image), device=image.device)
    ids_B = writer.first().argmax(dim=1)
    for _ in range(tokens - 1):
        ids_B = writer.next(ids_B, row_B).argmax(dim=1)


def uncached_memory(model: R2Gen, image: Tensor, tokens: int) -> None:
    """Generate words by computing memory and decoder for all of them at every step."""
    cells = model.image_tokens(image, image)
    ids_BT = torch.zeros(len(image), 1, dtype=torch.int64, device=image.device)
    for _ in range(tokens):
        ids_B1 = model.score_next(ids_BT, cells)[:, -1].argmax(dim=1, keepdim=True)
        ids_BT = torch.cat([ids_BT, ids_B1], dim=1)


def _block(model: MedViLL, image: Tensor) -> Tokens:
    ends_B2 = torch.tensor([[CLS, SEP]], device=image.device).expand(len(image), -1)
    return image_block(
        model.text_tokens(ends_B2, torch.ones_like(ends_B2, dtype=torch.bool)),
        model.image_tokens(image),
    )


def measure_decoding(bench: Bench) -> Report:
    """Measure greedy reports of 100 tokens by MedViLL, with cached keys and values and without."""
    size, tokens = bench.size((32, 100), (2, 3))
    models: list[MedViLL] = []

    def decode(write: Callable[[MedViLL, torch.Tensor, int], None]) -> Run:
        if not models:
            torch.manual_seed(0)
            config = SIZES[bench.size("paper", "tiny")]
            models.append(
                MedViLL.build(config, pretrained=False, tokenizer=None).to(bench.device).eval()
            )
        side = models[0].config.image_size
        image = torch.zeros(size, 1, side, side, dtype=torch.uint8, device=bench.device)

        def step(number: int) -> None:
            with torch.inference_mode(), bench.precision.autocast():
                write(models[0], image, tokens)

        return repeat(step)

    ours, published = "medvl: cached keys and values", "without a cache, as published"
    rows = measure_in_turns(
        bench,
        (
            Contender(
                name=ours,
                build=functools.partial(decode, cached),
                samples=size * tokens,
                unit="tokens/s",
                warm_up=1,
            ),
            Contender(
                name=published,
                build=functools.partial(decode, uncached),
                samples=size * tokens,
                unit="tokens/s",
                warm_up=1,
                shares=ours,
            ),
        ),
        steps=2,
        rounds=2,
        profiled=1,
    )
    figures = {
        "tokens/s": rows[0].rate,
        "times the rate without a cache": ratio(rows[0].rate, rows[1].rate),
    }
    return report(rows, figures, f"{size} reports of {tokens} tokens at a time, bf16")


CACHE_CELLS = {"peer": "no cache: {uncached GFLOP:,.1f} GFLOP", "ours": "{cached GFLOP:.1f} GFLOP"}
LINES = (
    Line(
        name="medvill-cache",
        device="cpu",
        measures="MedViLL's report of 100 tokens with cached keys and values: GFLOP an image",
        unit="GFLOP",
        rows=(TableRow(title="MedViLL, report of 100 tokens", **CACHE_CELLS),),
        seconds=30,
        function=count_medvill,
    ),
    Line(
        name="r2gen-cache",
        device="cpu",
        measures="R2Gen's report of 60 tokens with cached keys and values: GFLOP a study",
        unit="GFLOP",
        rows=(TableRow(title="R2Gen, report of 60 tokens", **CACHE_CELLS),),
        seconds=30,
        function=count_r2gen,
    ),
    Line(
        name="decoding",
        device="gpu",
        measures="MedViLL writes 32 reports of 100 tokens, greedy",
        unit="tokens/s",
        rows=(
            TableRow(
                title="`decoding`: MedViLL, 32 reports of 100 tokens",
                peer="no cache: {rows[1].rate:,.0f} tokens/s",
                ours="{tokens/s:,.0f} tokens/s",
            ),
        ),
        seconds=30,
        function=measure_decoding,
    ),
)
