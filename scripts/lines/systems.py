"""The cost of a step of every system at its published size, and of RadZero's with stored images.

Models are those of the presets `paper`, with random weights. They read random images, reports of 64
tokens, and six statements of twelve tokens where a system reads statements. FLOPs are counted by
torch for the forward pass, a multiplication and an addition as two; activations are the bytes that
autograd keeps for the backward pass, in float32, weights left out. UNITER trains one task per step;
its operations are means over twelve steps. ARL's graph has 10,000 entities with 50,000 relations, a
size that the paper does not state. BERTHop trains by masked words and matching, on a PixelHop++
with random kernels. LViT trains on labelled images. UMRL needs principal components of data and is
left out.
"""

import argparse
import dataclasses
import itertools
import math
import runpy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measure.bench import Bench
from measure.line import Line, Report, Row, TableRow, report
from measure.medvl_step import medvl_step
from measure.timing import Contender, Flops, Run, measure_in_turns
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from medvl.data import DenseBatch, Tokenizer, train_wordpiece
from medvl.models import create_model

# Internals on purpose: a model is built for a graph of a stated size without its files.
from medvl.models.fusion_encoders.parts.knowledge import GraphSizes
from medvl.schema import Batch

RECIPES = Path(__file__).parents[2] / "recipes"
SYSTEMS = {
    **{
        name: (f"{name}_mimic", "paper")
        for name in (
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
            "medclip",
            "medklip",
            "mgca",
            "mutual_info",
            "radzero",
            "siglip",
            "lxmert",
            "medvill",
            "mixed",
            "pixelbert",
            "uniter",
            "vilt",
            "visualbert",
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
FUSION = ("medvill", "vilt", "m3ae", "arl", "ptunifier", "albef")
"""Systems whose compiled graphs are counted."""
CASES = ("trained", "frozen", "stored")
"""Image encoders of RadZero's step."""
GRAPH = GraphSizes(entities=10_000, triples=50_000, names=0, longest_name=0, sha256="")
TASK_STEPS = 12
"""Steps over which the cost of a system that trains one task per step is averaged."""
SIZE, EACH = 32, 15.0
"""Samples of a step on a GPU, and the seconds that a system takes at most."""
DRY_RUN = ("mavl", "mrm")
UNIT = "samples/s"


def count_systems(bench: Bench) -> Report:
    """Count parameters, operations and activations of every system's training step."""
    options = argparse.Namespace(batch=2, statements=6, tokens=bench.size(64, 16))
    figures: dict[str, float] = {}
    for name in bench.size(tuple(SYSTEMS), DRY_RUN):
        recipe, preset = SYSTEMS[name]
        model = build(recipe, bench.size(preset, "tiny")).train()
        batch = random_batch(model, options)
        steps = range(TASK_STEPS if getattr(model.config, "task_mix", False) else 1)
        model.before_step(0)
        with torch.no_grad():
            model(batch)  # fills books of queries, which happens once in a run
        with FlopCounterMode(display=False) as counter:
            for step in steps:
                model.before_step(step)
                model(batch)
        kept = max(activations(model, batch, step) for step in steps)
        gflop = counter.get_total_flops() / len(steps) / options.batch / 1e9
        figures |= {
            f"{name}, M parameters": sum(each.numel() for each in model.parameters()) / 1e6,
            f"{name}, GFLOP a sample": gflop,
            f"{name}, MiB of activations a sample": kept / options.batch / 2**20,
        }
    return report([], figures)


def measure_stored(bench: Bench) -> Report:
    """Measure RadZero's step with a trained, a frozen and a stored image encoder at 518 pixels, in
    CPU seconds, medians of steps in turns.

    The stored output is that of `medvl regions --all-tokens`.
    """
    options = argparse.Namespace(batch=1, statements=6, tokens=64)
    full: dict[str, Any] = {"image_encoder": "rad_dino", "image_size": 518}
    model = build("radzero_mimic", bench.size("paper", "tiny"), **bench.size(full, {})).train()
    images = random_batch(model, options)
    without_pixels, tokens_BKD = images.image_BCHW[:, :, :0, :0], encoded(model, images).half()
    batches = dict.fromkeys(CASES, images)
    batches["stored"] = dataclasses.replace(
        images, image_BCHW=without_pixels, regions_BPD=tokens_BKD
    )
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    # The first turn warms up.
    for _, name in itertools.product(range(bench.size(3, 2)), CASES):
        model.image_encoder.requires_grad_(name == "trained")
        taken[name].append(timed(model, batches[name]))
    return report([], {f"{name} s": statistics.median(times[1:]) for name, times in taken.items()})


def measure_systems(bench: Bench) -> Report:
    """Measure medvl's step of each system in bf16, one after another, until the time is up."""
    rows: list[Row] = []
    left = list(bench.size(tuple(SYSTEMS), DRY_RUN))
    while left and bench.remaining() > bench.size(EACH, 0.0):
        name = left.pop(0)
        recipe, preset = SYSTEMS[name]
        contender = system_contender(bench, recipe, bench.size(SIZE, 2), preset=preset, name=name)
        rows += measure_in_turns(bench, [contender], steps=8, rounds=1)
    note = f"no time was left for {', '.join(left)}" if left else ""
    return report(rows, {"systems": sum(row.error is None for row in rows)}, note)


def count_graphs(bench: Bench) -> Report:
    """Count the graphs and graph breaks of compiled fusion-encoders at tiny sizes, in steps of
    random masks and two lengths of text.

    The backend runs the graphs eagerly, so that no kernel is compiled.
    """
    figures: dict[str, float] = {}
    for name in bench.size(FUSION, FUSION[:1]):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        graphs = CompileCounterWithBackend("eager")
        model = build(SYSTEMS[name][0], "tiny").train()
        model.compile(backend=graphs)
        for step, tokens in enumerate((12, 12, 12, 10)):
            options = argparse.Namespace(batch=4, statements=6, tokens=tokens)
            model.before_step(step)
            model(random_batch(model, options)).total.backward()
        breaks = torch._dynamo.utils.counters["graph_break"]
        figures |= {f"{name}, graphs": graphs.frame_count, f"{name}, breaks": sum(breaks.values())}
    return report([], figures)


def system_contender(
    bench: Bench,
    recipe: str,
    size: int,
    *,
    preset: str = "paper",
    tokens: int = 64,
    name: str = "medvl: step",
) -> Contender:
    """Return medvl's step on the preset of a recipe with random weights and samples."""
    flops = Flops()

    def make() -> Run:
        torch.manual_seed(0)
        model = build(recipe, bench.size(preset, "tiny"))
        options = argparse.Namespace(batch=size, statements=6, tokens=bench.size(tokens, 12))
        batch = random_batch(model, options)
        with torch.no_grad():
            model.before_step(0)
        flops.count(model, batch, bench)
        return medvl_step(bench, model, [batch], channels_last=True)

    return Contender(name=name, build=make, samples=size, unit=UNIT, flops=flops)


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
        other_views_BVCHW=pixels()[:, None],
        has_other_view_BV=torch.ones(rows, 1, dtype=torch.bool),
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


def timed(model: Any, batch: Batch) -> float:
    """Return the CPU seconds of a forward and a backward pass."""
    start = time.process_time()
    model(batch).total.backward()
    taken = time.process_time() - start
    model.zero_grad()
    return taken


LINES = (
    Line(
        name="radzero-stored",
        device="cpu",
        measures="RadZero's step at 518 px: its image encoder trained, frozen, or stored",
        unit="s",
        rows=(
            TableRow(
                title="RadZero at 518 px, stored image features",
                peer="trained encoder: {trained s:.2f} s",
                ours="{stored s:.2f} s",
            ),
        ),
        seconds=60,
        function=measure_stored,
    ),
    Line(
        name="system-costs",
        device="cpu",
        measures="parameters, FLOPs and activations of every system's step at published size",
        unit="GFLOP, MiB",
        seconds=1800,
        function=count_systems,
        optional=True,
    ),
    Line(
        name="fusion-graphs",
        device="cpu",
        measures="compiled graphs and graph breaks of six fusion-encoders, tiny",
        unit="graphs",
        seconds=90,
        function=count_graphs,
        optional=True,
    ),
    Line(
        name="systems",
        device="gpu",
        measures=f"the steps of all systems at published size, B = {SIZE}, 64 tokens, six "
        "statements",
        unit="systems",
        seconds=240,
        function=measure_systems,
        optional=True,
    ),
)
