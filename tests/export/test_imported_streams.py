"""VisualBERT, LXMERT and ViLT, imported, against the classes of transformers with the same
random weights.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from torch import Tensor

from medvl.errors import WeightsError
from medvl.export import import_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 96, "vocab_size": 60,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
IDS = torch.tensor([[2, 7, 8, 9, 3], [2, 11, 3, 0, 0]])
MASK = IDS != 0
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


def shaken(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def imported(tensors: dict[str, Tensor], system: str, folder: Path) -> Any:
    torch.save({"state_dict": tensors}, folder / "file.ckpt")
    return import_checkpoint(system, folder / "file.ckpt").model


@torch.no_grad()
def test_visualbert(tmp_path: Path) -> None:
    from transformers import VisualBertConfig, VisualBertForPreTraining

    theirs = shaken(
        VisualBertForPreTraining(
            VisualBertConfig(visual_embedding_dim=9, num_hidden_layers=2, **SIZES)
        )
    )
    regions_BPD = torch.randn(2, 4, 9)
    given = {"input_ids": IDS, "attention_mask": MASK.long(), "visual_embeds": regions_BPD}
    expected = theirs(**given, visual_attention_mask=torch.ones(2, 4))
    model = imported(theirs.state_dict(), "visualbert", tmp_path)
    fused = model.fuse(model.text_tokens(IDS, MASK), model.image_tokens(regions_BPD))
    words = model.score_words(fused.text.states_BND[MASK])
    torch.testing.assert_close(words, expected.prediction_logits[:, :5][MASK], **CLOSE)
    matched = model.itm_head(fused.pooled_BD)
    torch.testing.assert_close(
        matched.flip(1), expected.seq_relationship_logits, **CLOSE
    )  # 0 is a match there
    with raises(WeightsError, "mismatch"):
        imported({**theirs.state_dict(), "cls.other": torch.zeros(1)}, "visualbert", tmp_path)


@torch.no_grad()
def test_lxmert(tmp_path: Path) -> None:
    from transformers import LxmertConfig, LxmertForPreTraining

    layers = {"l_layers": 2, "x_layers": 2, "r_layers": 1}
    labels = {"num_object_labels": 6, "num_attr_labels": 5, "num_qa_labels": 7}
    theirs = shaken(
        LxmertForPreTraining(LxmertConfig(visual_feat_dim=9, **layers, **labels, **SIZES))
    )
    features_BPD, boxes_BP4 = torch.randn(2, 4, 9), torch.rand(2, 4, 4)
    given = {
        "input_ids": IDS,
        "attention_mask": MASK.float(),
        "visual_feats": features_BPD,
        "visual_pos": boxes_BP4,
    }
    expected = theirs(**given)
    states = theirs.lxmert(**given)
    model = imported(theirs.state_dict(), "lxmert", tmp_path)
    image = model.image_tokens(torch.cat([features_BPD, boxes_BP4], dim=2))
    fused = model.fuse(model.text_tokens(IDS, MASK), image)
    torch.testing.assert_close(fused.image.states_BND, states.vision_output, **CLOSE)
    torch.testing.assert_close(fused.pooled_BD, states.pooled_output, **CLOSE)
    words = model.score_words(fused.text.states_BND[MASK])
    torch.testing.assert_close(words, expected.prediction_logits[MASK], **CLOSE)
    torch.testing.assert_close(
        model.itm_head(fused.pooled_BD), expected.cross_relationship_score, **CLOSE
    )
    objects = theirs.obj_predict_head(states.vision_output)
    hidden_BPD = model.region_head(fused.image.states_BND)
    torch.testing.assert_close(model.object_head(hidden_BPD), objects["obj"], **CLOSE)
    torch.testing.assert_close(model.feature_head(hidden_BPD), objects["feat"], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("older", [False, True])
def test_vilt(older: bool, tmp_path: Path) -> None:
    """The released layout fuses query, key and value; `older` files have a counter and the pixel
    head.
    """
    from transformers import ViltConfig, ViltForMaskedLM

    config = ViltConfig(
        **SIZES, num_hidden_layers=2, image_size=64, patch_size=32, layer_norm_eps=1e-6
    )
    theirs = shaken(ViltForMaskedLM(config))
    image_BCHW = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    pixels = {
        "pixel_values": image_BCHW / 127.5 - 1,
        "pixel_mask": torch.ones(2, 64, 64, dtype=torch.long),
    }
    outputs = theirs.vilt(input_ids=IDS, attention_mask=MASK.long(), **pixels)
    expected = theirs.mlm_score(outputs.last_hidden_state[:, :5])
    file = released(theirs.state_dict(), layers=2)
    if older:
        file |= {
            "text_embeddings.position_ids": torch.arange(40)[None],
            "mpp_score.decoder.weight": torch.zeros(3, 3),
        }
    model = imported(file, "vilt", tmp_path)
    assert model.transform.resize == "bicubic_antialias"
    assert model.image_encoder.mean == (0.5, 0.5, 0.5)
    fused = model.fuse(model.text_tokens(IDS, MASK), model.image_tokens(image_BCHW))
    torch.testing.assert_close(
        fused.text.states_BND[MASK], outputs.last_hidden_state[:, :5][MASK], rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(fused.pooled_BD, outputs.pooler_output, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        model.score_words(fused.text.states_BND[MASK]), expected[MASK], rtol=1e-3, atol=1e-3
    )


def released(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return transformers' ViLT by the names of its authors' code."""
    names = {
        "embeddings.cls_token": "transformer.cls_token",
        "embeddings.position_embeddings": "transformer.pos_embed",
        "embeddings.patch_embeddings.projection": "transformer.patch_embed.proj",
        "embeddings.token_type_embeddings": "token_type_embeddings",
        "embeddings.text_embeddings": "text_embeddings",
        "layernorm": "transformer.norm",
        "pooler": "pooler",
    }
    for layer in range(layers):
        old, new = f"encoder.layer.{layer}", f"transformer.blocks.{layer}"
        names |= {
            f"{old}.attention.output.dense": f"{new}.attn.proj",
            f"{old}.intermediate.dense": f"{new}.mlp.fc1",
        }
        names |= {
            f"{old}.output.dense": f"{new}.mlp.fc2",
            f"{old}.layernorm_before": f"{new}.norm1",
        }
        names[f"{old}.layernorm_after"] = f"{new}.norm2"
    file = {"itm_score.fc.weight": torch.zeros(2, 128), "itm_score.fc.bias": torch.zeros(2)}
    for key, tensor in tensors.items():
        bare = key.removeprefix("vilt.")
        for old, new in names.items():
            if bare == old or bare.startswith(f"{old}."):
                file[bare.replace(old, new, 1)] = tensor
    for layer in range(layers):
        for kind in ("weight", "bias"):
            parts = [
                tensors[f"vilt.encoder.layer.{layer}.attention.attention.{name}.{kind}"]
                for name in ("query", "key", "value")
            ]
            file[f"transformer.blocks.{layer}.attn.qkv.{kind}"] = torch.cat(parts)
    head = (
        "transform.dense.weight",
        "transform.dense.bias",
        "transform.LayerNorm.weight",
        "transform.LayerNorm.bias",
    )
    file |= {f"mlm_score.{key}": tensors[f"mlm_score.{key}"] for key in (*head, "decoder.weight")}
    return file | {"mlm_score.bias": tensors["mlm_score.decoder.bias"]}
