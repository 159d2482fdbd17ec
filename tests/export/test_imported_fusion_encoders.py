"""Imported fusion-encoders against the published layers, written out plainly from the file's own
keys, on small random files.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.published import random_tensors
from helpers.published_layers import (
    WIDTH,
    WORDS,
    Tensors,
    attend,
    bert_layer_shapes,
    bert_shapes,
    bert_states,
    clip_block,
    clip_encode,
    cross_layer,
    imported,
    linear,
    m3ae_shapes,
    norm,
    resnet_shapes,
    texts,
)
from torch import Tensor

import medvl
from medvl.errors import WeightsError
from medvl.export.importers.import_checkpoint import find_importer, match_checkpoint


def m3ae_file() -> Tensors:
    return random_tensors(m3ae_shapes(1))


def test_m3ae_import_equals_its_co_attention_and_heads(tmp_path: Path) -> None:
    """Both encoders, one layer of each stream, the poolers, ITM, MLM, and a block of the pixel
    decoder.
    """
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
    v = (
        linear(encoded, file, "multi_modal_vision_proj")
        + file["modality_type_embeddings.weight"][1]
    )
    torch.testing.assert_close(
        image.states_BND + file["modality_type_embeddings.weight"][1], v, atol=1e-4, rtol=1e-4
    )
    t = (
        text.states_BND + file["modality_type_embeddings.weight"][0]
    )  # RoBERTa's positions are not tested here
    new_t = cross_layer(t, v, file, "multi_modal_language_layers.0.", ~mask[:, None], None)
    new_v = cross_layer(v, t, file, "multi_modal_vision_layers.0.", None, ~mask[:, None])
    torch.testing.assert_close(fused.text.states_BND[mask], new_t[mask], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.image.states_BND, new_v, atol=1e-4, rtol=1e-4)
    pooled = [
        torch.tanh(linear(states[:, 0], file, f"multi_modal_{side}_pooler.dense"))
        for side, states in (("language", new_t), ("vision", new_v))
    ]
    torch.testing.assert_close(
        matched, linear(torch.cat(pooled, -1), file, "itm_head.fc"), atol=1e-4, rtol=1e-4
    )
    hidden = norm(
        F.gelu(linear(new_t, file, "mlm_head.transform.dense")),
        file,
        "mlm_head.transform.LayerNorm",
        1e-12,
    )
    expected = linear(hidden, file, "mlm_head.decoder") + file["mlm_head.bias"]
    torch.testing.assert_close(words[mask], expected[mask], atol=2e-4, rtol=1e-4)
    expected = clip_block(torch.ones(1, 5, 64).cumsum(1), file, "mim_head.decoder.resblocks.0")
    torch.testing.assert_close(decoded, expected, atol=1e-4, rtol=1e-4)


METER = {
    "vision_encoder.": "vit_model.",
    "language_encoder.": "text_transformer.",
    "multi_modal_language_proj.": "cross_modal_text_transform.",
    "multi_modal_vision_proj.": "cross_modal_image_transform.",
    "modality_type_embeddings.": "token_type_embeddings.",
    "multi_modal_language_": "cross_modal_text_",
    "multi_modal_vision_": "cross_modal_image_",
    "mlm_head.": "mlm_score.",
    "itm_head.": "itm_score.",
}
"""M3AE's names -> METER's."""


def test_meter_import_equals_m3ae_without_its_pixel_decoder(tmp_path: Path) -> None:
    m3ae = m3ae_file()
    file = {"vit_model.ln_final.weight": torch.ones(8), "vqa_classifier.0.weight": torch.ones(4, 4)}
    for key, tensor in m3ae.items():
        if not key.startswith("mim_head."):
            old = next(name for name in METER if key.startswith(name))
            file[METER[old] + key.removeprefix(old)] = tensor
    model, other = imported(file, "meter", tmp_path), imported(m3ae, "m3ae", tmp_path)
    assert model.name == "dual_stream"
    assert all(
        torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items()
    )
    pixels = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        ours, theirs = (
            each.fuse(each.text_tokens(*texts()), each.image_tokens(pixels))
            for each in (model, other)
        )
    torch.testing.assert_close(ours.pooled_BD, theirs.pooled_BD)
    with raises(WeightsError, "mismatch"):
        imported({**file, "nlvr2_classifier.0.weight": torch.ones(4, 4)}, "meter", tmp_path)


def albef_file() -> Tensors:
    """A layer above the six of the text, and a moving average of other weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for end in ("", "_m"):
        image, text = f"visual_encoder{end}.", f"text_encoder{end}."
        norms = [
            f"{image}{name}.{leaf}"
            for name in ("norm", "blocks.0.norm1", "blocks.0.norm2")
            for leaf in LEAVES
        ]
        shapes |= {
            f"{image}cls_token": (1, 1, WIDTH),
            f"{image}pos_embed": (1, 17, WIDTH),
            f"{image}patch_embed.proj.weight": (WIDTH, 3, 16, 16),
            f"{image}patch_embed.proj.bias": (WIDTH,),
            **dict.fromkeys(norms, (WIDTH,)),
            **{f"{image}blocks.0.{name}.weight": shape for name, shape in VIT.items()},
            **{f"{image}blocks.0.{name}.bias": shape[:1] for name, shape in VIT.items()},
            **bert_shapes(f"{text}bert.", 6),
            **bert_layer_shapes(f"{text}bert.encoder.layer.6.", ["attention", "crossattention"]),
            f"{text}cls.predictions.bias": (WORDS,),
            f"{text}cls.predictions.transform.dense.weight": (WIDTH, WIDTH),
            **{
                f"{text}cls.predictions.transform.{name}": (WIDTH,)
                for name in ("dense.bias", *HEAD_NORM)
            },
            **{f"{side}_proj{end}.weight": (24, WIDTH) for side in ("vision", "text")},
            **{f"{side}_proj{end}.bias": (24,) for side in ("vision", "text")},
        }
    file = random_tensors(
        {**shapes, "temp": (), "itm_head.weight": (2, WIDTH), "itm_head.bias": (2,)}
    )
    for end in ("", "_m"):
        head, bert = f"text_encoder{end}.cls.predictions", f"text_encoder{end}.bert.embeddings"
        file |= {f"{head}.decoder.weight": file[f"{bert}.word_embeddings.weight"]}
        file |= {
            f"{head}.decoder.bias": file[f"{head}.bias"],
            f"{bert}.position_ids": torch.arange(16)[None],
        }
    queue = {
        "image_queue": torch.randn(24, 32),
        "text_queue": torch.randn(24, 32),
        "queue_ptr": torch.tensor([5]),
    }
    return {**file, **queue}


LEAVES, HEAD_NORM = ("weight", "bias"), ("LayerNorm.weight", "LayerNorm.bias")
VIT = {
    "attn.qkv": (3 * WIDTH, WIDTH),
    "attn.proj": (WIDTH, WIDTH),
    "mlp.fc1": (2 * WIDTH, WIDTH),
    "mlp.fc2": (WIDTH, 2 * WIDTH),
}


@torch.no_grad()
def test_albef_import_equals_its_towers_fusion_and_heads(tmp_path: Path) -> None:
    file = albef_file()
    model = imported(file, "albef", tmp_path)
    assert model.image_encoder.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    pixels = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(7))
    ids, mask = texts()
    for ours, end in ((model, ""), (model.momentum.module, "_m")):
        none = (None, None) if end else ()
        image, text = ours.image_tokens(pixels, *none), ours.text_tokens(ids, mask, *none[:1])
        v = albef_image(pixels, file, f"visual_encoder{end}.")
        t = bert_states(ids, mask, file, f"text_encoder{end}.bert.", 6)[-1]
        torch.testing.assert_close(image.states_BND, v, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(text.states_BND[mask], t[mask], atol=1e-4, rtol=1e-4)
        fused = ours.fuse(text, image)
        x = cross_layer(
            t, v, file, f"text_encoder{end}.bert.encoder.layer.6.", ~mask[:, None], None
        )
        torch.testing.assert_close(fused.text.states_BND[mask], x[mask], atol=1e-4, rtol=1e-4)
        head = f"text_encoder{end}.cls.predictions"
        hidden = norm(
            F.gelu(linear(x[mask], file, f"{head}.transform.dense")),
            file,
            f"{head}.transform.LayerNorm",
            1e-12,
        )
        torch.testing.assert_close(
            ours.score_words(fused.text.states_BND[mask]),
            linear(hidden, file, f"{head}.decoder"),
            atol=1e-3,
            rtol=1e-4,
        )
        torch.testing.assert_close(
            ours.image_head(image.states_BND[:, 0]),
            linear(v[:, 0], file, f"vision_proj{end}"),
            atol=1e-4,
            rtol=1e-4,
        )
        torch.testing.assert_close(
            ours.text_head(text.states_BND[:, 0]),
            linear(t[:, 0], file, f"text_proj{end}"),
            atol=1e-4,
            rtol=1e-4,
        )
    torch.testing.assert_close(model.itm_head(x[:, 0]), linear(x[:, 0], file, "itm_head"))
    assert model.itc_head.temperature == file["temp"]
    assert int(model.itc_head.queue.seen) == 0


def test_albef_reads_questions_and_images_as_its_released_code(tmp_path: Path) -> None:
    """Texts are cleaned and end without [SEP], images are bicubic; also after saving and
    loading.
    """
    words = [f"w{number}" for number in range(WORDS - 9)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "vocab.txt").write_text(
        "\n".join([*special, "left", "lung", "-", "?", *words])
    )
    model = imported(
        albef_file(), "albef", tmp_path, tokenizer=tmp_path / "words", out=tmp_path / "out"
    )
    for each in (model, medvl.load(tmp_path / "out")):
        assert each.transform.resize == "bicubic_antialias"
        ids, _ = each.tokenize(["Left-lung?"])
        assert ids.tolist() == [[2, 5, 6]]
        assert each.tokenizer.for_answers()(["left lung"])[0].tolist() == [[2, 5, 6, 3]]


def albef_image(pixels: Tensor, file: Tensors, name: str) -> Tensor:
    """Return (B, 1 + P, D): a vision Transformer of one block, as in ALBEF's vit.py."""
    patches = F.conv2d(
        pixels,
        file[f"{name}patch_embed.proj.weight"],
        file[f"{name}patch_embed.proj.bias"],
        stride=16,
    )
    x = torch.cat(
        [file[f"{name}cls_token"].expand(len(pixels), -1, -1), patches.flatten(2).transpose(1, 2)],
        dim=1,
    )
    x = x + file[f"{name}pos_embed"]
    y = norm(x, file, f"{name}blocks.0.norm1", 1e-6)
    q, k, v = linear(y, file, f"{name}blocks.0.attn.qkv").chunk(3, dim=-1)
    x = x + linear(attend(q, k, v, WIDTH // 64), file, f"{name}blocks.0.attn.proj")
    y = norm(x, file, f"{name}blocks.0.norm2", 1e-6)
    x = x + linear(
        F.gelu(linear(y, file, f"{name}blocks.0.mlp.fc1")), file, f"{name}blocks.0.mlp.fc2"
    )
    return norm(x, file, f"{name}norm", 1e-6)


def medvill_file() -> Tensors:
    sequential = {
        "conv1": "0",
        "bn1": "1",
        **{f"layer{stage}": str(stage + 3) for stage in range(1, 5)},
    }
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
    for name in (
        "position_embeddings.weight",
        "token_type_embeddings.weight",
        "LayerNorm.weight",
        "LayerNorm.bias",
    ):
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
    names = (
        "enc.img_embeddings.LayerNorm.weight is not equal to enc.txt_embeddings.LayerNorm.weight"
    )
    with raises(WeightsError, "mismatch", names=names):
        imported(file, "medvill", tmp_path)
    del file["enc.txt_embeddings.LayerNorm.weight"]
    with raises(WeightsError, "mismatch", names="missing enc.txt_embeddings.LayerNorm.weight"):
        match_checkpoint(file, find_importer("medvill"), "file")
