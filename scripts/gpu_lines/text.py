"""BERT-base alone: pretraining on masked words, and the cost of attention dropout in a compiled
encoder.
"""

import argparse
import functools
from typing import Any

import torch
from benchmark_text import (
    MAX_LENGTH,
    SIZES,
    VOCABULARY,
    make_language_model,
    make_update,
    mask_words,
    text_batch,
)

from gpu_lines.bench import Bench
from gpu_lines.line import Goal, Line, Report, ratio, report
from gpu_lines.medvl_step import medvl_step
from gpu_lines.timing import Contender, Flops, Run, measure_in_turns, repeat
from medvl.encoders import create_text_encoder

MASK_ID = 4
UNIT = "texts/s"
TINY = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
}


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


LINES = {
    "bert": Line(
        name="bert",
        measures="BERT-base on masked words, B = 1,024 texts (512 below 100 GB) of 128 tokens: "
        "the update",
        goals=(Goal(figure="TFLOP/s", value=314),),
        stock="encoder alone 4,657 texts/s, 314 TFLOP/s, eager",
        seconds=75,
        function=measure_pretraining,
    ),
    "attention-dropout": Line(
        name="attention-dropout",
        measures="what attention dropout costs BERT-base with compiled layers, B = 256, 128 tokens",
        stock="ConVIRT's compiled step 96.2 ms with, 86.2 ms without",
        seconds=40,
        function=measure_attention_dropout,
    ),
}
