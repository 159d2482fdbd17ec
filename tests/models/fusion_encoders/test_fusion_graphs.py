"""Compiled fusion-encoders: few graphs, however many words are masked, and the same losses."""

from typing import Any

import pytest
import torch
from helpers.fusion_samples import TINY, make_batch, tiny_model, tiny_tokenizer
from torch._dynamo.testing import CompileCounterWithBackend

SIZES: dict[str, Any] = {
    "text_arguments": {**TINY["medvill"]["text_arguments"], "num_hidden_layers": 1},
    "image_tokens": 2,
}


@pytest.mark.fault("N3")
def test_a_compiled_step_is_one_graph_for_each_kind_of_shape() -> None:
    """The corruption is drawn before the graph; the second graph has a variable number of masked
    words. `scripts/benchmark.py fusion-graphs` counts those of other systems.
    """
    tokenizer, graphs = tiny_tokenizer(), CompileCounterWithBackend("eager")
    plain, compiled = (tiny_model("medvill", tokenizer, **SIZES) for _ in range(2))
    torch.compiler.reset()
    compiled.compile(backend=graphs)
    batch = make_batch(tokenizer, 4)
    masked = set()
    for seed in range(3):
        losses = []
        for model in (plain, compiled):
            torch.manual_seed(seed)
            losses.append(model(batch).total)
        torch.testing.assert_close(losses[1], losses[0])
        torch.manual_seed(seed)
        masked.add(len(plain.mask_words(batch).position_N))
    assert len(masked) > 1
    assert graphs.frame_count <= 2
