"""Benchmark of M3AE's shared pretraining pass and of retrieval with cached encodings, against the
published forms.

    python scripts/benchmark_fusion.py  # counts only, on the meta device: seconds
    python scripts/benchmark_fusion.py --seconds --size tiny  # also samples/s, forward and backward
    python scripts/benchmark_fusion.py --seconds --device cuda --batch 32

The published pretraining step runs three forward passes; published retrieval encodes both sides of
every pair. Both forms give equal losses and gradients
(tests/models/fusion_encoders/test_fusion_m3ae.py), and equal scores and ranks
(tests/eval/retrieval/test_rerank.py). FLOPs are counted by torch for the forward pass, a
multiplication and an addition as two; the published size has 288-pixel images and 64 tokens, of
which 15% are masked.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

# Internals on purpose: the published forms are rebuilt from parts of the model.
from medvl.eval.retrieval.rerank import Encoded, match_scores
from medvl.losses.masked import mask_patches, patchify
from medvl.losses.pairs.itm import MatchingPairs
from medvl.models import M3AE, M3AEConfig
from medvl.models.base import MaskedWords
from medvl.models.fusion_encoders.objectives.base import Corruption
from medvl.models.fusion_encoders.objectives.patches import PatchPredictions
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.schema import Batch

SIZES = {
    "paper": M3AEConfig(),
    "tiny": M3AEConfig(
        image_encoder="timm:vit_tiny_patch16_224",
        image_arguments={"depth": 4},
        text_encoder="tiny_bert",
        image_size=128,
        width=192,
        layers=4,
        heads=3,
        intermediate=768,
        max_tokens=48,
        decoder_width=96,
        decoder_layers=2,
        decoder_heads=3,
    ),
}
MASK_RATIO = 0.15
PAIRED, SHORTLIST = 2000, 256
"""Images (and texts) of the published retrieval, where every pair is scored; length of a
dual-encoder's shortlist.
"""
SECONDS = 10.0


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="paper")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", action="store_true", help="measure time as well")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads would wait for cores that are busy
    config = SIZES[options.size]
    with torch.device("meta"):
        model = M3AE.build(config, pretrained=False, tokenizer=None)
    count = sum(parameter.numel() for parameter in model.parameters())
    sizes = f"{config.image_size} px, {config.max_tokens} tokens"
    print(f"M3AE, {options.size}: {count / 1e6:.1f} million parameters, {sizes}")
    batch, corruption = inputs(model, options.batch)
    counts = {}
    for name, step in (
        ("three forward passes", separate_forwards),
        ("one shared pass", M3AE.predict),
    ):
        counts[name] = (
            gflop(functools.partial(step, model, *on_device(batch, corruption, "meta")))
            / options.batch
        )
        print(f"{name:22}{counts[name]:8.1f} GFLOP a sample")
    print(f"{'':22}{counts['three forward passes'] / counts['one shared pass']:8.2f} times less")
    count_retrieval(model, on_device(batch, corruption, "meta")[0])
    if options.seconds:
        place = "one core" if options.device == "cpu" else options.device
        torch.manual_seed(0)
        model = M3AE.build(config, pretrained=False, tokenizer=None).to(options.device).train()
        for name, step in (
            ("three forward passes", separate_forwards),
            ("one shared pass", M3AE.predict),
        ):
            rate = samples_per_second(model, step, *on_device(batch, corruption, options.device))
            print(f"{name:22}{rate:8.2f} samples/s, forward and backward, {place}")
        time_retrieval(model.eval(), batch.to(options.device), place)


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


def count_retrieval(model: M3AE, batch: Batch) -> None:
    """Print the FLOPs of retrieval with 2,000 images and texts."""
    image, text = encode(model, batch)
    encoding = gflop(functools.partial(encode, model, batch)) / len(batch)
    matching = gflop(functools.partial(model.match, text, image)) / len(batch)
    everything = PAIRED**2 * (encoding + matching) / 1e6
    print(
        f"retrieval, {PAIRED:,} images and as many texts: {encoding:.1f} GFLOP to encode both, "
        f"{matching:.1f} to match"
    )
    for name, count in (
        ("every pair encoded", everything),
        ("cached encodings", (PAIRED * encoding + PAIRED**2 * matching) / 1e6),
        # Encodings of a dual-encoder and of the model; an upper bound, as a pair may be on both
        # directions' lists.
        (
            f"shortlists of {SHORTLIST}",
            (2 * PAIRED * encoding + 2 * PAIRED * SHORTLIST * matching) / 1e6,
        ),
    ):
        print(f"{name:22}{count:8.1f} PFLOP {everything / count:8.1f} times less")


@torch.no_grad()
def time_retrieval(model: M3AE, batch: Batch, place: str) -> None:
    """Print the pairs per second of both forms."""
    rows = torch.arange(len(batch), device=batch.ids_BT.device)
    image, text = encode(model, batch)
    host = [Tokens(tokens.states_BND.cpu(), tokens.real_BN().cpu()) for tokens in (image, text)]
    encoded = Encoded(host[0], host[1])
    image_Q, text_Q = torch.cartesian_prod(rows.cpu(), rows.cpu()).T

    def every_pair() -> torch.Tensor:
        scores = []
        for row in rows:
            image = model.image_tokens(batch.image_BCHW[row].expand_as(batch.image_BCHW))
            logits_B2 = model.match(model.text_tokens(batch.ids_BT, batch.mask_BT), image)
            scores.append(logits_B2[:, 1] - logits_B2[:, 0])
        return torch.cat(scores).cpu()

    def cached() -> torch.Tensor:
        return match_scores(model, encoded, image_Q, text_Q)

    torch.testing.assert_close(every_pair(), cached(), rtol=1e-3, atol=1e-4)
    for name, function in (("every pair encoded", every_pair), ("cached encodings", cached)):
        best, started = 0.0, time.perf_counter()
        while time.perf_counter() - started < SECONDS or not best:
            step_started = time.perf_counter()
            function()  # returns results on the CPU, so the device has finished
            best = max(best, len(image_Q) / (time.perf_counter() - step_started))
        print(f"{name:22}{best:8.1f} pairs/s, {place}")


def encode(model: M3AE, batch: Batch) -> tuple[Tokens, Tokens]:
    """Return (image, text) tokens of a batch."""
    return model.image_tokens(batch.image_BCHW), model.text_tokens(batch.ids_BT, batch.mask_BT)


def gflop(step: Callable[[], Any]) -> float:
    """Return the GFLOPs of one call."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / 1e9


def samples_per_second(
    model: M3AE,
    step: Callable[[M3AE, Batch, Corruption], dict[str, Any]],
    batch: Batch,
    corruption: Corruption,
) -> float:
    """Return samples per second, forward and backward; best step within ten seconds, after one
    warm-up step.
    """
    best, started = 0.0, time.perf_counter()
    warm = False
    while time.perf_counter() - started < SECONDS or not best:
        step_started = time.perf_counter()
        model.losses(step(model, batch, corruption), corruption).total.backward()
        model.zero_grad(set_to_none=True)
        if batch.ids_BT.is_cuda:
            torch.cuda.synchronize()
        if warm:
            best = max(best, len(batch) / (time.perf_counter() - step_started))
        warm = True
    return best


if __name__ == "__main__":
    main()
