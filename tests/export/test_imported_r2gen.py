"""An imported R2Gen against the published network, written out from the file's own keys, on
small random files.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.published import random_tensors
from torch import Tensor

from medvl.data import train_words
from medvl.export import import_checkpoint
from medvl.schema import Batch

WIDTH, INNER, SLOTS, LAYERS, HEADS = 128, 48, 3, 2, 2
TEXTS = [
    "The heart is normal in size.",
    "There is a small left effusion.",
    "No effusion is seen.",
] * 3
Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def linears(*names: str, out: int = WIDTH, inside: int = WIDTH) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out, inside) for name in names}
    return shapes | {f"{name}.bias": (out,) for name in names}


def attention_shapes(name: str) -> Shapes:
    return linears(*(f"{name}.linears.{number}" for number in range(4)))


def norm_shapes(name: str) -> Shapes:
    return {f"{name}.gamma": (WIDTH,), f"{name}.beta": (WIDTH,)}


def published_file(words: int) -> Tensors:
    model = "encoder_decoder.model."
    shapes: Shapes = linears("encoder_decoder.att_embed.0", inside=32)
    shapes |= linears("encoder_decoder.logit", out=words)
    shapes |= {
        f"{model}tgt_embed.0.lut.weight": (words, WIDTH),
        f"{model}tgt_embed.1.pe": (1, 50, WIDTH),
    }
    shapes |= norm_shapes(f"{model}encoder.norm") | norm_shapes(f"{model}decoder.norm")
    for layer in range(LAYERS):
        for side, attentions, norms in (
            ("encoder", ["self_attn"], 2),
            ("decoder", ["self_attn", "src_attn"], 3),
        ):
            name = f"{model}{side}.layers.{layer}"
            for attention in attentions:
                shapes |= attention_shapes(f"{name}.{attention}")
            shapes |= linears(f"{name}.feed_forward.w_1", out=INNER)
            shapes |= linears(f"{name}.feed_forward.w_2", inside=INNER)
            for number in range(norms):
                norm = f"{name}.sublayer.{number}.norm"
                shapes |= norm_shapes(norm)
                if side == "decoder":
                    shapes |= linears(
                        f"{norm}.mlp_gamma.0", f"{norm}.mlp_beta.0", inside=SLOTS * WIDTH
                    )
                    shapes |= linears(f"{norm}.mlp_gamma.2", f"{norm}.mlp_beta.2")
    shapes |= attention_shapes(f"{model}rm.attn") | linears(f"{model}rm.mlp.0", f"{model}rm.mlp.2")
    shapes |= linears(f"{model}rm.W", f"{model}rm.U", out=2 * WIDTH)
    stem: Shapes = {"0.weight": (64, 3, 7, 7)}
    norms, wide = {"1": 64}, 64
    for stage in range(4, 8):
        name = f"{stage}.0"
        stem |= {f"{name}.conv1.weight": (8, wide, 1, 1), f"{name}.conv2.weight": (8, 8, 3, 3)}
        stem |= {
            f"{name}.conv3.weight": (32, 8, 1, 1),
            f"{name}.downsample.0.weight": (32, wide, 1, 1),
        }
        norms |= {f"{name}.bn1": 8, f"{name}.bn2": 8, f"{name}.bn3": 32, f"{name}.downsample.1": 32}
        wide = 32
    leaves = ("weight", "bias", "running_mean", "running_var")
    stem |= {f"{name}.{leaf}": (size,) for name, size in norms.items() for leaf in leaves}
    stem |= {f"{name}.num_batches_tracked": () for name in norms}
    return random_tensors(
        {**{f"visual_extractor.model.{key}": shape for key, shape in stem.items()}, **shapes}
    )


class Published:
    """The network of the released code in eval mode: the complete pass for any prefix of a
    report, no cache.
    """

    def __init__(self, file: Tensors) -> None:
        self.file = file

    def dense(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.file[f"{name}.weight"], self.file[f"{name}.bias"])

    def norm(self, x: Tensor, name: str, memory: Tensor | None = None) -> Tensor:
        gamma, beta = self.file[f"{name}.gamma"], self.file[f"{name}.beta"]
        if memory is not None:
            gamma, beta = (
                value + self.dense(F.relu(self.dense(memory, f"{name}.{mlp}.0")), f"{name}.{mlp}.2")
                for value, mlp in ((gamma, "mlp_gamma"), (beta, "mlp_beta"))
            )
        return gamma * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + beta

    def attend(
        self, query: Tensor, other: Tensor, name: str, hidden: Tensor | None = None
    ) -> Tensor:
        q, k, v = (
            self.dense(x, f"{name}.linears.{n}") for n, x in enumerate((query, other, other))
        )
        answers = []
        for one, keys, values in zip(
            q.chunk(HEADS, -1), k.chunk(HEADS, -1), v.chunk(HEADS, -1), strict=True
        ):
            scores = one @ keys.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            answers.append(
                (scores if hidden is None else scores.masked_fill(hidden, -1e9)).softmax(-1)
                @ values
            )
        return self.dense(torch.cat(answers, -1), f"{name}.linears.3")

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        return self.dense(F.relu(self.dense(x, f"{name}.w_1")), f"{name}.w_2")

    def scores(self, features: Tensor, ids: Tensor) -> Tensor:
        """(T, V) of one study, from its cells (P, 32) and the words so far."""
        model = "encoder_decoder.model."
        x = F.relu(self.dense(features, "encoder_decoder.att_embed.0"))
        for layer in range(LAYERS):
            name = f"{model}encoder.layers.{layer}"
            normed = self.norm(x, f"{name}.sublayer.0.norm")
            x = x + self.attend(normed, normed, f"{name}.self_attn")
            x = x + self.feed_forward(
                self.norm(x, f"{name}.sublayer.1.norm"), f"{name}.feed_forward"
            )
        cells = self.norm(x, f"{model}encoder.norm")
        rate = torch.exp(torch.arange(0, WIDTH, 2) * -(math.log(10000.0) / WIDTH))
        angle = torch.arange(len(ids))[:, None] * rate
        table = torch.stack([angle.sin(), angle.cos()], 2).flatten(1)
        y = self.file[f"{model}tgt_embed.0.lut.weight"][ids] * math.sqrt(WIDTH) + table
        memory, states = torch.eye(SLOTS, WIDTH), []
        for word in y:
            step = memory + self.attend(memory, torch.cat([memory, word[None]]), f"{model}rm.attn")
            step = step + F.relu(
                self.dense(F.relu(self.dense(step, f"{model}rm.mlp.0")), f"{model}rm.mlp.2")
            )
            gates = self.dense(word, f"{model}rm.W") + self.dense(memory.tanh(), f"{model}rm.U")
            first, second = gates.sigmoid().split(WIDTH, -1)
            memory = first * step.tanh() + second * memory
            states.append(memory.flatten())
        m, later = torch.stack(states), torch.ones(len(ids), len(ids)).triu(1).bool()
        for layer in range(LAYERS):
            name = f"{model}decoder.layers.{layer}"
            normed = self.norm(y, f"{name}.sublayer.0.norm", m)
            y = y + self.attend(normed, normed, f"{name}.self_attn", later)
            y = y + self.attend(
                self.norm(y, f"{name}.sublayer.1.norm", m), cells, f"{name}.src_attn"
            )
            y = y + self.feed_forward(
                self.norm(y, f"{name}.sublayer.2.norm", m), f"{name}.feed_forward"
            )
        return self.dense(self.norm(y, f"{model}decoder.norm"), "encoder_decoder.logit")


@pytest.mark.parametrize("system", ["r2gen", "r2gen_mimic"])
def test_imported_scores_equal_the_published_network(tmp_path: Path, system: str) -> None:
    tokenizer = train_words(TEXTS, min_frequency=3, cleaning="r2gen")
    file = published_file(tokenizer.vocab_size)
    wrapped = {f"module.{key}": tensor for key, tensor in file.items()}
    torch.save(
        {"epoch": 7, "state_dict": wrapped, "monitor_best": 0.1}, tmp_path / "model_best.pth"
    )
    imported = import_checkpoint(
        system, tmp_path / "model_best.pth", tokenizer=tokenizer, out=tmp_path / "out"
    )
    model = imported.model
    assert set(imported.left_out) == {"encoder_decoder.model.tgt_embed.1.pe"}
    assert (model.config.views, model.config.max_tokens) == (
        (2, 61) if system == "r2gen" else (1, 101)
    )
    ids = torch.randint(0, tokenizer.vocab_size, (2, 7), generator=torch.Generator().manual_seed(1))
    images = torch.randn(2, 2, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        views = [model.image_encoder(images[:, view]).patches_BPD for view in range(2)]
        tokens = model.image_tokens(images[:, 0], images[:, 1])
        scores = model.score_next(ids, tokens)
        for row in range(2):
            features = (
                torch.cat([view[row] for view in views]) if system == "r2gen" else views[0][row]
            )
            expected = Published(file).scores(features, ids[row])
            torch.testing.assert_close(scores[row], expected, rtol=1e-3, atol=1e-3)
    batch = Batch(
        keys=["a"],
        image_BCHW=torch.zeros(1, 1, 224, 224, dtype=torch.uint8),
        ids_BT=ids[:1],
        mask_BT=ids[:1] >= 0,
        labels_BL=torch.zeros(1, 0),
        texts=[""],
    )
    assert model.write_reports(batch).ids_BT.shape[0] == 1
