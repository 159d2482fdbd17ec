"""Benchmark of report generation with cached keys and values against encoding the whole sequence
for every word.

    python scripts/benchmark_generation.py                       # counts only, on the meta device: seconds
    python scripts/benchmark_generation.py --seconds --size tiny
    python scripts/benchmark_generation.py --seconds --device cuda --batch 32
    python scripts/benchmark_generation.py --size r2gen --tokens 60 --seconds --batch 1      # two views

Both forms generate the same words (tests/models/fusion_encoders/test_report_writing.py,
tests/models/report_generators/test_r2gen.py). FLOPs are counted by torch for one image (two in
R2Gen), a multiplication and an addition as two; MedViLL's published size has 256 cells of an image
at 512 pixels. The form without a cache is the released one. MedViLL: image block, words and a mask
token through BERT at every step, the image encoder once. R2Gen: memory and decoder over all words
at every step.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
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
R2GEN = {"r2gen": R2GenConfig(vocab_size=761),
    "r2gen-tiny": R2GenConfig(image_encoder="resnet_tiny", image_size=64,
                                                                           width=32,
                                                                           vocab_size=100)}  # fmt: skip
"""The published sizes for IU X-ray, and small ones."""
CLS, SEP, MASK = 1, 2, 3
"""Arbitrary ids, which do not change the arithmetic."""


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES, *R2GEN], default="paper")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", action="store_true", help="measure time as well")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads would wait for cores that are busy
    config: Any = {**SIZES, **R2GEN}[options.size]
    system: Any = R2Gen if options.size in R2GEN else MedViLL
    with torch.device("meta"):
        model = system.build(config, pretrained=False, tokenizer=None).eval()
    print(f"{options.size}: {options.tokens} tokens a report, GFLOP an image")
    forms: dict[str, Callable[[Any, Tensor, int], None]] = {"cached": cached, "uncached": uncached}
    if system is R2Gen:
        forms = {"cached": cached_memory, "uncached": uncached_memory}
    counts = {}
    for name, write in forms.items():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            write(model, _images(config, 1, "meta"), options.tokens)
        counts[name] = counter.get_total_flops() / 1e9
        print(f"  {name:9} {counts[name]:9.1f}")
    print(f"  ratio     {counts['uncached'] / counts['cached']:9.1f}")
    if options.seconds:
        model = system.build(config, pretrained=False, tokenizer=None).eval().to(options.device)
        print(f"reports/s, batches of {options.batch} on {options.device}")
        for name, write in forms.items():
            seconds = _seconds(
                write, model, _images(config, options.batch, options.device), options.tokens
            )
            print(f"  {name:9} {options.batch / seconds:9.2f}")


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


def _images(config: MedViLLConfig | R2GenConfig, batch: int, device: str) -> Tensor:
    return torch.zeros(
        batch, 1, config.image_size, config.image_size, dtype=torch.uint8, device=device
    )


def _seconds(
    write: Callable[[Any, Tensor, int], None], model: Any, image: Tensor, tokens: int
) -> float:
    with torch.no_grad():
        write(model, image, 2)
        _synchronize(image)
        start = time.perf_counter()
        write(model, image, tokens)
        _synchronize(image)
    return time.perf_counter() - start


def _synchronize(image: Tensor) -> None:
    if image.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
