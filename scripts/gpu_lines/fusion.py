"""Fusion-encoders: pretraining steps of M3AE and MedViLL, and decoding of reports."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import benchmark_fusion
import benchmark_generation
import torch
from benchmark_systems import build, random_batch

from gpu_lines.bench import Bench
from gpu_lines.line import Line, Report, ratio, report
from gpu_lines.medvl_step import medvl_step
from gpu_lines.timing import Contender, Flops, Run, measure_in_turns, repeat
from medvl.models import M3AE, MedViLL
from medvl.schema import Batch
from medvl.train.doctor.examine import (
    COUNTED,
    count_operations,
)  # internal: the figures are those of `medvl doctor`

UNIT = "samples/s"


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
                benchmark_fusion.SIZES[bench.size("paper", "tiny")],
                pretrained=False,
                tokenizer=None,
            )
            built.to(device).train()
            fused = device.type == "cuda" or None
            trained.append((built, torch.optim.AdamW(built.parameters(), lr=1e-5, fused=fused)))
        model, optimizer = trained[0]
        inputs, few = (
            benchmark_fusion.on_device(*benchmark_fusion.inputs(model, rows), str(device))
            for rows in (size, min(size, COUNTED))
        )

        def loss_of(batch: Batch, corruption: Any) -> torch.Tensor:
            return model.losses(form(model, batch, corruption), corruption).total

        flops.per_sample = count_operations(lambda: loss_of(*few), model, bench.precision) / len(
            few[0]
        )

        def step(number: int) -> None:
            with bench.precision.autocast():
                loss = loss_of(*inputs)
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
            bare_contender(published, benchmark_fusion.separate_forwards, shares=shared),
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


def measure_decoding(bench: Bench) -> Report:
    """Measure greedy reports of 100 tokens by MedViLL, with cached keys and values and without."""
    size, tokens = bench.size((32, 100), (2, 3))
    models: list[MedViLL] = []

    def decode(write: Callable[[MedViLL, torch.Tensor, int], None]) -> Run:
        if not models:
            torch.manual_seed(0)
            config = benchmark_generation.SIZES[bench.size("paper", "tiny")]
            models.append(
                MedViLL.build(config, pretrained=False, tokenizer=None).to(bench.device).eval()
            )
        side = models[0].config.image_size
        image = torch.zeros(size, 1, side, side, dtype=torch.uint8, device=bench.device)

        def step(number: int) -> None:
            with torch.inference_mode(), bench.precision.autocast():
                write(models[0], image, tokens)

        return repeat(step)

    cached, uncached = "medvl: cached keys and values", "without a cache, as published"
    rows = measure_in_turns(
        bench,
        (
            Contender(
                name=cached,
                build=functools.partial(decode, benchmark_generation.cached),
                samples=size * tokens,
                unit="tokens/s",
                warm_up=1,
            ),
            Contender(
                name=uncached,
                build=functools.partial(decode, benchmark_generation.uncached),
                samples=size * tokens,
                unit="tokens/s",
                warm_up=1,
                shares=cached,
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


LINES = {
    "m3ae": Line(
        name="m3ae",
        measures="M3AE at published size (288 pixels, 64 tokens), B = 64: the pretraining step",
        stock="not measured; three passes count 1.40 times the operations",
        seconds=65,
        function=measure_m3ae,
    ),
    "medvill": Line(
        name="medvill",
        measures="MedViLL at published size (512 pixels, 255 tokens), B = 64: the pretraining step",
        stock="not measured",
        seconds=20,
        function=measure_medvill,
    ),
    "decoding": Line(
        name="decoding",
        measures="MedViLL writes 32 reports of 100 tokens, greedy",
        stock="not measured; without a cache 43 times the operations",
        seconds=30,
        function=measure_decoding,
    ),
}
