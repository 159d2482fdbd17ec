"""Imported MedKLIP and MAVL, with a second file for the text, against the published layers on
small random files.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.published import random_tensors
from helpers.published_layers import (
    WIDTH,
    Tensors,
    attend,
    bert_shapes,
    bert_states,
    linear,
    resnet,
    resnet_shapes,
)
from torch import Tensor, nn

import medvl
from medvl.cli import main as cli
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.errors import ConfigError, WeightsError
from medvl.export import import_checkpoint

SIZE, HIDDEN, LAYERS, BLOCKS = 32, 48, 2, (1, 2, 1)
ENTITIES = {
    "effusion": "fluid around the lung",
    "clear": "the lung is normal",
    "line": "a catheter in the lung",
}
ASPECTS = 8
CHILDREN = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3"}
LEAVES = ("weight", "bias")
NEAR = {"atol": 1e-4, "rtol": 1e-3}


def medklip_file() -> Tensors:
    """A ResNet of three stages with 64 channels at its end, and two layers of the decoder; names
    as published.
    """
    shapes = stages("res_features.")
    linears = {"res_l1": (64, 64), "res_l2": (SIZE, 64), "disease_embedding_layer": (SIZE, WIDTH)}
    linears |= {"cl_fc": (WIDTH, SIZE), "classifier": (2, SIZE)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    shapes |= {
        f"decoder.{key}": tuple(tensor.shape)
        for key, tensor in torch_decoder().state_dict().items()
    }
    return {f"module.{key}": tensor for key, tensor in random_tensors(shapes).items()}


def mavl_file() -> Tensors:
    """The same with MAVL's heads, for images of 64 pixels."""
    shapes = stages("backbone.")
    weights: dict[str, tuple[int, ...]] = {
        **{f"pool.{name}_proj": (64, 64) for name in "qkv"},
        "pool.c_proj": (SIZE, 64),
        "res_l1.0": (64, 64, 1, 1),
        "res_l2": (SIZE, 64, 1, 1),
        "disease_embedding_layer": (SIZE, WIDTH),
        "location_emb": (WIDTH, SIZE, ASPECTS),
        "classifier": (2, SIZE * ASPECTS),
    }
    for name, shape in weights.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    shapes |= {"pool.positional_embedding": (17, 64), "res_l1.1.weight": (1,), "temp": (ASPECTS,)}
    shapes |= {
        f"decoder.{key}": tuple(tensor.shape)
        for key, tensor in torch_decoder().state_dict().items()
    }
    return random_tensors(shapes)


def stages(prefix: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the stem and three stages of a ResNet in a `Sequential`."""
    numbers = {name: number for number, name in CHILDREN.items()}
    shapes = {}
    for key, shape in resnet_shapes("", (*BLOCKS, 1)).items():
        child, _, rest = key.partition(".")
        if child in numbers:
            shapes[f"{prefix}{numbers[child]}.{rest}"] = shape
    return shapes


def published_grid(pixels: Tensor, file: Tensors, prefix: str) -> Tensor:
    """Return the third stage (B, C, 4, 4) of images of 64 pixels."""
    named = {}
    for key, tensor in file.items():
        if key.startswith(prefix):
            child, _, rest = key.removeprefix(prefix).partition(".")
            named[f"{CHILDREN[child]}.{rest}"] = tensor
    return resnet(pixels, named, "", BLOCKS)


def published_states(query: Tensor, memory: Tensor, file: Tensors) -> Tensor:
    """Return (B, Q, D) by torch's decoder."""
    decoder, prefix = torch_decoder().eval(), "decoder."
    decoder.load_state_dict(
        {key.removeprefix(prefix): file[key] for key in file if key.startswith(prefix)}
    )
    return decoder(query.expand(len(memory), -1, -1), memory)


def torch_decoder() -> nn.TransformerDecoder:
    """The released decoder, layers of DETR with the norm first and without positions, is torch's
    own.
    """
    layer = nn.TransformerDecoderLayer(SIZE, 4, HIDDEN, norm_first=True, batch_first=True)
    return nn.TransformerDecoder(layer, LAYERS, nn.LayerNorm(SIZE))


def text_file(words: int) -> Tensors:
    """BERT with its pretraining heads, which the import leaves out."""
    heads = {f"cls.seq_relationship.{leaf}": (2, WIDTH)[: 2 - i] for i, leaf in enumerate(LEAVES)}
    pooler = {f"bert.pooler.dense.{leaf}": (WIDTH, WIDTH)[: 2 - i] for i, leaf in enumerate(LEAVES)}
    return random_tensors(
        {
            **bert_shapes("bert.", 1, words=words),
            **pooler,
            **heads,
            "cls.predictions.bias": (words,),
        }
    )


def published_scores(pixels: Tensor, queries: Tensor, file: Tensors) -> Tensor:
    """Return the logits (B, Q, 2) of absent and present, as `MedKLIP.forward` of the released
    code.
    """
    bare = {key.removeprefix("module."): tensor for key, tensor in file.items()}
    grid = published_grid(pixels, bare, "res_features.").flatten(2).transpose(1, 2)
    memory = linear(F.relu(linear(grid, bare, "res_l1")), bare, "res_l2")
    return linear(
        published_states(linear(queries, bare, "disease_embedding_layer"), memory, bare),
        bare,
        "classifier",
    )


def tokenizer() -> Tokenizer:
    return train_wordpiece(
        [*ENTITIES.values(), "aspect"], vocab_size=60, min_frequency=1, max_tokens=16
    )


def saved(folder: Path, **others: Any) -> list[Path]:
    """Return the paths of MedKLIP's file, as its training writes it, of the text encoder, and of
    the entities.
    """
    paths = [folder / name for name in ("checkpoint.pth", "pytorch_model.bin", "entities.json")]
    torch.save({"model": medklip_file(), "epoch": 3, "config": {"d_model": 256}}, paths[0])
    torch.save(text_file(tokenizer().vocab_size), paths[1])
    paths[2].write_text(json.dumps(others.get("entities", ENTITIES)))
    return paths


@torch.no_grad()
def test_medklip_import_equals_the_released_scores_of_its_entities(tmp_path: Path) -> None:
    """Also after saving and loading; the book is made by the text encoder of the second file."""
    paths, words, out = saved(tmp_path), tokenizer(), tmp_path / "out"
    words.save(tmp_path / "tokenizer")
    options = [
        "--text-file",
        str(paths[1]),
        "--entities",
        str(paths[2]),
        "--tokenizer",
        str(tmp_path / "tokenizer"),
    ]
    cli.main(["import", "medklip", str(paths[0]), *options, "--out", str(out)])
    model, file = medvl.load(out), medklip_file()
    assert model.name == "medklip"
    assert model.config.entities == tuple(ENTITIES)
    assert (model.config.decoder_layers, model.config.fit, model.config.max_tokens) == (
        LAYERS,
        "squash",
        16,
    )
    ids, mask = words(list(ENTITIES.values()))
    queries = bert_states(ids, mask, text_file(words.vocab_size), "bert.", 1)[-1][:, 0]
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    logits = published_scores(pixels, queries, file)
    torch.testing.assert_close(model.queries(), queries, **NEAR)
    images = model.embed_images(pixels)
    states, _ = model.ask(images.local_NPE)
    torch.testing.assert_close(model.presence(states), logits, **NEAR)
    odds = model.similarity(images, model.embed_texts(list(ENTITIES)))
    torch.testing.assert_close(odds, logits[..., 1] - logits[..., 0], **NEAR)
    torch.testing.assert_close(model.place(states), linear(states, file, "module.cl_fc"))
    report = json.loads((out / "import.json").read_text())
    assert set(report["zeros"]) == {
        f"{book}.{name}" for book in ("book", "places") for name in ("vectors_QD", "sha256")
    }
    assert len(report["text_sha256"]) == len(report["entities_sha256"]) == 64
    assert {key.split(".")[0] for key in report["left_out"]} == {"bert", "cls"}


@torch.no_grad()
def test_mavl_import_equals_the_released_scores_of_its_aspects(tmp_path: Path) -> None:
    """Presence, place and the pooled vector, from eight sentences of each entity."""
    sentences = {
        name: [text, *(f"{text} aspect" * n for n in range(1, ASPECTS))]
        for name, text in ENTITIES.items()
    }
    paths, words, file = saved(tmp_path, entities=sentences), tokenizer(), mavl_file()
    torch.save({"model": file}, paths[0])
    model: Any = import_checkpoint(
        "mavl", paths[0], text_file=paths[1], entities=paths[2], tokenizer=words
    ).model
    assert (model.config.image_size, model.aspects) == (64, ASPECTS)
    ids, mask = words([text for texts in sentences.values() for text in texts])
    queries = bert_states(ids, mask, text_file(words.vocab_size), "bert.", 1)[-1][:, 0]
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    grid = published_grid(pixels, file, "backbone.")
    hidden = F.prelu(
        F.conv2d(grid, file["res_l1.0.weight"], file["res_l1.0.bias"]), file["res_l1.1.weight"]
    )
    memory = F.conv2d(hidden, file["res_l2.weight"], file["res_l2.bias"]).flatten(2).transpose(1, 2)
    states = published_states(linear(queries, file, "disease_embedding_layer"), memory, file)
    logits = linear(states.reshape(2, len(ENTITIES), -1), file, "classifier")
    place = F.conv1d(
        states.transpose(1, 2),
        file["location_emb.weight"],
        file["location_emb.bias"],
        stride=ASPECTS,
    )
    tokens = grid.flatten(2).transpose(1, 2)
    tokens = (
        torch.cat([tokens.mean(1, keepdim=True), tokens], 1) + file["pool.positional_embedding"]
    )
    q, k, v = (linear(tokens, file, f"pool.{name}_proj") for name in "qkv")
    pooled = linear(attend(q, k, v, 8), file, "pool.c_proj")[:, 0]

    images = model.embed_images(pixels)
    ours, _ = model.ask(images.local_NPE)
    torch.testing.assert_close(model.presence(ours), logits, **NEAR)
    torch.testing.assert_close(model.place(ours), place.transpose(1, 2), **NEAR)
    torch.testing.assert_close(model.encode_image(pixels), F.normalize(pooled, dim=-1), **NEAR)
    assert torch.equal(model.logit_scale, file["temp"])
    paths[2].write_text(json.dumps(ENTITIES))
    with raises(ConfigError, "malformed", "entities", names="list of 8 sentences"):
        import_checkpoint("mavl", paths[0], text_file=paths[1], entities=paths[2])


def test_medklip_without_a_text_encoder_is_refused_and_its_image_encoder_is_imported(
    tmp_path: Path,
) -> None:
    paths = saved(tmp_path)
    with raises(
        ConfigError,
        "missing",
        "text_file",
        names="medklip_image imports the image encoder without it",
    ):
        import_checkpoint("medklip", paths[0])
    with raises(WeightsError, "mismatch"):
        import_checkpoint("medklip", paths[0], text_file=paths[0])
    with raises(ConfigError, "conflict", "entities"):
        import_checkpoint("medklip_image", paths[0], entities=paths[2])
    whole = import_checkpoint("medklip", paths[0], text_file=paths[1]).model
    alone: Any = import_checkpoint("medklip_image", paths[0]).model
    assert alone.text_encoder is None
    expected = whole.state_dict()
    for name, tensor in alone.image_encoder.state_dict().items():
        assert torch.equal(tensor, expected[f"image_encoder.{name}"]), name
    assert whole.config.entities == medvl.models.MedKLIPConfig().entities


def test_text_files_without_the_heads_of_pretraining_are_taken(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    text = torch.load(paths[1], weights_only=True)
    bare = {
        key.removeprefix("bert."): tensor for key, tensor in text.items() if key.startswith("bert.")
    }
    first = import_checkpoint("medklip", paths[0], text_file=paths[1]).model.state_dict()
    torch.save(bare, paths[1])
    second = import_checkpoint("medklip", paths[0], text_file=paths[1]).model.state_dict()
    assert all(torch.equal(tensor, first[name]) for name, tensor in second.items())


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"effusion": ""}', '{"effusion": 3}', '["effusion", "effusion"]', "3"]
)
def test_malformed_entities_are_refused(content: str, tmp_path: Path) -> None:
    paths = saved(tmp_path)
    paths[2].write_text(content)
    with raises(ConfigError, "malformed", "entities", names="entities.json"):
        import_checkpoint("medklip", paths[0], text_file=paths[1], entities=paths[2])
    with raises(ConfigError, "not_found", "entities"):
        import_checkpoint("medklip", paths[0], text_file=paths[1], entities=tmp_path / "none.json")


def test_a_list_of_names_keeps_the_descriptions_of_the_library(tmp_path: Path) -> None:
    paths = saved(tmp_path, entities=["Edema", "Pneumothorax"])
    config: Any = import_checkpoint(
        "medklip", paths[0], text_file=paths[1], entities=paths[2]
    ).model.config
    assert (config.entities, config.descriptions) == (("Edema", "Pneumothorax"), {})
