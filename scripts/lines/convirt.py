"""ConVIRT with resnet50 on 224 pixels and BERT-base, batches of 256 in bf16: its step, and its
run from files.
"""

import contextlib
import dataclasses
import functools
import itertools
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure.bench import Bench
from measure.line import Line, Report, Row, TableRow, ratio, report
from measure.medvl_step import medvl_step
from measure.stock_convirt import (
    COMPILED,
    FROZEN,
    PADDED,
    PEERS,
    Form,
    Sizes,
    stock_step,
    untuned,
)
from measure.timing import Contender, Flops, Run, measure_in_turns, repeat, set_flops
from torch import Tensor

from lines.text import MAX_LENGTH, VOCABULARY, inputs as random_texts
from medvl.data import ShardSource, WholeText, train_wordpiece
from medvl.models import ConVIRTConfig, create_model
from medvl.schema import Batch
from medvl.train import Constant

# Internals on purpose: the parts of a run are measured one by one.
from medvl.train.doctor.examine import flops_per_sample, synchronize
from medvl.train.loop.trainer import Training
from medvl.train.tasks.pretraining import open_data

RECIPE = Path(__file__).parents[2] / "recipes" / "convirt_mimic.py"
TINY = ConVIRTConfig(
    image_encoder="timm:test_resnet",
    text_encoder="tiny_bert",
    text_arguments={"num_hidden_layers": 2},
    image_size=32,
    projection_dim=32,
    frozen_text_layers=0,
    vocab_size=VOCABULARY,
)
TINY_STOCK = Sizes(
    image="test_resnet",
    bert={
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 96,
    },
)
LETTERS = 120
"""Size of a vocabulary of letters and few syllables, with which all texts are cut to the full
128 tokens.
"""
LENGTHS = 8
"""Texts at whose lengths the operations of packed texts are counted."""


class FromFiles:
    """A training run from shards: the recipe's settings, compiled, without frozen layers, with
    128 real tokens.
    """

    def __init__(self, bench: Bench, size: int) -> None:
        self._bench, self._size, self._numbers = bench, size, itertools.count()
        self._stack = contextlib.ExitStack()
        self._training: Training | None = None
        self._side: Any = None
        self.flops = Flops()
        self.real_tokens = 0.0
        """Share of the token positions that are not padding."""

    def build(self) -> Run:
        """Open the run and return its step on batches that are kept on the device."""
        bench, kept = self._bench, self._bench.size(4, 1)
        training = self._training = self._open()
        stream, step = training.state.stream, training.step
        # nothing is fetched ahead while step and loader are measured
        self._side = stream.side
        stream.side = None
        placed = [
            step.place(batch) for _ in range(kept) for batch in stream.take(next(self._numbers))
        ]
        self.flops.count(training.state.model.whole, placed[0], bench)
        self.real_tokens = float(torch.cat([batch.mask_BT for batch in placed]).float().mean())
        return repeat(
            lambda number: step(number, training.state.rate.at(0), [placed[number % kept]], 1)
        )

    def measure(self) -> tuple[Row, Row, float]:
        """Return the loader alone, the run from files to updates, and the share of time that it
        waits for data.
        """
        training, bench = self._training, self._bench
        assert training is not None
        stream, loader = (
            training.state.stream,
            Row(contender="medvl: loader alone", unit="images/s"),
        )
        loader.rate, _ = self._rate_in_epoch(training, lambda number: list(stream.take(number)))
        stream.side = self._side
        run = Row(contender="medvl: files to updates")
        run.rate, waiting = self._rate_in_epoch(
            training,
            lambda number: training.step(
                number, 0.0, stream.take(number), stream.micro_batches(number)
            ),
        )
        set_flops(run, self.flops, bench)
        return loader, run, waiting

    def _rate_in_epoch(
        self, training: Training, update: Callable[[int], object]
    ) -> tuple[float, float]:
        """Return pairs per second within an epoch, and the share of time that they waited for data.

        The clock starts when each worker has made a batch: these 23,000 images are an epoch of
        eight seconds, and the second in which workers make their first batches would count for more
        than in an epoch of MIMIC-CXR.
        """
        stream, device = training.state.stream, training.state.ranks.device
        filling = self._bench.size(self._bench.data_size.workers, 0)
        while (number := next(self._numbers)) % stream.steps_per_epoch:
            list(stream.take(number))
        for _ in range(filling):
            update(number)
            number = next(self._numbers)
        synchronize(device)
        first, started, waited = number, time.perf_counter(), stream.wait_seconds
        while True:
            update(number)
            if (number + 1) % stream.steps_per_epoch == 0:
                break
            number = next(self._numbers)
        synchronize(device)
        elapsed = time.perf_counter() - started
        return (number + 1 - first) * self._size / elapsed, (stream.wait_seconds - waited) / elapsed

    def close(self) -> None:
        """Close the run."""
        self._stack.close()

    def _open(self) -> Training:
        bench, folder, size = self._bench, self._bench.data(), self._size
        source = ShardSource(folder)
        texts = (
            text
            for place in range(min(400, len(source)))
            for text in source.sample(place).sections.values()
        )
        tokenizer = train_wordpiece(texts, vocab_size=LETTERS, max_tokens=MAX_LENGTH)
        paper = runpy.run_path(str(RECIPE))["PRESETS"]["paper"]
        image = dataclasses.replace(paper.data.image, size=bench.size(224, TINY.image_size))
        data = dataclasses.replace(
            paper.data,
            train=str(folder),
            valid=None,
            text=WholeText(),
            image=image,
            workers=bench.data_size.workers,
        )
        train = dataclasses.replace(
            paper.train,
            run_dir=bench.folder / "convirt",
            global_batch=size,
            compile=True,
            early_stop_patience=None,
            tensorboard=False,
        )
        model = create_model(convirt_config(bench), pretrained=False, tokenizer=tokenizer)
        train.run_dir.mkdir()
        loader = open_data(data, model, size).train
        optim = dataclasses.replace(paper.optim, lr=1e-5, schedule=Constant())
        training = Training(model, loader, bench.ranks, optim, train)
        self._stack.callback(training.close)
        return training


def measure_from_files(bench: Bench) -> Report:
    """Measure the step beside the stock forms in turns, then the loader, and the run from files
    to updates.
    """
    bench.start_data()
    size = bench.size(256, 4)
    stock = stock_inputs(bench, torch.full((size,), bench.size(MAX_LENGTH, 12)))
    run = FromFiles(bench, size)
    ours = Contender(
        name="medvl: step, compiled", build=run.build, samples=size, flops=run.flops, warm_up=4
    )
    with contextlib.closing(run):
        # The first stock form compiles while the images are drawn.
        compiled, peers = (
            stock_contender(form, bench, stock, run.flops) for form in (COMPILED, PEERS)
        )
        compiled_row, step, peers_row = measure_in_turns(bench, (compiled, ours, peers))
        if step.error is not None:
            return report([step, compiled_row, peers_row], {})
        loader, whole, waiting = run.measure()
    slower = min(step.rate or 0.0, loader.rate or 0.0)
    figures = {
        "pairs/s from files": whole.rate,
        "of the slower of step and loader": ratio(whole.rate, slower),
        "times the compiled stock step": ratio(step.rate, compiled_row.rate),
        "times the peers' step": ratio(step.rate, peers_row.rate),
    }
    notes = (
        f"real tokens: {run.real_tokens:.0%} of the positions",
        f"waiting for data: {waiting:.1%} of the time",
    )
    return report([whole, step, loader, compiled_row, peers_row], figures, *notes)


def measure_lengths(bench: Bench, frozen: int, stock: Form) -> Report:
    """Measure the step on texts of different lengths: packed and compiled, beside the padded and
    compiled stock form.

    Attention dropout is 0 in both, as the GPU's kernel for packed texts needs it.
    """
    size, count = bench.size(256, 4), bench.size(8, 2)
    texts = [random_texts(size, torch.device("cpu"), seed) for seed in range(count)]
    longest = bench.size(MAX_LENGTH, 24)
    batches = [
        batch_of(bench, ids_BT[:, :longest], mask_BT[:, :longest]) for ids_BT, mask_BT in texts
    ]
    config = dataclasses.replace(
        convirt_config(bench),
        attention_dropout=0.0,
        frozen_text_layers=bench.size(frozen, min(frozen, 1)),
    )
    flops = Flops()

    def build() -> Run:
        torch.manual_seed(0)
        model = create_model(config, pretrained=False, tokenizer=None).to(bench.device)
        flops.per_sample = flops_of_lengths(model, batches[0], bench)
        return medvl_step(bench, model, batches, channels_last=True, compile=True, packed_text=True)

    mask_BT = batches[0].mask_BT
    inputs = stock_inputs(bench, mask_BT.sum(dim=1))
    ours = Contender(
        name="medvl: packed, compiled", build=build, samples=size, flops=flops, warm_up=count
    )
    rows = measure_in_turns(bench, (ours, stock_contender(stock, bench, inputs, flops)))
    share = float(torch.cat([batch.mask_BT.flatten() for batch in batches]).float().mean())
    figures = {
        "pairs/s": rows[0].rate,
        "times the padded stock step": ratio(rows[0].rate, rows[1].rate),
    }
    return report(
        rows,
        figures,
        f"real tokens: {share:.0%} of the positions; operations of padding do not count",
    )


def convirt_config(bench: Bench) -> ConVIRTConfig:
    """Return the paper's settings with random weights and without frozen layers."""
    full = ConVIRTConfig(frozen_text_layers=0, vocab_size=VOCABULARY)
    return bench.size(full, TINY)


def batch_of(bench: Bench, ids_BT: Tensor, mask_BT: Tensor) -> Batch:
    """Return a batch of random images with these texts."""
    side, size = bench.size(224, TINY.image_size), len(ids_BT)
    generator = torch.Generator().manual_seed(0)
    return Batch(
        keys=[str(row) for row in range(size)],
        image_BCHW=torch.randint(
            0, 256, (size, 1, side, side), dtype=torch.uint8, generator=generator
        ),
        ids_BT=ids_BT.contiguous(),  # as from a loader; other strides would be compiled anew
        mask_BT=mask_BT.contiguous(),
        labels_BL=torch.zeros(size, 0),
        texts=[""] * size,
    )


def flops_of_lengths(model: Any, batch: Batch, bench: Bench) -> float:
    """Return the operations per pair without padding: the mean over texts of evenly spaced ranks of
    length.

    Text by text, because torch does not count the kernel of packed attention.
    """
    order_B = batch.mask_BT.sum(dim=1).argsort()
    step = max(1, len(order_B) // LENGTHS)
    total, chosen = 0.0, order_B[step // 2 :: step].tolist()
    for row in chosen:
        length, rows = int(batch.mask_BT[row].sum()), [row, row]
        pair = batch_of(bench, batch.ids_BT[rows, :length], batch.mask_BT[rows, :length])
        total += flops_per_sample(model, pair.to(bench.device), bench.precision)
    return total / len(chosen)


def stock_inputs(bench: Bench, length_B: Tensor) -> dict[str, Tensor]:
    """Return random inputs of the stock forms on the device: padded to the longest text of any
    batch.
    """
    size, side = len(length_B), bench.size(224, TINY.image_size)
    width = bench.size(MAX_LENGTH, int(length_B.max()))
    vocabulary, generator = VOCABULARY, torch.Generator().manual_seed(0)
    return {
        "image_BCHW": torch.randn(size, 3, side, side, generator=generator).to(bench.device),
        "ids_BT": torch.randint(5, vocabulary, (size, width), generator=generator).to(bench.device),
        "mask_BT": (torch.arange(width) < length_B[:, None].cpu()).long().to(bench.device),
    }


def stock_contender(form: Form, bench: Bench, inputs: dict[str, Tensor], flops: Flops) -> Contender:
    """Return a stock form as a contender."""
    return Contender(
        name=form.name,
        build=functools.partial(stock_step, form, bench.size(Sizes(), TINY_STOCK), **inputs),
        samples=len(inputs["ids_BT"]),
        flops=flops,
        settings=contextlib.nullcontext if form.compiled else untuned,
    )


LENGTH_CELLS = {
    "peer": "padded: {rows[1].rate:,.0f} pairs/s",
    "ours": "{rows[0].rate:,.0f} pairs/s",
}
LINES = (
    Line(
        name="convirt",
        device="gpu",
        measures="ConVIRT, resnet50 on 224 pixels and BERT-base, B = 256, 128 real tokens, from "
        "files to updates",
        unit="pairs/s",
        rows=(
            TableRow(
                title="`convirt`: ResNet-50, BERT-base, batch 256, from files",
                target="3,000 pairs/s",
                peer="peers' style, step: {rows[4].rate:,.0f}; compiled: {rows[3].rate:,.0f} "
                "pairs/s",
                ours="{pairs/s from files:,.0f} pairs/s",
            ),
            TableRow(
                title="`convirt`: share of the slower of step and loader",
                target="0.95",
                ours="{of the slower of step and loader:.3f}",
            ),
        ),
        seconds=200,
        function=measure_from_files,
    ),
    Line(
        name="convirt-lengths",
        device="gpu",
        measures="its step at report lengths of 70 tokens on average: packed, compiled, "
        "attention dropout 0",
        unit="pairs/s",
        rows=(
            TableRow(
                title="`convirt-lengths`: reports of 70 tokens, packed",
                target="4,000 pairs/s",
                **LENGTH_CELLS,
            ),
        ),
        seconds=120,
        function=functools.partial(measure_lengths, frozen=0, stock=PADDED),
    ),
    Line(
        name="convirt-frozen",
        device="gpu",
        measures="the same with the paper's frozen layers: BERT's embeddings and first six",
        unit="pairs/s",
        rows=(
            TableRow(
                title="`convirt-frozen`: the same, six layers frozen",
                target="4,600 pairs/s",
                **LENGTH_CELLS,
            ),
        ),
        seconds=70,
        function=functools.partial(measure_lengths, frozen=6, stock=FROZEN),
    ),
)
