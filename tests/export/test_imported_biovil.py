"""Imported BioViL and BioViL-T, each from two files, against the published layers written out
from the files' keys.
"""

import json
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
    bert_shapes,
    bert_states,
    linear,
    norm,
    resnet,
    resnet_shapes,
    texts,
)
from helpers.served import tiny_convirt
from torch import Tensor

import medvl
from medvl.cli import main as cli
from medvl.errors import ConfigError, WeightsError
from medvl.export import export_published, import_checkpoint

BLOCKS, NEAR = (1, 1, 1, 1), {"atol": 1e-4, "rtol": 1e-3}


def image_file(width: int = 64, **others: tuple[int, ...]) -> Tensors:
    sizes = {
        "weight": (128,),
        "bias": (128,),
        "running_mean": (128,),
        "running_var": (128,),
        "num_batches_tracked": (),
    }
    return random_tensors(
        {
            **resnet_shapes("encoder.encoder.", BLOCKS),
            "encoder.encoder.fc.weight": (10, 64),
            "encoder.encoder.fc.bias": (10,),
            "projector.model.0.weight": (128, width, 1, 1),
            **{f"projector.model.1.{leaf}": shape for leaf, shape in sizes.items()},
            "projector.model.3.weight": (128, 128, 1, 1),
            "projector.model.3.bias": (128,),
            **others,
        }
    )


def text_file() -> Tensors:
    layers = {
        "cls_projection_head.dense_to_hidden": WIDTH,
        "cls_projection_head.dense_to_output": 128,
    }
    transform = "cls.predictions.transform"
    norms = ("cls_projection_head.LayerNorm", f"{transform}.LayerNorm")
    file = random_tensors(
        {
            **bert_shapes("bert.", 1),
            "bert.embeddings.position_ids": (1, 16),
            **{f"{name}.weight": (128, width) for name, width in layers.items()},
            f"{transform}.dense.weight": (WIDTH, WIDTH),
            **{f"{name}.bias": (128,) for name in (*layers, f"{transform}.dense", *norms)},
            **{f"{name}.weight": (128,) for name in norms},
            "cls.predictions.bias": (WORDS,),
        }
    )
    copies = {"weight": "bert.embeddings.word_embeddings.weight", "bias": "cls.predictions.bias"}
    return file | {f"cls.predictions.decoder.{leaf}": file[name] for leaf, name in copies.items()}


def pooler_shapes(blocks: int, dim: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.missing_previous_emb": (1, dim, 1, 1),
        "encoder.backbone_to_vit.weight": (dim, 64, 1, 1),
        "encoder.vit_pooler.type_embed": (2, 1, dim),
    }
    norms = ["encoder.vit_pooler.norm_post"]
    for block in range(blocks):
        name = f"encoder.vit_pooler.blocks.{block}"
        square = ("attn.proj", "mlp.fc1", "mlp.fc2")
        shapes |= {
            f"{name}.{part}.weight": (dim, dim)
            for part in ("attn.proj_q", "attn.proj_k", "attn.proj_v")
        }
        shapes |= {f"{name}.{part}.weight": (dim, dim) for part in square}
        shapes |= {f"{name}.{part}.bias": (dim,) for part in square}
        norms += [f"{name}.norm1", f"{name}.norm2"]
    return {**shapes, **{f"{name}.{leaf}": (dim,) for name in norms for leaf in ("weight", "bias")}}


def saved(image: Tensors, text: Tensors, folder: Path) -> tuple[Path, Path]:
    torch.save(image, folder / "image.pt")
    torch.save(text, folder / "pytorch_model.bin")
    return folder / "image.pt", folder / "pytorch_model.bin"


def projector(x: Tensor, file: Tensors) -> Tensor:
    """(B, P, D) to (B, P, 128); its convolutions of width 1 are matrices."""
    hidden = F.linear(x, file["projector.model.0.weight"].flatten(1))
    leaves = (
        file[f"projector.model.1.{leaf}"]
        for leaf in ("running_mean", "running_var", "weight", "bias")
    )
    hidden = F.relu(F.batch_norm(hidden.flatten(0, 1), *leaves)).view_as(hidden)
    return F.linear(
        hidden, file["projector.model.3.weight"].flatten(1), file["projector.model.3.bias"]
    )


def pooled(current: Tensor, prior: Tensor, position: Tensor, file: Tensors, blocks: int) -> Tensor:
    x = torch.cat([current, prior], dim=1)
    place = torch.cat([position + kind for kind in file["encoder.vit_pooler.type_embed"]])
    for block in range(blocks):
        name = f"encoder.vit_pooler.blocks.{block}"
        y = norm(x, file, f"{name}.norm1", 1e-6) + place
        q, k, v = (linear(y, file, f"{name}.attn.proj_{part}") for part in "qkv")
        x = x + linear(attend(q, k, v, 8), file, f"{name}.attn.proj")
        y = linear(
            F.gelu(linear(norm(x, file, f"{name}.norm2", 1e-6), file, f"{name}.mlp.fc1")),
            file,
            f"{name}.mlp.fc2",
        )
        x = x + y
    return norm(x, file, "encoder.vit_pooler.norm_post", 1e-6)[:, : current.shape[1]]


def test_biovil_import_is_the_whole_system(tmp_path: Path) -> None:
    """Regions, texts and scores of masked words, also after saving and loading."""
    image, text = image_file(), text_file()
    paths = saved(image, text, tmp_path)
    cli.main(
        [
            "import",
            "biovil",
            str(paths[0]),
            "--text-file",
            str(paths[1]),
            "--out",
            str(tmp_path / "out"),
        ]
    )
    report = json.loads((tmp_path / "out" / "import.json").read_text())
    fc = {f"encoder.encoder.fc.{leaf}" for leaf in ("weight", "bias")}
    copies = {f"cls.predictions.decoder.{leaf}" for leaf in ("weight", "bias")}
    assert set(report["left_out"]) == {*fc, *copies, "bert.embeddings.position_ids"}
    assert len(report["text_sha256"]) == 64
    model = medvl.load(tmp_path / "out")
    assert (model.config.projection_dim, model.config.vocab_size, model.config.max_tokens) == (
        128,
        WORDS,
        16,
    )
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    expected = projector(
        resnet(pixels, image, "encoder.encoder.", BLOCKS).flatten(2).transpose(1, 2), image
    )
    ids, mask = texts()
    states = bert_states(ids, mask, text, "bert.", 1)[-1]
    head = "cls_projection_head"
    hidden = norm(
        F.gelu(linear(states[:, 0], text, f"{head}.dense_to_hidden")),
        text,
        f"{head}.LayerNorm",
        1e-12,
    )
    vectors = linear(hidden, text, f"{head}.dense_to_output")
    transform = "cls.predictions.transform"
    hidden = norm(
        F.gelu(linear(states[mask], text, f"{transform}.dense")),
        text,
        f"{transform}.LayerNorm",
        1e-12,
    )
    with torch.no_grad():
        torch.testing.assert_close(model.embed_regions(pixels), expected, **NEAR)
        torch.testing.assert_close(
            model.encode_image(pixels), F.normalize(expected.mean(dim=1), dim=-1), **NEAR
        )
        torch.testing.assert_close(
            model.encode_text(ids, mask), F.normalize(vectors, dim=-1), **NEAR
        )
        words = model.word_head(
            states[mask], model.text_encoder.backbone.get_input_embeddings().weight
        )
    torch.testing.assert_close(words, linear(hidden, text, "cls.predictions.decoder"), **NEAR)


def test_biovil_t_import_is_the_whole_system(tmp_path: Path) -> None:
    """Regions of an image alone, whose second half is the stand-in, and of an image with its
    prior.
    """
    image, text = image_file(width=64, **pooler_shapes(2, 32)), text_file()
    paths = saved(image, text, tmp_path)
    model = import_checkpoint("biovil_t", paths[0], text_file=paths[1]).model
    assert (model.config.pooler_dim, model.config.pooler_blocks) == (32, 2)
    pixels = torch.rand(2, 3, 448, 448, generator=torch.Generator().manual_seed(3))
    grid = resnet(pixels, image, "encoder.encoder.", BLOCKS).flatten(2).transpose(1, 2)
    current, prior = F.linear(grid, image["encoder.backbone_to_vit.weight"].flatten(1)).split(1)
    missing = image["encoder.missing_previous_emb"].flatten().expand_as(current)
    changed = pooled(current, prior, model.pooler.position_PD, image, 2)
    with torch.no_grad():
        alone, both = model.embed_regions(pixels[:1]), model.embed_regions(pixels[:1], pixels[1:])
    torch.testing.assert_close(
        alone, projector(torch.cat([current, missing], dim=2), image), **NEAR
    )
    torch.testing.assert_close(both, projector(torch.cat([current, changed], dim=2), image), **NEAR)


@pytest.mark.parametrize("system", ["biovil", "biovil_t"])
def test_export_to_the_published_files_is_the_inverse_of_the_import(
    system: str, tmp_path: Path
) -> None:
    others = pooler_shapes(2, 32) if system == "biovil_t" else {}
    image, text = image_file(**others), text_file()
    paths = saved(image, text, tmp_path)
    model = import_checkpoint(system, paths[0], text_file=paths[1]).model
    exported = export_published(model, tmp_path / "out")
    assert not exported.left_out
    assert max(exported.differences.values()) == 0
    for file, original in (("image_model.pt", image), ("text_model.pt", text)):
        written = torch.load(tmp_path / "out" / file, weights_only=True)
        unused = {"bert.embeddings.position_ids"}
        assert written.keys() == original.keys() - unused
        for key, tensor in written.items():
            if "encoder.fc." not in key:
                assert torch.equal(tensor, original[key]), key
        assert all(written[key].shape[0] == 1000 for key in written if "encoder.fc." in key)
    with raises(ConfigError, "unsupported"):
        export_published(tiny_convirt(), tmp_path / "other")


def test_a_missing_or_unwanted_second_file_is_refused(tmp_path: Path) -> None:
    paths = saved(image_file(), text_file(), tmp_path)
    with raises(ConfigError, "missing", "text_file"):
        import_checkpoint("biovil", paths[0])
    with raises(ConfigError, "conflict", "text_file"):
        import_checkpoint("biovil_image", paths[0], text_file=paths[1])
    with raises(WeightsError, "mismatch", names="missing"):
        import_checkpoint("biovil_t", paths[0], text_file=paths[1])


@pytest.mark.parametrize("system", ["biovil_image", "cxrbert"])
def test_each_file_alone_is_an_encoder(system: str, tmp_path: Path) -> None:
    paths = dict(
        zip(("biovil_image", "cxrbert"), saved(image_file(), text_file(), tmp_path), strict=True)
    )
    imported = import_checkpoint(system, paths[system])
    assert [name for name, child in imported.model.named_children()] == [
        "image_encoder" if system == "biovil_image" else "text_encoder"
    ]
