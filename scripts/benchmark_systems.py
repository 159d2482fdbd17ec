"""Cost of a step of every system at its published size.

    python scripts/benchmark_systems.py  # counts: half an hour on one core python
    scripts/benchmark_systems.py --systems radzero,mavl --seconds python
    scripts/benchmark_systems.py --seconds --device cuda --batch 32 OMP_NUM_THREADS=1 python
    scripts/benchmark_systems.py --frozen --image-size 224 --batch 4 --seconds

Models are those of the presets `paper`, with random weights. They read random images, reports of
`--tokens`, and `--statements` statements of twelve tokens where a system reads statements. FLOPs
are counted by torch for the forward pass, a multiplication and an addition as two; activations are
the bytes that autograd keeps for the backward pass, in float32, weights left out. Weights,
gradients and the two moments of Adam need 16 bytes a trained parameter besides. `--seconds` times
forward and backward passes, without a loader and without an optimiser. UNITER trains one task per
step; its operations and seconds are means over twelve steps. ARL's graph has 10,000 entities with
50,000 relations, a size that the paper does not state. BERTHop trains by masked words and matching,
on a PixelHop++ with random kernels. LViT trains on labelled images. UMRL needs principal components
of data and is left out.

`--frozen` compares steps of RadZero that train its image encoder, run it frozen, and read its
stored output (`medvl regions --all-tokens`): FLOPs of a forward and a backward pass, those of
images counted on the meta device, which includes the products of the attention, and with
`--seconds` CPU seconds, medians of `--repeats` steps in turns.
"""

import argparse
import dataclasses
import itertools
import math
import runpy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from medvl.data import DenseBatch, Tokenizer, train_wordpiece
from medvl.encoders import create_text_encoder
from medvl.losses.local.statements import patch_cosine
from medvl.models import create_model

# Internals on purpose: a model is built for a graph of a stated size without its files.
from medvl.models.fusion_encoders.parts.knowledge import GraphSizes
from medvl.schema import Batch

RECIPES = Path(__file__).parents[1] / "recipes"
SYSTEMS = {
    **{
        name: (f"{name}_mimic", "paper")
        for name in (
            *(
                "bfspr",
                "biovil",
                "biovil_t",
                "carzero",
                "chexzero",
                "convirt",
                "cxrclip",
                "kad",
                "lovt",
                "mavl",
            ),
            *("medclip", "medklip", "mgca", "mutual_info", "radzero", "siglip"),
            *("lxmert", "medvill", "mixed", "pixelbert", "uniter", "vilt", "visualbert"),
        )
    },
    "biovil-local": ("biovil_mimic", "local"),
    "gloria": ("gloria_chexpert", "paper"),
    "siglip-continued": ("siglip_mimic", "continued"),
    "mrm": ("mrm_mimic", "paper"),
    "ecamp": ("mrm_mimic", "ecamp"),
    "maco": ("mrm_mimic", "maco"),
    "albef": ("albef_roco_medicat", "paper"),
    "arl": ("arl_mimic", "paper"),
    "berthop": ("berthop_openi", "paper"),
    "lvit": ("lvit_qata", "paper"),
    "m2i2": ("m2i2_clef", "paper"),
    "m3ae": ("m3ae_roco_medicat", "paper"),
    "mumc": ("mumc_figures", "paper"),
    "ptunifier": ("ptunifier_figures", "paper"),
    "r2gen": ("r2gen_iu", "paper"),
}
"""Name -> recipe and preset."""
PUBLISHED_BATCH = 256
"""Images whose statements `--frozen` compares with each image."""
CASES = ("trained", "frozen", "stored")
"""Image encoders of `--frozen`."""
GRAPH = GraphSizes(entities=10_000, triples=50_000, names=0, longest_name=0, sha256="")
STEPS = 5
TASK_STEPS = 12
"""Steps over which the cost of a system that trains one task per step is averaged."""


def main() -> None:
    """Print a row for each system."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="names separated by commas")
    parser.add_argument(
        "--size", choices=("paper", "tiny"), default="paper", help="preset of the recipes"
    )
    parser.add_argument("--batch", type=int, default=2, help="samples of a step")
    parser.add_argument("--statements", type=int, default=6, help="statements of a sample")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a report")
    parser.add_argument(
        "--seconds", action="store_true", help="also time forward and backward passes"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--frozen", action="store_true", help="compare RadZero's trained, frozen and stored images"
    )
    parser.add_argument(
        "--image-size", type=int, default=518, help="side of the images of --frozen"
    )
    parser.add_argument(
        "--image-encoder",
        default="rad_dino",
        help="image encoder of --frozen; rad_dino is a ViT-B/14",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of --frozen")
    options = parser.parse_args()
    if options.frozen:
        compare_frozen(options)
        return
    unknown = sorted(set(options.systems.split(",")) - set(SYSTEMS))
    if unknown:
        parser.error(f"unknown systems {', '.join(unknown)}: choose from {', '.join(SYSTEMS)}")
    columns = (
        "system",
        "image",
        "parameters",
        "trained",
        "GFLOP/sample",
        "activations",
        "seconds/step",
    )
    print("".join(f"{column:>14}" for column in columns))
    for name in options.systems.split(","):
        print("".join(f"{cell:>14}" for cell in row(name, options)), flush=True)


def row(name: str, options: argparse.Namespace) -> list[str]:
    """Return the cells of a system."""
    recipe, preset = SYSTEMS[name]
    model = build(recipe, "tiny" if options.size == "tiny" else preset).train().to(options.device)
    batch = random_batch(model, options).to(options.device)
    steps = range(TASK_STEPS if getattr(model.config, "task_mix", False) else 1)
    model.before_step(0)
    with torch.no_grad():
        model(batch)  # fills books of queries, which happens once in a run
    with FlopCounterMode(display=False) as counter:
        for step in steps:
            model.before_step(step)
            model(batch)
    kept = max(activations(model, batch, step) for step in steps)
    every, trained = (
        sum(p.numel() for p in model.parameters() if p.requires_grad or not only) / 1e6
        for only in (False, True)
    )
    return [
        name,
        str(batch.image_BCHW.shape[-1]),
        f"{every:.1f} M",
        f"{trained:.1f} M",
        f"{counter.get_total_flops() / len(steps) / options.batch / 1e9:.1f}",
        f"{kept / options.batch / 2**20:.0f} MiB",
        f"{seconds(model, batch, steps):.2f}" if options.seconds else "-",
    ]


def compare_frozen(options: argparse.Namespace) -> None:
    """Print the cost of RadZero's training step with a trained, a frozen and a stored image
    encoder.
    """
    flops = frozen_flops(options)
    seconds = frozen_seconds(options) if options.seconds else dict.fromkeys(CASES, math.nan)
    print(
        "".join(
            f"{column:>14}" for column in ("images", "GFLOP/sample", "share", "CPU s/step", "share")
        )
    )
    for name in CASES:
        shares = flops[name] / flops["trained"], seconds[name] / seconds["trained"]
        cells = (
            name,
            f"{flops[name]:.1f}",
            f"{shares[0]:.3f}",
            f"{seconds[name]:.2f}",
            f"{shares[1]:.3f}",
        )
        print("".join(f"{cell:>14}" for cell in cells))


def frozen_flops(options: argparse.Namespace) -> dict[str, float]:
    """Return the GFLOP of a sample's step in each case, counted on the meta device, and print
    those of its parts.
    """
    with torch.device("meta"):
        model = radzero(options).eval()
        batch = random_batch(model, options)
    tokens_BKD = encoded(model, batch)
    text_encoder = create_text_encoder(
        model.config.text_encoder, vocab_size=vocabulary().vocab_size
    )
    statements_NT = torch.randint(
        10, text_encoder.vocab_size, (options.batch * options.statements, 12)
    )
    mask_NT = torch.ones_like(
        statements_NT, dtype=torch.bool
    )  # its encoder reads the mask's values: on the CPU
    images_BKD = torch.zeros(tokens_BKD.shape, requires_grad=True)
    texts_NE = torch.zeros(
        PUBLISHED_BATCH * options.statements, images_BKD.shape[2], requires_grad=True
    )
    parts: dict[str, Callable[[], Tensor]] = {
        "encoder, forward": lambda: encoded(model, batch),
        "encoder": lambda: model.image_encoder(batch.image_BCHW).patches_BPD,
        "trained layers": lambda: model.norm(model.layers(tokens_BKD)),
        "text encoder": lambda: text_encoder(statements_NT, mask_NT).tokens_BTD,
        "comparison": lambda: patch_cosine(images_BKD, texts_NE, 14.3),
    }
    model.image_encoder.requires_grad_(True)
    gflop = {name: counted(part) / options.batch for name, part in parts.items()}
    tokens, width = tokens_BKD.shape[1:]
    print(
        f"{options.image_size} pixels: {tokens} tokens of {width}, "
        f"{tokens * width * 2 / 1e6:.2f} MB an image"
    )
    print("GFLOP of a sample: " + ", ".join(f"{name} {value:.1f}" for name, value in gflop.items()))
    trained = sum(gflop[name] for name in ("trained layers", "text encoder", "comparison"))
    return {
        "trained": trained + gflop["encoder"],
        "frozen": trained + gflop["encoder, forward"],
        "stored": trained,
    }


def radzero(options: argparse.Namespace) -> Any:
    """Return RadZero with the image encoder and the image size of the options."""
    changes = {"image_encoder": options.image_encoder, "image_size": options.image_size}
    return build("radzero_mimic", "paper", **changes)


def counted(part: Callable[[], Tensor]) -> float:
    """Return the GFLOP of a forward pass, and of its backward pass where it has a gradient."""
    with FlopCounterMode(display=False) as counter:
        output = part()
        if output.requires_grad:
            output.backward(torch.ones_like(output))
    return counter.get_total_flops() / 1e9


def frozen_seconds(options: argparse.Namespace) -> dict[str, float]:
    """Return the median CPU seconds of steps in each case, measured in turns after a turn that
    warms up.
    """
    model = radzero(options).train()
    images = random_batch(model, options)
    without_pixels, tokens_BKD = images.image_BCHW[:, :, :0, :0], encoded(model, images).half()
    batches = dict.fromkeys(CASES, images)
    batches["stored"] = dataclasses.replace(
        images, image_BCHW=without_pixels, regions_BPD=tokens_BKD
    )
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for _, name in itertools.product(range(options.repeats + 1), CASES):
        model.image_encoder.requires_grad_(name == "trained")
        taken[name].append(timed(model, batches[name], time.process_time))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


@torch.no_grad()
def encoded(model: Any, batch: Batch) -> Tensor:
    """Return the class token and the patches of images, without gradient."""
    features = model.image_encoder(batch.image_BCHW)
    return torch.cat([features.pooled_BD[:, None], features.patches_BPD], dim=1)


def build(recipe: str, preset: str, **changes: Any) -> Any:
    """Return the model of a preset with random weights and a small vocabulary."""
    config = runpy.run_path(str(RECIPES / f"{recipe}.py"))["PRESETS"][preset].model
    weights = {name: None for name in ("image_weights", "text_weights") if hasattr(config, name)}
    graph = {"knowledge": None, "graph": GRAPH} if hasattr(config, "graph") else {}
    config = dataclasses.replace(config, **weights, **graph, **changes)
    return create_model(config, pretrained=False, tokenizer=vocabulary())


def vocabulary() -> Tokenizer:
    """Return a tokenizer with the letters of reports."""
    texts = [
        "There is no small left pleural effusion.",
        "The heart is enlarged; jugular, quite hazy zones (x-ray).",
    ]
    return train_wordpiece(texts, vocab_size=200, min_frequency=1, max_tokens=128)


def random_batch(model: Any, options: argparse.Namespace) -> DenseBatch:
    """Return random samples with every part that one of the systems reads."""
    config, rows = model.config, options.batch
    vocab = (
        model.text_encoder.vocab_size if hasattr(model, "text_encoder") else vocabulary().vocab_size
    )
    side = config.image_size * getattr(config, "target_scale", 1)

    def ids(*shape: int) -> Tensor:
        return torch.randint(10, vocab, shape)

    def pixels() -> Tensor:
        return torch.randint(0, 256, (rows, 1, side, side), dtype=torch.uint8)

    length = min(options.tokens, config.max_tokens or options.tokens)
    entities = len(getattr(config, "entities", ())) if model.inputs.labels else 0
    statements = ids(rows, options.statements, 12)
    words_T = torch.arange(length)
    mentioned_BN = torch.randint(0, GRAPH.entities, (rows, -(-length // 8)))
    return DenseBatch(
        keys=[str(row) for row in range(rows)],
        image_BCHW=pixels(),
        ids_BT=ids(rows, length),
        mask_BT=torch.ones(rows, length, dtype=torch.bool),
        labels_BL=torch.randint(0, 2, (rows, entities)).float(),
        texts=[""] * rows,
        studies=[str(row) for row in range(rows)],
        second_ids_BT=ids(rows, length),
        second_mask_BT=torch.ones(rows, length, dtype=torch.bool),
        has_second_text_B=torch.ones(rows, dtype=torch.bool),
        second_image_BCHW=pixels(),
        other_view_BCHW=pixels(),
        has_other_view_B=torch.ones(rows, dtype=torch.bool),
        statement_ids_BST=statements,
        statement_mask_BST=torch.ones_like(statements, dtype=torch.bool),
        position_BL=torch.randint(0, 9, (rows, entities)),
        sentence_BT=(words_T // 12).expand(rows, length),
        prior_BCHW=pixels(),
        has_prior_B=torch.ones(rows, dtype=torch.bool),
        entity_BN=mentioned_BN,
        mention_BT=torch.where(words_T % 8 < 2, words_T // 8, -1).expand(rows, length),
        image_entity_BN=mentioned_BN,
        masks_BLhw=torch.randint(0, 2, (rows, 1, side, side), dtype=torch.uint8) * 255,
    )


def activations(model: Any, batch: Batch, step: int) -> int:
    """Return the bytes of distinct tensors that autograd keeps in a step, without weights."""
    model.before_step(step)
    weights = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = model(batch).total
    assert math.isfinite(total.item())
    return sum(kept.values())


def seconds(model: Any, batch: Batch, steps: Sequence[int]) -> float:
    """Return the median time of a forward and a backward pass, or the mean of those of several
    steps.
    """
    medians = []
    for step in steps:
        model.before_step(step)
        medians.append(statistics.median(timed(model, batch) for _ in range(STEPS)))
    return statistics.mean(medians)


def timed(model: Any, batch: Batch, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of a forward and a backward pass."""
    start = clock()
    model(batch).total.backward()
    if batch.image_BCHW.is_cuda:
        torch.cuda.synchronize()
    taken = clock() - start
    model.zero_grad()
    return taken


if __name__ == "__main__":
    main()
