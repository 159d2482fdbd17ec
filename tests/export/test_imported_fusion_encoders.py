"""Imported fusion-encoders against the published layers, written out plainly from the file's own keys, on small random files."""

from pathlib import Path

import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.published import random_tensors
from helpers.published_layers import (
    WIDTH,
    WORDS,
    Tensors,
    bert_attention,
    bert_feed_forward,
    bert_layer_shapes,
    bert_shapes,
    clip_block,
    clip_encode,
    clip_shapes,
    clip_visual,
    imported,
    linear,
    norm,
    resnet_shapes,
    texts,
)
from torch import Tensor

from medvl.errors import WeightsError
from medvl.export.importers.import_checkpoint import match_checkpoint
from medvl.export.importers.registry import find_importer


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
