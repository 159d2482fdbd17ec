"""Cost of a step of every system at its published size.

    python scripts/benchmark_systems.py                                    # counts: half an hour on one core
    python scripts/benchmark_systems.py --systems radzero,mavl --seconds
    python scripts/benchmark_systems.py --seconds --device cuda --batch 32

Models are those of the presets `paper`, with random weights. They read random images, reports of `--tokens`, and
`--statements` statements of twelve tokens where a system reads statements. FLOPs are counted by torch for the forward
pass, a multiplication and an addition as two; activations are the bytes that autograd keeps for the backward pass, in
float32, weights left out. Weights, gradients and the two moments of Adam need 16 bytes a trained parameter besides.
`--seconds` times forward and backward passes, without a loader and without an optimiser. ARL, BERTHop and UMRL need
files that are made from data (a knowledge graph, a fitted image encoder, principal components) and are left out.
"""

import argparse
import dataclasses
import math
import runpy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from medvl.data import Tokenizer, train_wordpiece
from medvl.models import create_model
from medvl.schema import Batch

RECIPES = Path(__file__).parents[1] / "recipes"
SYSTEMS = {
    **{
        name: (f"{name}_mimic", "paper")
        for name in (
            *("bfspr", "biovil", "biovil_t", "carzero", "chexzero", "convirt", "cxrclip", "kad", "lovt", "mavl"),
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
    "m2i2": ("m2i2_clef", "paper"),
    "m3ae": ("m3ae_roco_medicat", "paper"),
    "mumc": ("mumc_figures", "paper"),
    "ptunifier": ("ptunifier_figures", "paper"),
    "r2gen": ("r2gen_iu", "paper"),
}
"""Name -> recipe and preset."""
STEPS = 5


def main() -> None:
    """Print a row for each system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="names separated by commas")
    parser.add_argument("--size", choices=("paper", "tiny"), default="paper", help="preset of the recipes")
    parser.add_argument("--batch", type=int, default=2, help="samples of a step")
    parser.add_argument("--statements", type=int, default=6, help="statements of a sample")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a report")
    parser.add_argument("--seconds", action="store_true", help="also time forward and backward passes")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    unknown = sorted(set(options.systems.split(",")) - set(SYSTEMS))
    if unknown:
        parser.error(f"unknown systems {', '.join(unknown)}: choose from {', '.join(SYSTEMS)}")
    columns = ("system", "image", "parameters", "trained", "GFLOP/sample", "activations", "seconds/step")
    print("".join(f"{column:>14}" for column in columns))
    for name in options.systems.split(","):
        print("".join(f"{cell:>14}" for cell in row(name, options)), flush=True)


def row(name: str, options: argparse.Namespace) -> list[str]:
    """Return the cells of a system."""
    recipe, preset = SYSTEMS[name]
    model = build(recipe, "tiny" if options.size == "tiny" else preset).train().to(options.device)
    batch = random_batch(model, options).to(options.device)
    model.before_step(0)
    with torch.no_grad():
        model(batch)  # fills books of queries, which happens once in a run
    with FlopCounterMode(display=False) as counter:
        model(batch)
    kept = activations(model, batch)
    every, trained = (
        sum(p.numel() for p in model.parameters() if p.requires_grad or not only) / 1e6 for only in (False, True)
    )
    return [
        name,
        str(batch.image_BCHW.shape[-1]),
        f"{every:.1f} M",
        f"{trained:.1f} M",
        f"{counter.get_total_flops() / options.batch / 1e9:.1f}",
        f"{kept / options.batch / 2**20:.0f} MiB",
        f"{seconds(model, batch):.2f}" if options.seconds else "-",
    ]


def build(recipe: str, preset: str) -> Any:
    """Return the model of a preset with random weights and a small vocabulary."""
    config = runpy.run_path(str(RECIPES / f"{recipe}.py"))["PRESETS"][preset].model
    weights = {name: None for name in ("image_weights", "text_weights") if hasattr(config, name)}
    config = dataclasses.replace(config, **weights)
    return create_model(config, pretrained=False, tokenizer=vocabulary())


def vocabulary() -> Tokenizer:
    """Return a tokenizer with the letters of reports."""
    texts = ["There is no small left pleural effusion.", "The heart is enlarged; jugular, quite hazy zones (x-ray)."]
    return train_wordpiece(texts, vocab_size=200, min_frequency=1, max_tokens=128)


def random_batch(model: Any, options: argparse.Namespace) -> Batch:
    """Return random samples with every part that one of the systems reads."""
    config, rows = model.config, options.batch
    vocab = model.text_encoder.vocab_size if hasattr(model, "text_encoder") else vocabulary().vocab_size
    side = config.image_size * getattr(config, "target_scale", 1)

    def ids(*shape: int) -> Tensor:
        return torch.randint(10, vocab, shape)

    def pixels() -> Tensor:
        return torch.randint(0, 256, (rows, 1, side, side), dtype=torch.uint8)

    length = min(options.tokens, config.max_tokens)
    entities = len(getattr(config, "entities", ())) if model.inputs.labels else 0
    statements = ids(rows, options.statements, 12)
    return Batch(
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
        sentence_BT=(torch.arange(length) // 12).expand(rows, length),
        prior_BCHW=pixels(),
        has_prior_B=torch.ones(rows, dtype=torch.bool),
    )


def activations(model: Any, batch: Batch) -> int:
    """Return the bytes of distinct tensors that autograd keeps, without weights."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
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


def seconds(model: Any, batch: Batch) -> float:
    """Return the median time of a forward and a backward pass."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        model(batch).total.backward()
        if batch.image_BCHW.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        model.zero_grad()
    return statistics.median(times)


if __name__ == "__main__":
    main()
