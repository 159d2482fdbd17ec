"""Imported dual-encoders against the published layers, written out plainly from the file's own
keys, on small random files.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.published import random_tensors
from helpers.published_layers import (
    EMBED,
    WIDTH,
    WORDS,
    Tensors,
    attend,
    bert_shapes,
    bert_states,
    clip_block,
    clip_encode,
    clip_shapes,
    clip_visual,
    imported,
    linear,
    norm,
    resnet,
    resnet_shapes,
    texts,
)
from torch import Tensor

import medvl
from medvl.data import train_wordpiece
from medvl.errors import CheckpointError
from medvl.export import export_published

BLOCKS = (1, 1, 1, 1)


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
    image = torch.randint(256, (2, 1, 64, 64), generator=torch.Generator().manual_seed(1)).to(
        torch.uint8
    )
    pixels = (image.expand(-1, 3, -1, -1) / 255 - 101.48761 / 255) / (83.43944 / 255)
    expected = F.normalize(
        clip_encode(pixels, file, "visual.", 2)[:, 0] @ file["visual.proj"], dim=-1
    )
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(image), expected, atol=1e-5, rtol=1e-4)
    ids, mask = model.tokenize(["small left effusion", "no pneumothorax"])
    x = file["token_embedding.weight"][ids] + file["positional_embedding"][: ids.shape[1]]
    later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    for layer in range(2):
        x = clip_block(x, file, f"transformer.resblocks.{layer}", later)
    ends = norm(x, file, "ln_final", 1e-5)[
        torch.arange(2), ids.argmax(dim=1)
    ]  # the end token has the highest id
    with torch.no_grad():
        actual = model.encode_text(ids, mask)
        torch.testing.assert_close(
            actual, F.normalize(ends @ file["text_projection"], dim=-1), atol=1e-5, rtol=1e-4
        )
        loaded = medvl.load(tmp_path / "out")
        assert torch.equal(loaded.encode_text(["small left effusion", "no pneumothorax"]), actual)
    assert loaded.logit_scale.item() == 3.5


def medclip_file() -> Tensors:
    file = random_tensors(
        {
            **resnet_shapes("vision_model.model.", BLOCKS),
            "vision_model.model.fc.weight": (EMBED, 64),
            **bert_shapes("text_model.model.", 3),
            "text_model.projection_head.weight": (EMBED, WIDTH),
        }
    )
    return {**file, "logit_scale": torch.tensor(2.5)}


def test_medclip_import_includes_its_heads(tmp_path: Path) -> None:
    """The mean of three states and of real tokens, projected; the image's average, projected by
    the layer named fc.
    """
    file = medclip_file()
    model = imported(file, "medclip", tmp_path)
    ids, mask = texts()
    states = bert_states(ids, mask, file, "text_model.model.", 3)
    mixed = (states[1] + states[2] + states[3]) / 3
    pooled = (mixed * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(6))
    vector = resnet(pixels, file, "vision_model.model.", BLOCKS).mean(dim=(2, 3))
    with torch.no_grad():
        text, image = model.encode_text(ids, mask), model.encode_image(pixels)
    expected = F.normalize(linear(pooled, file, "text_model.projection_head"), dim=-1)
    torch.testing.assert_close(text, expected, atol=1e-5, rtol=1e-4)
    expected = F.normalize(linear(vector, file, "vision_model.model.fc"), dim=-1)
    torch.testing.assert_close(image, expected, atol=1e-5, rtol=1e-4)
    assert model.logit_scale.item() == 2.5


def test_cxrclip_import_includes_its_heads(tmp_path: Path) -> None:
    """The last real token and the image's average, each projected with a bias."""
    blocks = (1, 1, 1, 1)
    file = random_tensors(
        {
            **resnet_shapes("image_encoder.resnet.", blocks),
            **bert_shapes("text_encoder.text_encoder.", 1),
            "image_projection.projection.weight": (EMBED, 64),
            "image_projection.projection.bias": (EMBED,),
            "text_projection.projection.weight": (EMBED, WIDTH),
            "text_projection.projection.bias": (EMBED,),
        }
    )
    file["logit_scale"] = torch.tensor(2.5)
    model = imported(file, "cxrclip", tmp_path)
    ids, mask = texts()
    states = bert_states(ids, mask, file, "text_encoder.text_encoder.", 1)
    last = states[1][torch.arange(len(mask)), mask.sum(dim=1) - 1]
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(6))
    vector = resnet(pixels, file, "image_encoder.resnet.", blocks).mean(dim=(2, 3))
    with torch.no_grad():
        text, image = model.encode_text(ids, mask), model.encode_image(pixels)
    for actual, pooled, name in ((text, last, "text"), (image, vector, "image")):
        expected = F.normalize(linear(pooled, file, f"{name}_projection.projection"), dim=-1)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert model.logit_scale.item() == 2.5


def mgca_head_shapes(
    name: str, width: int, hidden: int = 32, local: bool = False
) -> dict[str, tuple[int, ...]]:
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
            file.get(f"{name}.{layer}.{leaf}")
            for leaf in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x.flatten(0, -2), mean, var, *affine).view_as(x)

    name = f"{name}.head"
    hidden = F.linear(x, file[f"{name}.0.weight"].flatten(1), file[f"{name}.0.bias"])
    return bn(
        F.linear(
            F.relu(bn(hidden, 1)), file[f"{name}.3.weight"].flatten(1), file[f"{name}.3.bias"]
        ),
        4,
    )


def mgca_file(words: int) -> Tensors:
    return random_tensors(
        {
            **bert_shapes("text_encoder_q.model.", 1, words=words, types=0),
            **resnet_shapes("img_encoder_q.model.", BLOCKS),
            **mgca_head_shapes("img_encoder_q.global_embed", 64),
            **mgca_head_shapes("img_encoder_q.local_embed", 64, local=True),
            **mgca_head_shapes("text_encoder_q.global_embed", WIDTH),
            **mgca_head_shapes("text_encoder_q.local_embed", WIDTH, local=True),
            "prototype_layer.weight": (7, EMBED),
        }
    )


def test_mgca_import_is_the_whole_system(tmp_path: Path) -> None:
    """Its BERT has no token types, which are zeros; heads of regions and words are convolutions
    of width 1.
    """
    tokenizer = train_wordpiece(
        ["left effusion", "no pneumothorax"], vocab_size=WORDS, min_frequency=1
    )
    file = mgca_file(len(tokenizer.vocabulary))
    model = imported(file, "mgca", tmp_path, tokenizer=tokenizer)
    assert (model.config.num_prototypes, model.config.hidden_dim, model.config.projection_dim) == (
        7,
        32,
        EMBED,
    )
    torch.testing.assert_close(model.prototype_layer.weight.data, file["prototype_layer.weight"])
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(3))
    large = F.interpolate(pixels, (299, 299), mode="bilinear", align_corners=True)
    images, texts = model.embed_images(pixels), ["left effusion", "no"]
    pooled = resnet(large, file, "img_encoder_q.model.", BLOCKS).mean(dim=(2, 3))
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
            **{
                f"{head}.norm.{leaf}": (hidden,)
                for leaf in ("weight", "bias", "running_mean", "running_var")
            },
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
    before, after = (
        file[f"{name}.projection_{key}.weight"].flatten(1) for key in ("before", "after")
    )
    hidden = F.relu(
        lovt_norm(F.linear(x, before, file[f"{name}.projection_before.bias"]), file, f"{name}.norm")
    )
    return F.linear(hidden, after, file[f"{name}.projection_after.bias"])


def lovt_pool(x: Tensor, file: Tensors, model: str) -> Tensor:
    """(N, D), one sample, to (1, D)."""
    name = f"{model}.encoder.global_aggregator.attention"
    weights, biases = file[f"{name}.in_proj_weight"].chunk(3), file[f"{name}.in_proj_bias"].chunk(3)
    q, k, v = map(F.linear, (x.mean(dim=0, keepdim=True), x, x), weights, biases)
    return linear(attend(q, k, v, 8), file, f"{name}.out_proj")


def lovt_file(words: int) -> Tensors:
    square = [f"ll_attention.{name}_projection" for name in ("key", "value", "output")]
    return random_tensors(
        {
            **bert_shapes("model_b.encoder.language_model.", 1, words=words),
            **resnet_shapes("model_a.encoder.feature_extractor.backbone_layers.", BLOCKS),
            **lovt_side_shapes("model_a", 64),
            **lovt_side_shapes("model_b", WIDTH),
            **{f"{name}.weight": (EMBED, EMBED) for name in square},
            **{f"{name}.bias": (EMBED,) for name in square},
            **{
                f"ll_attention.norm.{leaf}": (EMBED,)
                for leaf in ("weight", "bias", "running_mean", "running_var")
            },
            "ll_attention.norm.num_batches_tracked": (),
            "loss_module.ll_alignments_a.0.pos_weights": (7, 7, 7, 7),
        }
    )


def test_lovt_import_is_the_whole_system(tmp_path: Path) -> None:
    """Poolings, heads and the attention between sentences and regions, from the released code's
    names.
    """
    tokenizer = train_wordpiece(
        ["left effusion.", "no pneumothorax."], vocab_size=WORDS, min_frequency=1
    )
    report = "left effusion. no pneumothorax."
    file = lovt_file(len(tokenizer.vocabulary))
    model = imported(file, "lovt", tmp_path, tokenizer=tokenizer)
    assert (model.config.hidden_dim, model.config.projection_dim, model.config.max_tokens) == (
        32,
        EMBED,
        16,
    )
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(3))
    regions = (
        resnet(pixels, file, "model_a.encoder.feature_extractor.backbone_layers.", BLOCKS)[0]
        .flatten(1)
        .T
    )
    ids, mask = tokenizer([report])
    tokens = bert_states(ids, mask, file, "model_b.encoder.language_model.", 1)[-1][0, 1:-1]
    sentences = torch.stack([tokens[:3].amax(dim=0), tokens[3:].amax(dim=0)])
    stops = tokenizer.vocabulary["."]
    assert [place for place, token in enumerate(ids[0, 1:-1].tolist()) if token == stops] == [
        2,
        len(tokens) - 1,
    ]
    with torch.no_grad():
        images, texts = model.embed_images(pixels), model.embed_texts([report])
    near = {"atol": 1e-4, "rtol": 1e-3}
    for side, items, embedded in (("model_a", regions, images), ("model_b", sentences, texts)):
        whole = lovt_head(lovt_pool(items, file, side), file, f"{side}.project_global")
        torch.testing.assert_close(embedded.global_NE, F.normalize(whole, dim=-1), **near)
        torch.testing.assert_close(
            embedded.local_NPE[0], lovt_head(items, file, f"{side}.project_local"), **near
        )
    a, b = texts.local_NPE[0], images.local_NPE[0]
    key_a, key_b = (linear(x, file, "ll_attention.key_projection") for x in (a, b))
    attended = attend(key_a, key_b, linear(b, file, "ll_attention.value_projection"), 1)
    expected = lovt_norm(
        linear(attended, file, "ll_attention.output_projection"), file, "ll_attention.norm"
    )
    with torch.no_grad():
        for_sentences, _ = model.cross_attention(texts.local_NPE, images.local_NPE, texts.mask_NP)
    torch.testing.assert_close(for_sentences[0], expected, **near)


@pytest.mark.parametrize("system", ["medclip", "mgca", "lovt"])
def test_export_to_the_published_file_is_the_inverse_of_the_import(
    system: str, tmp_path: Path
) -> None:
    """Also of token types that medvl trained, which MGCA's BERT does not have; sizes of images
    must be the published.
    """
    file = {
        "medclip": medclip_file,
        "mgca": lambda: mgca_file(WORDS),
        "lovt": lambda: lovt_file(WORDS),
    }[system]()
    model = imported(file, system, tmp_path)
    exported = export_published(model, tmp_path / "out")
    assert not exported.left_out
    assert max(exported.differences.values()) == 0
    name = "pytorch_model.bin" if system == "medclip" else f"{system}.ckpt"
    written = torch.load(tmp_path / "out" / name, weights_only=True)
    written = written if system == "medclip" else written["state_dict"]
    unused = {
        key
        for key in {*file, *written}
        if "pooler" in key or "position_ids" in key or "loss_module" in key
    }
    assert written.keys() - unused == file.keys() - unused
    for key in written.keys() - unused:
        assert torch.equal(written[key], file[key]), key
    types = model.text_encoder.backbone.embeddings.token_type_embeddings.weight
    with torch.no_grad():
        types += torch.randn(2, WIDTH)
    assert export_published(model, tmp_path / "types").differences["text"] < 1e-5
    if system == "mgca":
        with torch.no_grad():
            types.zero_()
        other = medvl.create_model(
            dataclasses.replace(model.config, encoder_size=None), tokenizer=model.tokenizer
        )
        other.load_state_dict(model.state_dict())
        with raises(CheckpointError, "mismatch"):
            export_published(other, tmp_path / "size")
