"""Layers of published systems, written out plainly from the keys of their files, and shapes of
small files.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.export import import_checkpoint

Tensors = dict[str, Tensor]
WIDTH, WORDS, EMBED = 128, 50, 24  # two heads of 64


def imported(tensors: Tensors, system: str, folder: Path, **options: Any) -> Any:
    torch.save({"state_dict": tensors}, folder / "file.ckpt")
    return import_checkpoint(system, folder / "file.ckpt", **options).model


def linear(x: Tensor, file: Tensors, name: str) -> Tensor:
    return F.linear(x, file[f"{name}.weight"], file.get(f"{name}.bias"))


def norm(x: Tensor, file: Tensors, name: str, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], file[f"{name}.weight"], file[f"{name}.bias"], eps)


def attend(
    query: Tensor, key: Tensor, value: Tensor, heads: int, hidden: Tensor | None = None
) -> Tensor:
    """Softmax attention head by head; `hidden` is True where a query must not attend."""
    answers = []
    for q, k, v in zip(
        query.chunk(heads, -1), key.chunk(heads, -1), value.chunk(heads, -1), strict=True
    ):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        answers.append(scores.softmax(-1) @ v)
    return torch.cat(answers, dim=-1)


def clip_block(x: Tensor, file: Tensors, name: str, hidden: Tensor | None = None) -> Tensor:
    """OpenAI's block: pre-LN, one matrix for query, key and value, x * sigmoid(1.702 x)."""
    y = norm(x, file, f"{name}.ln_1", 1e-5)
    q, k, v = F.linear(
        y, file[f"{name}.attn.in_proj_weight"], file[f"{name}.attn.in_proj_bias"]
    ).chunk(3, dim=-1)
    x = x + linear(attend(q, k, v, x.shape[-1] // 64, hidden), file, f"{name}.attn.out_proj")
    y = linear(norm(x, file, f"{name}.ln_2", 1e-5), file, f"{name}.mlp.c_fc")
    return x + linear(y * torch.sigmoid(1.702 * y), file, f"{name}.mlp.c_proj")


def clip_shapes(prefix: str, width: int, layers: int) -> dict[str, tuple[int, ...]]:
    block: dict[str, tuple[int, ...]] = {
        "attn.in_proj_weight": (3 * width, width),
        "attn.in_proj_bias": (3 * width,),
        "attn.out_proj.weight": (width, width),
        "attn.out_proj.bias": (width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (width, 4 * width),
        "mlp.c_proj.bias": (width,),
        **{f"ln_{index}.{leaf}": (width,) for index in (1, 2) for leaf in ("weight", "bias")},
    }
    return {
        f"{prefix}.{layer}.{name}": shape
        for layer in range(layers)
        for name, shape in block.items()
    }


def clip_visual(prefix: str, side: int, patch: int, layers: int) -> dict[str, tuple[int, ...]]:
    norms = {
        f"{prefix}{name}.{leaf}": (WIDTH,)
        for name in ("ln_pre", "ln_post")
        for leaf in ("weight", "bias")
    }
    return {
        f"{prefix}class_embedding": (WIDTH,),
        f"{prefix}positional_embedding": (1 + (side // patch) ** 2, WIDTH),
        f"{prefix}conv1.weight": (WIDTH, 3, patch, patch),
        **norms,
        **clip_shapes(f"{prefix}transformer.resblocks", WIDTH, layers),
    }


def clip_encode(pixels: Tensor, file: Tensors, prefix: str, layers: int) -> Tensor:
    """Return the states (B, 1 + P, D) after the final norm."""
    patches = F.conv2d(
        pixels, file[f"{prefix}conv1.weight"], stride=file[f"{prefix}conv1.weight"].shape[-1]
    )
    tokens = patches.flatten(2).transpose(1, 2)
    x = torch.cat([file[f"{prefix}class_embedding"].expand(len(tokens), 1, -1), tokens], dim=1)
    x = norm(x + file[f"{prefix}positional_embedding"], file, f"{prefix}ln_pre", 1e-5)
    for layer in range(layers):
        x = clip_block(x, file, f"{prefix}transformer.resblocks.{layer}")
    return norm(x, file, f"{prefix}ln_post", 1e-5)


def bert_shapes(prefix: str, layers: int, **sizes: int) -> dict[str, tuple[int, ...]]:
    positions, types = sizes.get("positions", 16), sizes.get("types", 2)
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.word_embeddings.weight": (sizes.get("words", WORDS), WIDTH),
        f"{prefix}embeddings.position_embeddings.weight": (positions, WIDTH),
        f"{prefix}embeddings.LayerNorm.weight": (WIDTH,),
        f"{prefix}embeddings.LayerNorm.bias": (WIDTH,),
    }
    if types:
        shapes[f"{prefix}embeddings.token_type_embeddings.weight"] = (types, WIDTH)
    for layer in range(layers):
        shapes |= bert_layer_shapes(f"{prefix}encoder.layer.{layer}.", ["attention"])
    return shapes


def m3ae_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of an M3AE of 64 pixels with this number of layers of co-attention, and a pixel
    decoder of width 64.
    """
    square = (
        "multi_modal_language_proj",
        "multi_modal_vision_proj",
        "multi_modal_language_pooler.dense",
    )
    square += ("multi_modal_vision_pooler.dense", "mlm_head.transform.dense")
    decoder, attentions = 64, ["attention", "crossattention"]
    streams = [
        f"multi_modal_{side}_layers.{layer}."
        for side in ("language", "vision")
        for layer in range(layers)
    ]
    return {
        **clip_visual("vision_encoder.visual.", 64, 16, 2),
        **bert_shapes("language_encoder.", 1, types=1),
        **{f"{name}.weight": (WIDTH, WIDTH) for name in square},
        **{f"{name}.bias": (WIDTH,) for name in square},
        "modality_type_embeddings.weight": (2, WIDTH),
        **{
            key: shape
            for name in streams
            for key, shape in bert_layer_shapes(name, attentions).items()
        },
        "mlm_head.bias": (WORDS,),
        "mlm_head.transform.LayerNorm.weight": (WIDTH,),
        "mlm_head.transform.LayerNorm.bias": (WIDTH,),
        "mlm_head.decoder.weight": (WORDS, WIDTH),
        "mim_head.mask_token": (1, 1, decoder),
        "mim_head.decoder_pos_embed": (1, 17, decoder),
        "mim_head.decoder_embed.weight": (decoder, WIDTH),
        "mim_head.decoder_embed.bias": (decoder,),
        **clip_shapes("mim_head.decoder.resblocks", decoder, 1),
        "mim_head.decoder_norm.weight": (decoder,),
        "mim_head.decoder_norm.bias": (decoder,),
        "mim_head.decoder_pred.weight": (768, decoder),
        "mim_head.decoder_pred.bias": (768,),
        "itm_head.fc.weight": (2, 2 * WIDTH),
        "itm_head.fc.bias": (2,),
    }


def bert_layer_shapes(prefix: str, attentions: list[str]) -> dict[str, tuple[int, ...]]:
    square = [f"{name}.self.{part}" for name in attentions for part in ("query", "key", "value")]
    square += [f"{name}.output.dense" for name in attentions]
    norms = [*(f"{name}.output.LayerNorm" for name in attentions), "output.LayerNorm"]
    return {
        **{f"{prefix}{name}.weight": (WIDTH, WIDTH) for name in square},
        **{f"{prefix}{name}.bias": (WIDTH,) for name in [*square, *norms, "output.dense"]},
        **{f"{prefix}{name}.weight": (WIDTH,) for name in norms},
        f"{prefix}intermediate.dense.weight": (2 * WIDTH, WIDTH),
        f"{prefix}intermediate.dense.bias": (2 * WIDTH,),
        f"{prefix}output.dense.weight": (WIDTH, 2 * WIDTH),
    }


def bert_attention(
    x: Tensor, context: Tensor, file: Tensors, name: str, eps: float, hidden: Tensor | None
) -> Tensor:
    q, k, v = (
        linear(states, file, f"{name}.self.{part}")
        for part, states in (("query", x), ("key", context), ("value", context))
    )
    return norm(
        x + linear(attend(q, k, v, x.shape[-1] // 64, hidden), file, f"{name}.output.dense"),
        file,
        f"{name}.output.LayerNorm",
        eps,
    )


def bert_feed_forward(x: Tensor, file: Tensors, name: str, eps: float) -> Tensor:
    y = linear(F.gelu(linear(x, file, f"{name}intermediate.dense")), file, f"{name}output.dense")
    return norm(x + y, file, f"{name}output.LayerNorm", eps)


def cross_layer(
    x: Tensor,
    other: Tensor,
    file: Tensors,
    name: str,
    hidden: Tensor | None,
    other_hidden: Tensor | None,
) -> Tensor:
    x = bert_attention(x, x, file, f"{name}attention", 1e-12, hidden)
    x = bert_attention(x, other, file, f"{name}crossattention", 1e-12, other_hidden)
    return bert_feed_forward(x, file, name, 1e-12)


def bert_states(
    ids: Tensor, mask: Tensor, file: Tensors, prefix: str, layers: int, eps: float = 1e-12
) -> list[Tensor]:
    x = file[f"{prefix}embeddings.word_embeddings.weight"][ids]
    x = x + file[f"{prefix}embeddings.position_embeddings.weight"][: ids.shape[1]]
    if f"{prefix}embeddings.token_type_embeddings.weight" in file:
        x = x + file[f"{prefix}embeddings.token_type_embeddings.weight"][0]
    states = [norm(x, file, f"{prefix}embeddings.LayerNorm", eps)]
    for layer in range(layers):
        name = f"{prefix}encoder.layer.{layer}."
        x = bert_attention(states[-1], states[-1], file, f"{name}attention", eps, ~mask[:, None])
        states.append(bert_feed_forward(x, file, name, eps))
    return states


def texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, WORDS, (3, 7), generator=torch.Generator().manual_seed(2))
    return ids, torch.arange(7) < torch.tensor([[7], [4], [2]])


def resnet_shapes(
    prefix: str, blocks: tuple[int, ...], grey: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of a ResNet whose bottlenecks have 8, 8, 16 and 16 inner channels."""
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}conv1.weight": (64, 1 if grey else 3, 7, 7)}
    norms = {f"{prefix}bn1": 64}
    wide = 64
    for stage, (count, inside) in enumerate(zip(blocks, (8, 8, 16, 16), strict=True), start=1):
        for block in range(count):
            name = f"{prefix}layer{stage}.{block}"
            shapes |= {
                f"{name}.conv1.weight": (inside, wide, 1, 1),
                f"{name}.conv2.weight": (inside, inside, 3, 3),
                f"{name}.conv3.weight": (4 * inside, inside, 1, 1),
            }
            norms |= {f"{name}.bn1": inside, f"{name}.bn2": inside, f"{name}.bn3": 4 * inside}
            if block == 0:
                shapes[f"{name}.downsample.0.weight"] = (4 * inside, wide, 1, 1)
                norms[f"{name}.downsample.1"] = 4 * inside
            wide = 4 * inside
    leaves = ("weight", "bias", "running_mean", "running_var")
    shapes |= {f"{name}.{leaf}": (width,) for name, width in norms.items() for leaf in leaves}
    return {**shapes, **{f"{name}.num_batches_tracked": () for name in norms}}


def resnet(pixels: Tensor, file: Tensors, prefix: str, blocks: tuple[int, ...]) -> Tensor:
    """torchvision's ResNet in eval mode, with the stride in the 3x3 convolution."""

    def bn(x: Tensor, name: str) -> Tensor:
        mean, var = file[f"{name}.running_mean"], file[f"{name}.running_var"]
        return F.batch_norm(x, mean, var, file[f"{name}.weight"], file[f"{name}.bias"])

    x = F.relu(
        bn(F.conv2d(pixels, file[f"{prefix}conv1.weight"], stride=2, padding=3), f"{prefix}bn1")
    )
    x = F.max_pool2d(x, 3, 2, 1)
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            name, stride = f"{prefix}layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = F.relu(bn(F.conv2d(x, file[f"{name}.conv1.weight"]), f"{name}.bn1"))
            y = F.relu(
                bn(
                    F.conv2d(y, file[f"{name}.conv2.weight"], stride=stride, padding=1),
                    f"{name}.bn2",
                )
            )
            y = bn(F.conv2d(y, file[f"{name}.conv3.weight"]), f"{name}.bn3")
            if block == 0:
                x = bn(
                    F.conv2d(x, file[f"{name}.downsample.0.weight"], stride=stride),
                    f"{name}.downsample.1",
                )
            x = F.relu(x + y)
    return x
