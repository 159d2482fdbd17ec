"""Imported MedKLIP, whose text encoder is a second file, against the published layers on small random files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.published import random_tensors
from helpers.published_layers import WIDTH, Tensors, bert_shapes, bert_states, linear, resnet, resnet_shapes
from torch import Tensor, nn

import medvl
from medvl.cli import main as cli
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.errors import ConfigError, WeightsError
from medvl.export import import_checkpoint

SIZE, HIDDEN, LAYERS, BLOCKS = 32, 48, 2, (1, 2, 1)
ENTITIES = {"effusion": "fluid around the lung", "clear": "the lung is normal", "line": "a catheter in the lung"}
LEAVES = ("weight", "bias")
NEAR = {"atol": 1e-4, "rtol": 1e-3}


def medklip_file() -> Tensors:
    """A ResNet of three stages with 64 channels at its end, and two layers of the decoder; names as published."""
    children = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6"}
    stages = {key: shape for key, shape in resnet_shapes("", (*BLOCKS, 1)).items() if not key.startswith("layer4")}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, shape in stages.items():
        child, _, rest = key.partition(".")
        shapes[f"res_features.{children[child]}.{rest}"] = shape
    linears = {"res_l1": (64, 64), "res_l2": (SIZE, 64), "disease_embedding_layer": (SIZE, WIDTH)}
    linears |= {"cl_fc": (WIDTH, SIZE), "classifier": (2, SIZE)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    shapes |= {f"decoder.{key}": tuple(tensor.shape) for key, tensor in torch_decoder().state_dict().items()}
    return {f"module.{key}": tensor for key, tensor in random_tensors(shapes).items()}


def torch_decoder() -> nn.TransformerDecoder:
    """The released decoder, layers of DETR with the norm first and without positions, is torch's own."""
    layer = nn.TransformerDecoderLayer(SIZE, 4, HIDDEN, norm_first=True, batch_first=True)
    return nn.TransformerDecoder(layer, LAYERS, nn.LayerNorm(SIZE))


def text_file(words: int) -> Tensors:
    """BERT with its pretraining heads, which the import leaves out."""
    heads = {f"cls.seq_relationship.{leaf}": (2, WIDTH)[: 2 - i] for i, leaf in enumerate(LEAVES)}
    pooler = {f"bert.pooler.dense.{leaf}": (WIDTH, WIDTH)[: 2 - i] for i, leaf in enumerate(LEAVES)}
    return random_tensors({**bert_shapes("bert.", 1, words=words), **pooler, **heads, "cls.predictions.bias": (words,)})


def published_scores(pixels: Tensor, queries: Tensor, file: Tensors) -> Tensor:
    """Return the logits (B, Q, 2) of absent and present, as `MedKLIP.forward` of the released code."""
    bare = {key.removeprefix("module."): tensor for key, tensor in file.items()}
    names = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3"}
    named = {}
    for key, tensor in bare.items():
        if key.startswith("res_features."):
            child, _, rest = key.removeprefix("res_features.").partition(".")
            named[f"{names[child]}.{rest}"] = tensor
    grid = resnet(pixels, named, "", BLOCKS).flatten(2).transpose(1, 2)
    memory = linear(F.relu(linear(grid, bare, "res_l1")), bare, "res_l2")
    decoder = torch_decoder().eval()
    decoder.load_state_dict({key.removeprefix("decoder."): bare[key] for key in bare if key.startswith("decoder.")})
    query = linear(queries, bare, "disease_embedding_layer").expand(len(pixels), -1, -1)
    return linear(decoder(query, memory), bare, "classifier")


def tokenizer() -> Tokenizer:
    return train_wordpiece(list(ENTITIES.values()), vocab_size=60, min_frequency=1, max_tokens=16)


def saved(folder: Path, **others: Any) -> list[Path]:
    """Return the paths of MedKLIP's file, as its training writes it, of the text encoder, and of the entities."""
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
    options = ["--text-file", str(paths[1]), "--entities", str(paths[2]), "--tokenizer", str(tmp_path / "tokenizer")]
    cli.main(["import", "medklip", str(paths[0]), *options, "--out", str(out)])
    model, file = medvl.load(out), medklip_file()
    assert model.name == "medklip"
    assert model.config.entities == tuple(ENTITIES)
    assert (model.config.decoder_layers, model.config.fit, model.config.max_tokens) == (LAYERS, "squash", 16)
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


def test_medklip_without_a_text_encoder_is_refused_and_its_image_encoder_is_imported(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    with raises(ConfigError, "missing", "text_file", names="medklip_image imports the image encoder without it"):
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
    bare = {key.removeprefix("bert."): tensor for key, tensor in text.items() if key.startswith("bert.")}
    first = import_checkpoint("medklip", paths[0], text_file=paths[1]).model.state_dict()
    torch.save(bare, paths[1])
    second = import_checkpoint("medklip", paths[0], text_file=paths[1]).model.state_dict()
    assert all(torch.equal(tensor, first[name]) for name, tensor in second.items())


@pytest.mark.parametrize("content", ["[]", "{", '{"effusion": ""}', '{"effusion": 3}', '["effusion", "effusion"]', "3"])
def test_malformed_entities_are_refused(content: str, tmp_path: Path) -> None:
    paths = saved(tmp_path)
    paths[2].write_text(content)
    with raises(ConfigError, "malformed", "entities", names="entities.json"):
        import_checkpoint("medklip", paths[0], text_file=paths[1], entities=paths[2])
    with raises(ConfigError, "not_found", "entities"):
        import_checkpoint("medklip", paths[0], text_file=paths[1], entities=tmp_path / "none.json")


def test_a_list_of_names_keeps_the_descriptions_of_the_library(tmp_path: Path) -> None:
    paths = saved(tmp_path, entities=["Edema", "Pneumothorax"])
    config: Any = import_checkpoint("medklip", paths[0], text_file=paths[1], entities=paths[2]).model.config
    assert (config.entities, config.descriptions) == (("Edema", "Pneumothorax"), {})
