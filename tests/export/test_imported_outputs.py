"""Imported weights against the published layers, written out plainly from the file's own keys, on small random files."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.published import random_tensors
from torch import Tensor

import medvl
from medvl.data import train_wordpiece
from medvl.errors import WeightsError
from medvl.export import import_checkpoint
from medvl.export.importers.import_checkpoint import match_checkpoint
from medvl.export.importers.registry import find_importer

Tensors = dict[str, Tensor]
WIDTH, WORDS, EMBED = 128, 50, 24  # two heads of 64


def imported(tensors: Tensors, system: str, folder: Path, **options: Any) -> Any:
    torch.save({"state_dict": tensors}, folder / "file.ckpt")
    return import_checkpoint(system, folder / "file.ckpt", **options).model


def linear(x: Tensor, file: Tensors, name: str) -> Tensor:
    return F.linear(x, file[f"{name}.weight"], file.get(f"{name}.bias"))


def norm(x: Tensor, file: Tensors, name: str, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], file[f"{name}.weight"], file[f"{name}.bias"], eps)


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, hidden: Tensor | None = None) -> Tensor:
    """Softmax attention head by head; `hidden` is True where a query must not attend."""
    answers = []
    for q, k, v in zip(query.chunk(heads, -1), key.chunk(heads, -1), value.chunk(heads, -1), strict=True):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        answers.append(scores.softmax(-1) @ v)
    return torch.cat(answers, dim=-1)


def clip_block(x: Tensor, file: Tensors, name: str, hidden: Tensor | None = None) -> Tensor:
    """OpenAI's block: pre-LN, one matrix for query, key and value, x * sigmoid(1.702 x)."""
    y = norm(x, file, f"{name}.ln_1", 1e-5)
    q, k, v = F.linear(y, file[f"{name}.attn.in_proj_weight"], file[f"{name}.attn.in_proj_bias"]).chunk(3, dim=-1)
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
    return {f"{prefix}.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}


def clip_visual(prefix: str, side: int, patch: int, layers: int) -> dict[str, tuple[int, ...]]:
    norms = {f"{prefix}{name}.{leaf}": (WIDTH,) for name in ("ln_pre", "ln_post") for leaf in ("weight", "bias")}
    return {
        f"{prefix}class_embedding": (WIDTH,),
        f"{prefix}positional_embedding": (1 + (side // patch) ** 2, WIDTH),
        f"{prefix}conv1.weight": (WIDTH, 3, patch, patch),
        **norms,
        **clip_shapes(f"{prefix}transformer.resblocks", WIDTH, layers),
    }


def clip_encode(pixels: Tensor, file: Tensors, prefix: str, layers: int) -> Tensor:
    """Return the states (B, 1 + P, D) after the final norm."""
    patches = F.conv2d(pixels, file[f"{prefix}conv1.weight"], stride=file[f"{prefix}conv1.weight"].shape[-1])
    tokens = patches.flatten(2).transpose(1, 2)
    x = torch.cat([file[f"{prefix}class_embedding"].expand(len(tokens), 1, -1), tokens], dim=1)
    x = norm(x + file[f"{prefix}positional_embedding"], file, f"{prefix}ln_pre", 1e-5)
    for layer in range(layers):
        x = clip_block(x, file, f"{prefix}transformer.resblocks.{layer}")
    return norm(x, file, f"{prefix}ln_post", 1e-5)


@pytest.fixture(scope="module")
def chexzero_file() -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {
        **clip_visual("visual.", 64, 32, 2),
        "visual.proj": (WIDTH, EMBED),
        **clip_shapes("transformer.resblocks", WIDTH, 2),
        "token_embedding.weight": (49408, WIDTH),
        "positional_embedding": (12, WIDTH),
        "ln_final.weight": (WIDTH,),
        "ln_final.bias": (WIDTH,),
        "text_projection": (WIDTH, EMBED),
    }
    return {**random_tensors(shapes), "logit_scale": torch.tensor(3.5)}


def test_chexzero_import_equals_clip(chexzero_file: Tensors, tmp_path: Path) -> None:
    """Both encoders, their projections and the temperature, also after saving and loading."""
    file = chexzero_file
    model = imported(file, "chexzero", tmp_path, out=tmp_path / "out")
    image = torch.randint(256, (2, 1, 64, 64), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    pixels = (image.expand(-1, 3, -1, -1) / 255 - 101.48761 / 255) / (83.43944 / 255)
    expected = F.normalize(clip_encode(pixels, file, "visual.", 2)[:, 0] @ file["visual.proj"], dim=-1)
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(image), expected, atol=1e-5, rtol=1e-4)
    ids, mask = model.tokenize(["small left effusion", "no pneumothorax"])
    x = file["token_embedding.weight"][ids] + file["positional_embedding"][: ids.shape[1]]
    later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    for layer in range(2):
        x = clip_block(x, file, f"transformer.resblocks.{layer}", later)
    ends = norm(x, file, "ln_final", 1e-5)[torch.arange(2), ids.argmax(dim=1)]  # the end token has the highest id
    with torch.no_grad():
        actual = model.encode_text(ids, mask)
        torch.testing.assert_close(actual, F.normalize(ends @ file["text_projection"], dim=-1), atol=1e-5, rtol=1e-4)
        loaded = medvl.load(tmp_path / "out")
        assert torch.equal(loaded.encode_text(["small left effusion", "no pneumothorax"]), actual)
    assert loaded.logit_scale.item() == 3.5


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


def bert_attention(x: Tensor, context: Tensor, file: Tensors, name: str, eps: float, hidden: Tensor | None) -> Tensor:
    q, k, v = (
        linear(states, file, f"{name}.self.{part}")
        for part, states in (("query", x), ("key", context), ("value", context))
    )
    return norm(
        x + linear(attend(q, k, v, WIDTH // 64, hidden), file, f"{name}.output.dense"),
        file,
        f"{name}.output.LayerNorm",
        eps,
    )


def bert_feed_forward(x: Tensor, file: Tensors, name: str, eps: float) -> Tensor:
    y = linear(F.gelu(linear(x, file, f"{name}intermediate.dense")), file, f"{name}output.dense")
    return norm(x + y, file, f"{name}output.LayerNorm", eps)


def bert_states(ids: Tensor, mask: Tensor, file: Tensors, prefix: str, layers: int, eps: float = 1e-12) -> list[Tensor]:
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


def test_cxrbert_import_includes_its_projection(tmp_path: Path) -> None:
    head: dict[str, tuple[int, ...]] = {
        "cls_projection_head.dense_to_hidden.weight": (128, WIDTH),
        "cls_projection_head.dense_to_output.weight": (128, 128),
        **{
            f"cls_projection_head.{name}": (128,)
            for name in ("dense_to_hidden.bias", "LayerNorm.weight", "LayerNorm.bias", "dense_to_output.bias")
        },
    }
    file = random_tensors({**bert_shapes("bert.", 2), **head, "bert.embeddings.position_ids": (1, 16)})
    encoder = imported(file, "cxrbert", tmp_path).text_encoder
    ids, mask = texts()
    cls = bert_states(ids, mask, file, "bert.", 2)[-1][:, 0]
    hidden = norm(
        F.gelu(linear(cls, file, "cls_projection_head.dense_to_hidden")), file, "cls_projection_head.LayerNorm", 1e-12
    )
    with torch.no_grad():
        actual = encoder(ids, mask).pooled_BD
    torch.testing.assert_close(
        actual, linear(hidden, file, "cls_projection_head.dense_to_output"), atol=2e-5, rtol=1e-4
    )


def resnet_shapes(prefix: str, blocks: tuple[int, ...], grey: bool = False) -> dict[str, tuple[int, ...]]:
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

    x = F.relu(bn(F.conv2d(pixels, file[f"{prefix}conv1.weight"], stride=2, padding=3), f"{prefix}bn1"))
    x = F.max_pool2d(x, 3, 2, 1)
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            name, stride = f"{prefix}layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = F.relu(bn(F.conv2d(x, file[f"{name}.conv1.weight"]), f"{name}.bn1"))
            y = F.relu(bn(F.conv2d(y, file[f"{name}.conv2.weight"], stride=stride, padding=1), f"{name}.bn2"))
            y = bn(F.conv2d(y, file[f"{name}.conv3.weight"]), f"{name}.bn3")
            if block == 0:
                x = bn(F.conv2d(x, file[f"{name}.downsample.0.weight"], stride=stride), f"{name}.downsample.1")
            x = F.relu(x + y)
    return x


@pytest.mark.parametrize("grey", [False, True])
def test_resnet_imports_from_named_and_sequential_keys(tmp_path: Path, grey: bool) -> None:
    """torchvision's names, and the indices of a Sequential; one channel as in PRIOR."""
    blocks = (1, 2, 1, 1)
    file = random_tensors(resnet_shapes("", blocks, grey))
    pixels = torch.randn(2, 1 if grey else 3, 64, 64, generator=torch.Generator().manual_seed(3))
    expected = resnet(pixels, file, "", blocks)
    sequential = {"conv1": "0", "bn1": "1", **{f"layer{stage}": str(stage + 3) for stage in range(1, 5)}}
    renamed = {
        f"visual_extractor.model.{sequential[key.split('.')[0]]}.{key.partition('.')[2]}": t for key, t in file.items()
    }
    named = {f"encoder.encoder.{key}": tensor for key, tensor in file.items()}
    for tensors, system in ((named, "biovil"), (renamed, "r2gen")):
        encoder = imported(tensors, system, tmp_path).image_encoder
        with torch.no_grad():
            features = encoder(pixels)
        torch.testing.assert_close(features.patches_BPD, expected.flatten(2).transpose(1, 2), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(features.pooled_BD, expected.mean(dim=(2, 3)), atol=1e-4, rtol=1e-4)


_SWIN = {
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.o_proj": "attention.output.dense",
    "attention.relative_position_bias.relative_position_bias_table": "attention.self.relative_position_bias_table",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def test_swin_import_equals_transformers(tmp_path: Path) -> None:
    """transformers' Swin, its parameters renamed to those of version 4; two of its blocks are shifted."""
    from transformers import SwinConfig, SwinModel

    torch.manual_seed(4)
    sizes = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 7, "image_size": 224}
    swin = SwinModel(SwinConfig(**sizes), add_pooling_layer=False).eval()
    for parameter in swin.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tensors = swin.state_dict()
    for new, old in _SWIN.items():
        tensors = {key.replace(f".{new}", f".{old}"): tensor for key, tensor in tensors.items()}
    file = {f"image_encoder.image_encoder.{key}": tensor for key, tensor in tensors.items()}
    file |= random_tensors(bert_shapes("text_encoder.text_encoder.", 1))
    encoder = imported(file, "cxrclip", tmp_path).image_encoder
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = swin(pixels).last_hidden_state
        torch.testing.assert_close(encoder(pixels).patches_BPD, expected, atol=1e-4, rtol=1e-4)


def test_medclip_import_includes_its_heads(tmp_path: Path) -> None:
    """The mean of three states and of real tokens, projected; the image's average, projected by the layer named fc."""
    blocks = (1, 1, 1, 1)
    file = random_tensors(
        {
            **resnet_shapes("vision_model.model.", blocks),
            "vision_model.model.fc.weight": (EMBED, 64),
            **bert_shapes("text_model.model.", 3),
            "text_model.projection_head.weight": (EMBED, WIDTH),
        }
    )
    file["logit_scale"] = torch.tensor(2.5)
    model = imported(file, "medclip", tmp_path)
    ids, mask = texts()
    states = bert_states(ids, mask, file, "text_model.model.", 3)
    mixed = (states[1] + states[2] + states[3]) / 3
    pooled = (mixed * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(6))
    vector = resnet(pixels, file, "vision_model.model.", blocks).mean(dim=(2, 3))
    with torch.no_grad():
        text, image = model.encode_text(ids, mask), model.encode_image(pixels)
    expected = F.normalize(linear(pooled, file, "text_model.projection_head"), dim=-1)
    torch.testing.assert_close(text, expected, atol=1e-5, rtol=1e-4)
    expected = F.normalize(linear(vector, file, "vision_model.model.fc"), dim=-1)
    torch.testing.assert_close(image, expected, atol=1e-5, rtol=1e-4)
    assert model.logit_scale.item() == 2.5


def m3ae_file() -> Tensors:
    square = ("multi_modal_language_proj", "multi_modal_vision_proj", "multi_modal_language_pooler.dense")
    square += ("multi_modal_vision_pooler.dense", "mlm_head.transform.dense")
    decoder = 64
    shapes: dict[str, tuple[int, ...]] = {
        **clip_visual("vision_encoder.visual.", 64, 16, 2),
        **bert_shapes("language_encoder.", 1, types=1),
        **{f"{name}.weight": (WIDTH, WIDTH) for name in square},
        **{f"{name}.bias": (WIDTH,) for name in square},
        "modality_type_embeddings.weight": (2, WIDTH),
        **bert_layer_shapes("multi_modal_language_layers.0.", ["attention", "crossattention"]),
        **bert_layer_shapes("multi_modal_vision_layers.0.", ["attention", "crossattention"]),
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
    return random_tensors(shapes)


def test_m3ae_import_equals_its_co_attention_and_heads(tmp_path: Path) -> None:
    """Both encoders, one layer of each stream, the poolers, ITM, MLM, and a block of the pixel decoder."""
    file = m3ae_file()
    model = imported(file, "m3ae", tmp_path)
    pixels = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(7))
    ids, mask = texts()
    with torch.no_grad():
        image, text = model.image_tokens(pixels), model.text_tokens(ids, mask)
        fused = model.fuse(text, image)
        words = model.mlm_head(fused.text.states_BND)
        matched = model.itm_head(fused.pooled_BD)
        decoded = model.mim_head.blocks[0](torch.ones(1, 5, 64).cumsum(1))
    encoded = clip_encode(pixels, file, "vision_encoder.visual.", 2)
    v = linear(encoded, file, "multi_modal_vision_proj") + file["modality_type_embeddings.weight"][1]
    torch.testing.assert_close(image.states_BND + file["modality_type_embeddings.weight"][1], v, atol=1e-4, rtol=1e-4)
    t = text.states_BND + file["modality_type_embeddings.weight"][0]  # RoBERTa's positions are not tested here
    new_t = cross_layer(t, v, file, "multi_modal_language_layers.0.", ~mask[:, None], None)
    new_v = cross_layer(v, t, file, "multi_modal_vision_layers.0.", None, ~mask[:, None])
    torch.testing.assert_close(fused.text.states_BND[mask], new_t[mask], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.image.states_BND, new_v, atol=1e-4, rtol=1e-4)
    pooled = [
        torch.tanh(linear(states[:, 0], file, f"multi_modal_{side}_pooler.dense"))
        for side, states in (("language", new_t), ("vision", new_v))
    ]
    torch.testing.assert_close(matched, linear(torch.cat(pooled, -1), file, "itm_head.fc"), atol=1e-4, rtol=1e-4)
    hidden = norm(F.gelu(linear(new_t, file, "mlm_head.transform.dense")), file, "mlm_head.transform.LayerNorm", 1e-12)
    expected = linear(hidden, file, "mlm_head.decoder") + file["mlm_head.bias"]
    torch.testing.assert_close(words[mask], expected[mask], atol=2e-4, rtol=1e-4)
    expected = clip_block(torch.ones(1, 5, 64).cumsum(1), file, "mim_head.decoder.resblocks.0")
    torch.testing.assert_close(decoded, expected, atol=1e-4, rtol=1e-4)


def cross_layer(
    x: Tensor, other: Tensor, file: Tensors, name: str, hidden: Tensor | None, other_hidden: Tensor | None
) -> Tensor:
    x = bert_attention(x, x, file, f"{name}attention", 1e-12, hidden)
    x = bert_attention(x, other, file, f"{name}crossattention", 1e-12, other_hidden)
    return bert_feed_forward(x, file, name, 1e-12)


def medvill_file() -> Tensors:
    sequential = {"conv1": "0", "bn1": "1", **{f"layer{stage}": str(stage + 3) for stage in range(1, 5)}}
    resnet_file = random_tensors(resnet_shapes("", (1, 1, 1, 1)))
    file = random_tensors(
        {
            **{
                key.replace("embeddings.", "enc.txt_embeddings.", 1).replace(
                    "encoder.layer", "enc.encoder.layer", 1
                ): shape
                for key, shape in bert_shapes("", 1, positions=256).items()
            },
            "enc.img_embeddings.img_embeddings.weight": (WIDTH, 64),
            "enc.img_embeddings.img_embeddings.bias": (WIDTH,),
            "enc.pooler.dense.weight": (WIDTH, WIDTH),
            "enc.pooler.dense.bias": (WIDTH,),
            "mlm.predictions.bias": (WORDS,),
            "mlm.predictions.transform.dense.weight": (WIDTH, WIDTH),
            "mlm.predictions.transform.dense.bias": (WIDTH,),
            "mlm.predictions.transform.LayerNorm.weight": (WIDTH,),
            "mlm.predictions.transform.LayerNorm.bias": (WIDTH,),
            "itm.linear.weight": (2, WIDTH),
            "itm.linear.bias": (2,),
        }
    )
    for name in ("position_embeddings.weight", "token_type_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias"):
        file[f"enc.img_embeddings.{name}"] = file[f"enc.txt_embeddings.{name}"]
    file["mlm.predictions.decoder.weight"] = file["enc.txt_embeddings.word_embeddings.weight"]
    for key, tensor in resnet_file.items():
        child, _, rest = key.partition(".")
        file[f"enc.img_encoder.model.{sequential[child]}.{rest}"] = tensor
    return file


def test_medvill_import_checks_that_stored_copies_are_equal(tmp_path: Path) -> None:
    file = medvill_file()
    model = imported(file, "medvill", tmp_path)
    assert torch.equal(model.image_input.weight, file["enc.img_embeddings.img_embeddings.weight"])
    assert torch.equal(model.itm_head.weight, file["itm.linear.weight"])
    file["enc.img_embeddings.LayerNorm.weight"] = file["enc.img_embeddings.LayerNorm.weight"] + 1
    names = "enc.img_embeddings.LayerNorm.weight is not equal to enc.txt_embeddings.LayerNorm.weight"
    with raises(WeightsError, "mismatch", names=names):
        imported(file, "medvill", tmp_path)
    del file["enc.txt_embeddings.LayerNorm.weight"]
    with raises(WeightsError, "mismatch", names="missing enc.txt_embeddings.LayerNorm.weight"):
        match_checkpoint(file, find_importer("medvill"), "file")


def mgca_head_shapes(name: str, width: int, hidden: int = 32, local: bool = False) -> dict[str, tuple[int, ...]]:
    kernel = (1,) if local else ()
    return {
        f"{name}.head.0.weight": (hidden, width, *kernel),
        f"{name}.head.3.weight": (EMBED, hidden, *kernel),
        **{f"{name}.head.{layer}": (hidden,) for layer in ("0.bias", "1.weight", "1.bias")},
        **{f"{name}.head.1.running_{statistic}": (hidden,) for statistic in ("mean", "var")},
        **{f"{name}.head.4.running_{statistic}": (EMBED,) for statistic in ("mean", "var")},
        **{f"{name}.head.{layer}.num_batches_tracked": () for layer in (1, 4)},
        f"{name}.head.3.bias": (EMBED,),
    }


def mgca_head(x: Tensor, file: Tensors, name: str) -> Tensor:
    def bn(x: Tensor, layer: int) -> Tensor:
        mean, var, *affine = (
            file.get(f"{name}.{layer}.{leaf}") for leaf in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x.flatten(0, -2), mean, var, *affine).view_as(x)

    name = f"{name}.head"
    hidden = F.linear(x, file[f"{name}.0.weight"].flatten(1), file[f"{name}.0.bias"])
    return bn(F.linear(F.relu(bn(hidden, 1)), file[f"{name}.3.weight"].flatten(1), file[f"{name}.3.bias"]), 4)


def test_mgca_import_is_the_whole_system(tmp_path: Path) -> None:
    """Its BERT has no token types, which are zeros; heads of regions and words are convolutions of width 1."""
    blocks = (1, 1, 1, 1)
    tokenizer = train_wordpiece(["left effusion", "no pneumothorax"], vocab_size=WORDS, min_frequency=1)
    file = random_tensors(
        {
            **bert_shapes("text_encoder_q.model.", 1, words=len(tokenizer.vocabulary), types=0),
            **resnet_shapes("img_encoder_q.model.", blocks),
            **mgca_head_shapes("img_encoder_q.global_embed", 64),
            **mgca_head_shapes("img_encoder_q.local_embed", 64, local=True),
            **mgca_head_shapes("text_encoder_q.global_embed", WIDTH),
            **mgca_head_shapes("text_encoder_q.local_embed", WIDTH, local=True),
            "prototype_layer.weight": (7, EMBED),
        }
    )
    model = imported(file, "mgca", tmp_path, tokenizer=tokenizer)
    assert (model.config.num_prototypes, model.config.hidden_dim, model.config.projection_dim) == (7, 32, EMBED)
    torch.testing.assert_close(model.prototype_layer.weight.data, file["prototype_layer.weight"])
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(3))
    large = F.interpolate(pixels, (299, 299), mode="bilinear", align_corners=True)
    images, texts = model.embed_images(pixels), ["left effusion", "no"]
    pooled = resnet(large, file, "img_encoder_q.model.", blocks).mean(dim=(2, 3))
    expected = F.normalize(mgca_head(pooled, file, "img_encoder_q.global_embed"), dim=-1)
    torch.testing.assert_close(images.global_NE, expected, atol=1e-4, rtol=1e-3)
    assert images.local_NPE.shape == (2, 361, EMBED)
    ids, mask = tokenizer(texts)
    tokens = bert_states(ids, mask, file, "text_encoder_q.model.", 1)[-1]
    expected = F.normalize(mgca_head(tokens[:, 0], file, "text_encoder_q.global_embed"), dim=-1)
    embedded = model.embed_texts(texts)
    torch.testing.assert_close(embedded.global_NE, expected, atol=1e-4, rtol=1e-3)
    words = tokenizer.word_ids(ids, mask)
    word = tokens[0][words[0] == 1].sum(dim=0, keepdim=True)
    expected = F.normalize(mgca_head(word, file, "text_encoder_q.local_embed"), dim=-1)
    torch.testing.assert_close(embedded.local_NPE[0, 1:2], expected, atol=1e-4, rtol=1e-3)


def lovt_side_shapes(model: str, width: int, hidden: int = 32) -> dict[str, tuple[int, ...]]:
    pool, shapes = f"{model}.encoder.global_aggregator.attention", dict[str, tuple[int, ...]]()
    for name, kernel in (("global", ()), ("local", (1,))):
        head = f"{model}.project_{name}"
        shapes |= {
            f"{head}.projection_before.weight": (hidden, width, *kernel),
            f"{head}.projection_before.bias": (hidden,),
            f"{head}.projection_after.weight": (EMBED, hidden, *kernel),
            f"{head}.projection_after.bias": (EMBED,),
            **{f"{head}.norm.{leaf}": (hidden,) for leaf in ("weight", "bias", "running_mean", "running_var")},
            f"{head}.norm.num_batches_tracked": (),
        }
    return {
        **shapes,
        f"{pool}.in_proj_weight": (3 * width, width),
        f"{pool}.in_proj_bias": (3 * width,),
        f"{pool}.out_proj.weight": (width, width),
        f"{pool}.out_proj.bias": (width,),
    }


def lovt_norm(x: Tensor, file: Tensors, name: str) -> Tensor:
    leaves = (file[f"{name}.{leaf}"] for leaf in ("running_mean", "running_var", "weight", "bias"))
    return F.batch_norm(x, *leaves)


def lovt_head(x: Tensor, file: Tensors, name: str) -> Tensor:
    """(N, D) to (N, E); kernels of width 1 are matrices."""
    before, after = (file[f"{name}.projection_{key}.weight"].flatten(1) for key in ("before", "after"))
    hidden = F.relu(lovt_norm(F.linear(x, before, file[f"{name}.projection_before.bias"]), file, f"{name}.norm"))
    return F.linear(hidden, after, file[f"{name}.projection_after.bias"])


def lovt_pool(x: Tensor, file: Tensors, model: str) -> Tensor:
    """(N, D), one sample, to (1, D)."""
    name = f"{model}.encoder.global_aggregator.attention"
    weights, biases = file[f"{name}.in_proj_weight"].chunk(3), file[f"{name}.in_proj_bias"].chunk(3)
    q, k, v = map(F.linear, (x.mean(dim=0, keepdim=True), x, x), weights, biases)
    return linear(attend(q, k, v, 8), file, f"{name}.out_proj")


def test_lovt_import_is_the_whole_system(tmp_path: Path) -> None:
    """Poolings, heads and the attention between sentences and regions, from the released code's names."""
    blocks = (1, 1, 1, 1)
    tokenizer = train_wordpiece(["left effusion.", "no pneumothorax."], vocab_size=WORDS, min_frequency=1)
    report = "left effusion. no pneumothorax."
    square = [f"ll_attention.{name}_projection" for name in ("key", "value", "output")]
    file = random_tensors(
        {
            **bert_shapes("model_b.encoder.language_model.", 1, words=len(tokenizer.vocabulary)),
            **resnet_shapes("model_a.encoder.feature_extractor.backbone_layers.", blocks),
            **lovt_side_shapes("model_a", 64),
            **lovt_side_shapes("model_b", WIDTH),
            **{f"{name}.weight": (EMBED, EMBED) for name in square},
            **{f"{name}.bias": (EMBED,) for name in square},
            **{f"ll_attention.norm.{leaf}": (EMBED,) for leaf in ("weight", "bias", "running_mean", "running_var")},
            "ll_attention.norm.num_batches_tracked": (),
            "loss_module.ll_alignments_a.0.pos_weights": (7, 7, 7, 7),
        }
    )
    model = imported(file, "lovt", tmp_path, tokenizer=tokenizer)
    assert (model.config.hidden_dim, model.config.projection_dim, model.config.max_tokens) == (32, EMBED, 16)
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(3))
    regions = resnet(pixels, file, "model_a.encoder.feature_extractor.backbone_layers.", blocks)[0].flatten(1).T
    ids, mask = tokenizer([report])
    tokens = bert_states(ids, mask, file, "model_b.encoder.language_model.", 1)[-1][0, 1:-1]
    sentences = torch.stack([tokens[:3].amax(dim=0), tokens[3:].amax(dim=0)])
    stops = tokenizer.vocabulary["."]
    assert [place for place, token in enumerate(ids[0, 1:-1].tolist()) if token == stops] == [2, len(tokens) - 1]
    with torch.no_grad():
        images, texts = model.embed_images(pixels), model.embed_texts([report])
    near = {"atol": 1e-4, "rtol": 1e-3}
    for side, items, embedded in (("model_a", regions, images), ("model_b", sentences, texts)):
        whole = lovt_head(lovt_pool(items, file, side), file, f"{side}.project_global")
        torch.testing.assert_close(embedded.global_NE, F.normalize(whole, dim=-1), **near)
        torch.testing.assert_close(embedded.local_NPE[0], lovt_head(items, file, f"{side}.project_local"), **near)
    a, b = texts.local_NPE[0], images.local_NPE[0]
    key_a, key_b = (linear(x, file, "ll_attention.key_projection") for x in (a, b))
    attended = attend(key_a, key_b, linear(b, file, "ll_attention.value_projection"), 1)
    expected = lovt_norm(linear(attended, file, "ll_attention.output_projection"), file, "ll_attention.norm")
    with torch.no_grad():
        for_sentences, _ = model.cross_attention(texts.local_NPE, images.local_NPE, texts.mask_NP)
    torch.testing.assert_close(for_sentences[0], expected, **near)
