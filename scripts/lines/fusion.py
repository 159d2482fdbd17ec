"""Fusion-encoders: M3AE's shared pretraining pass and retrieval with cached encodings, beside the
published forms, and steps of M3AE and MedViLL.

The published pretraining step runs three forward passes; published retrieval encodes both sides of
every pair. Both forms give equal losses and gradients
(tests/models/fusion_encoders/test_fusion_m3ae.py), and equal scores and ranks
(tests/eval/retrieval/test_rerank.py). FLOPs are counted by torch on the meta device for the forward
pass, a multiplication and an addition as two; the published size has 288-pixel images and 64
tokens, of which 15 % are masked.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from measure.bench import Bench
from measure.line import Line, Report, TableRow, ratio, report
from measure.timing import Contender, Flops, Run, measure_in_turns, repeat
from torch.utils.flop_counter import FlopCounterMode

from lines.systems import system_contender

# Internals on purpose: the published forms are rebuilt from parts of the model.
from medvl.losses.masked import mask_patches, patchify
from medvl.losses.pairs.image_text import MatchingPairs
from medvl.models import M3AE, M3AEConfig
from medvl.models.base import MaskedWords
from medvl.models.fusion_encoders.bases.objectives import Corruption, PatchPredictions
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.schema import Batch

# Internal: the figures are those of `medvl doctor`.
from medvl.train.doctor.examine import COUNTED, count_operations

SIZES = {
    "paper": M3AEConfig(),
    "tiny": M3AEConfig(
        image_encoder="timm:vit_tiny_patch16_224",
        image_arguments={"depth": 1},
        text_encoder="tiny_bert",
        image_size=64,
        width=48,
        layers=2,
        mim_layer=1,
        heads=3,
        intermediate=96,
        max_tokens=16,
        decoder_width=24,
        decoder_layers=1,
        decoder_heads=3,
    ),
}
MASK_RATIO = 0.15
PAIRED, SHORTLIST = 2000, 256
"""Images (and texts) of the published retrieval, where every pair is scored; length of a
dual-encoder's shortlist.
"""
UNIT = "samples/s"


def count_steps(bench: Bench) -> Report:
    """Count the operations of M3AE's pretraining step with one shared pass and with three."""
    model, inputs_on_meta = _on_meta(bench)
    forms = {"three passes": separate_forwards, "one pass": M3AE.predict}
    return report(
        [],
        {
            f"{name} GFLOP": gflop(functools.partial(form, model, *inputs_on_meta))
            / len(inputs_on_meta[0])
            for name, form in forms.items()
        },
    )


def count_retrieval(bench: Bench) -> Report:
    """Count the operations of retrieval with 2,000 images and texts: every pair encoded, cached
    encodings, and shortlists of a dual-encoder.
    """
    model, (batch, _) = _on_meta(bench)
    image, text = encode(model, batch)
    encoding = gflop(functools.partial(encode, model, batch)) / len(batch)
    matching = gflop(functools.partial(model.match, text, image)) / len(batch)
    figures = {
        "every pair PFLOP": PAIRED**2 * (encoding + matching) / 1e6,
        "cached PFLOP": (PAIRED * encoding + PAIRED**2 * matching) / 1e6,
        # Encodings of a dual-encoder and of the model; an upper bound, as a pair may be on both
        # directions' lists.
        "shortlists PFLOP": (2 * PAIRED * encoding + 2 * PAIRED * SHORTLIST * matching) / 1e6,
    }
    return report([], figures)


def _on_meta(bench: Bench) -> tuple[M3AE, tuple[Batch, Corruption]]:
    """Return M3AE and its inputs on the meta device."""
    with torch.device("meta"):
        model = M3AE.build(SIZES[bench.size("paper", "tiny")], pretrained=False, tokenizer=None)
    return model, on_device(*inputs(model, bench.size(8, 2)), "meta")


def inputs(model: M3AE, size: int) -> tuple[Batch, Corruption]:
    """Return a random batch and its corruption: equally many masked words per text, half of the
    images swapped.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, side = model.config.max_tokens, model.config.image_size
    ids_BT = torch.randint(10, 100, (size, tokens), generator=generator)
    masked_BT = torch.rand(size, tokens, generator=generator).argsort(dim=1) < round(
        MASK_RATIO * tokens
    )
    batch = Batch(
        keys=[str(row) for row in range(size)],
        image_BCHW=torch.randint(
            0, 256, (size, 3, side, side), generator=generator, dtype=torch.uint8
        ),
        ids_BT=ids_BT,
        mask_BT=torch.ones_like(ids_BT, dtype=torch.bool),
        labels_BL=torch.zeros(size, 0),
        texts=[""] * size,
    )
    row_B = torch.arange(size)
    corruption = Corruption(
        {
            "mim": mask_patches(
                size, math.prod(model.mim_head.patches.grid), model.config.mask_ratio, generator
            ),
            "mlm": MaskedWords(
                ids_BT=ids_BT.masked_fill(masked_BT, 4),
                labels_BT=ids_BT.masked_fill(~masked_BT, -100),
                position_N=masked_BT.flatten().nonzero().squeeze(1),
            ),
            "itm": MatchingPairs(
                torch.where(row_B % 2 == 0, row_B, row_B.roll(1)), row_B, row_B % 2 == 0
            ),
        }
    )
    return batch, corruption


def on_device(batch: Batch, corruption: Corruption, device: str) -> tuple[Batch, Corruption]:
    """Return batch and corruption on a device."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, dict):
            return {name: move(part) for name, part in value.items()}
        if hasattr(value, "__dataclass_fields__"):
            return type(value)(
                **{name: move(getattr(value, name)) for name in value.__dataclass_fields__}
            )
        return value

    return batch.to(device), move(corruption)


def separate_forwards(model: M3AE, batch: Batch, corruption: Corruption) -> dict[str, Any]:
    """Run the published step: the whole model for each of the three objectives, from pixels and
    token ids.
    """
    words, pairs, patches = (
        corruption.of(model.mlm),
        corruption.of(model.itm),
        corruption.of(model.mim),
    )
    image = model.image_tokens(batch.image_BCHW)
    fused = model.fuse(model.text_tokens(words.ids_BT, batch.mask_BT), image)
    words_BTV = model.mlm_head(fused.text.states_BND)

    text = model.text_tokens(batch.ids_BT, batch.mask_BT)
    visible = model.image_tokens(batch.image_BCHW, keep_BK=patches.kept_BK)
    states = run_all_layers(model, text, visible)

    swapped = model.image_tokens(batch.image_BCHW[pairs.image_N])
    text = model.text_tokens(batch.ids_BT[pairs.text_N], batch.mask_BT[pairs.text_N])
    true_BPC = patchify(
        model.image_encoder.normalize(batch.image_BCHW), model.mim_head.patches.side
    )
    return {
        "mlm": words_BTV.flatten(0, 1)[words.position_N],
        "itm": model.match(text, swapped),
        "mim": PatchPredictions(model.mim_head(states, patches), true_BPC, patches.masked_BP),
    }


def run_all_layers(model: M3AE, text: Tokens, image: Tokens) -> torch.Tensor:
    """Return the image states for the pixel decoder, after also running the layers and poolers
    above, as published.
    """
    fusion = model.fusion
    text, image = fusion.streams(text, image, model.config.mim_layer)
    text_BTD, image_BPD = text.states_BND, image.states_BND
    for above in range(model.config.mim_layer, model.config.layers):
        text_BTD, image_BPD = (
            fusion.text_layers[above](text_BTD, image_BPD, text.mask_BN, image.mask_BN),
            fusion.image_layers[above](image_BPD, text_BTD, image.mask_BN, text.mask_BN),
        )
    fusion.text_pooler(text_BTD), fusion.image_pooler(image_BPD)
    return image.states_BND


def encode(model: M3AE, batch: Batch) -> tuple[Tokens, Tokens]:
    """Return (image, text) tokens of a batch."""
    return model.image_tokens(batch.image_BCHW), model.text_tokens(batch.ids_BT, batch.mask_BT)


def gflop(step: Callable[[], Any]) -> float:
    """Return the GFLOPs of one call."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / 1e9


def measure_m3ae(bench: Bench) -> Report:
    """Measure the pretraining step with one shared pass, and the published one with three, on
    the same weights.
    """
    size = bench.size(64, 2)
    trained: list[tuple[M3AE, torch.optim.Optimizer]] = []  # both forms train the same model

    def bare(form: Callable[..., dict[str, Any]], flops: Flops) -> Run:
        device = bench.device
        if not trained:
            torch.manual_seed(0)
            built = M3AE.build(
                SIZES[bench.size("paper", "tiny")],
                pretrained=False,
                tokenizer=None,
            )
            built.to(device).train()
            fused = device.type == "cuda" or None
            trained.append((built, torch.optim.AdamW(built.parameters(), lr=1e-5, fused=fused)))
        model, optimizer = trained[0]
        given, few = (
            on_device(*inputs(model, rows), str(device)) for rows in (size, min(size, COUNTED))
        )

        def loss_of(batch: Batch, corruption: Any) -> torch.Tensor:
            return model.losses(form(model, batch, corruption), corruption).total

        flops.per_sample = count_operations(lambda: loss_of(*few), model, bench.precision) / len(
            few[0]
        )

        def step(number: int) -> None:
            with bench.precision.autocast():
                loss = loss_of(*given)
            bench.precision.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return repeat(step)

    def bare_contender(
        name: str, form: Callable[..., dict[str, Any]], shares: str | None = None
    ) -> Contender:
        flops = Flops()
        build = functools.partial(bare, form, flops)
        return Contender(
            name=name, build=build, samples=size, unit=UNIT, flops=flops, shares=shares
        )

    shared, published = "one shared pass, bare loop", "published: three passes, bare loop"
    rows = measure_in_turns(
        bench,
        (
            system_contender(bench, "m3ae_roco_medicat", size),
            bare_contender(shared, M3AE.predict),
            bare_contender(published, separate_forwards, shares=shared),
        ),
    )
    figures = {"times the rate of three passes": ratio(rows[1].rate, rows[2].rate)}
    return report(rows, figures, "each form with its own operations")


def measure_medvill(bench: Bench) -> Report:
    """Measure the pretraining step of the preset `paper`."""
    rows = measure_in_turns(
        bench, [system_contender(bench, "medvill_mimic", bench.size(64, 2), tokens=255)]
    )
    return report(rows, {"samples/s": rows[0].rate})


LINES = (
    Line(
        name="m3ae-flops",
        device="cpu",
        measures="M3AE's pretraining step of one shared pass, beside three: GFLOP a sample",
        unit="GFLOP",
        rows=(
            TableRow(
                title="M3AE, pretraining step",
                peer="three passes: {three passes GFLOP:.1f} GFLOP",
                ours="{one pass GFLOP:.1f} GFLOP",
            ),
        ),
        seconds=20,
        function=count_steps,
    ),
    Line(
        name="retrieval-flops",
        device="cpu",
        measures="retrieval with 2,000 images and texts by M3AE, beside encoding every pair",
        unit="PFLOP",
        rows=(
            TableRow(
                title="retrieval, 2,000 images and texts",
                peer="every pair: {every pair PFLOP:.1f} PFLOP",
                ours="{cached PFLOP:.1f}; {shortlists PFLOP:.1f} with shortlists of 256",
            ),
        ),
        seconds=20,
        function=count_retrieval,
    ),
    Line(
        name="m3ae",
        device="gpu",
        measures="M3AE at published size (288 pixels, 64 tokens), B = 64: the pretraining step",
        unit="samples/s",
        rows=(
            TableRow(
                title="`m3ae`: published size, batch 64, step",
                peer="three passes: {rows[2].rate:.1f} samples/s",
                ours="{rows[0].rate:.1f} samples/s",
            ),
        ),
        seconds=65,
        function=measure_m3ae,
    ),
    Line(
        name="medvill",
        device="gpu",
        measures="MedViLL at published size (512 pixels, 255 tokens), B = 64: the pretraining step",
        unit="samples/s",
        rows=(
            TableRow(
                title="`medvill`: published size, batch 64, step", ours="{samples/s:.1f} samples/s"
            ),
        ),
        seconds=20,
        function=measure_medvill,
    ),
)
