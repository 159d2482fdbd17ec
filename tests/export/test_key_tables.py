"""Key tables of every published layout: they cover all entries and fill all parameters, and
refuse other files.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.published import LISTS, meta_tensors, shapes_of
from torch import Tensor

from medvl.errors import ConfigError, WeightsError
from medvl.export.exporters.published import published_contents
from medvl.export.importers.import_checkpoint import (
    NOT_IMPORTED,
    find_importer,
    list_importers,
    match_checkpoint,
    matching_importers,
)
from medvl.export.importers.key_map import keep, to_medvl

SYSTEMS = {
    *("albert_mlm", "albert_mlm_sop", "bert_mlm", "bert_mlm_nsp"),
    *(
        "biomedclip",
        "biovil",
        "biovil_t",
        "chexzero",
        "colipri",
        "ct_clip",
        "convirt_lovt",
        "convirt_pytorch",
        "convirt_vilmedic",
        "gloria",
        "hlip",
        "hf-clip",
        "hf-siglip",
    ),
    *(
        "albef",
        "arl",
        "carzero",
        "cxrclip",
        "kad",
        "lovt",
        "lvit",
        "lvit_monuseg",
        "lxmert",
        "m3ae",
        "mavl",
        "medclip",
        "medklip",
        "medvill",
        "meter",
        "mgca",
        "mrm",
        "vilt",
        "visualbert",
        "ptunifier",
        "r2gen",
        "r2gen_mimic",
        "radzero",
    ),
}

VOLUMES = ("colipri", "ct_clip", "hlip")
"""Systems whose volumes are cut, not resized."""
WORDS = [f"word{number}" for number in range(28_991)]
"""With five special tokens, as many as the vocabulary of `bioclinicalbert.txt`."""
EXPORTED = ("biovil", "biovil_t", "lovt", "medclip", "mgca")


BICUBIC, BILINEAR = "bicubic_antialias", "bilinear_antialias"
RESIZED = {
    **dict.fromkeys(
        ("arl", "biomedclip", "kad", "m3ae", "medclip", "ptunifier", "radzero"), BICUBIC
    ),
    **dict.fromkeys(("biovil", "biovil_t", "mavl", "medklip", "r2gen", "r2gen_mimic"), BILINEAR),
}
"""Kernels with which released code resizes images for inference, where it is not area averaging."""


def fitted(
    tensors: dict[str, Tensor],
    name: str,
    entities: Path | None = None,
    tokenizer: Path | None = None,
) -> Any:
    with torch.device("meta"):
        return match_checkpoint(tensors, find_importer(name), "file", tokenizer, entities)


def import_error(tensors: dict[str, Tensor], name: str) -> str:
    with raises(WeightsError, "mismatch", names=f"file is not a checkpoint of {name}: ") as caught:
        fitted(tensors, name)
    return str(caught.value)


@pytest.mark.parametrize("listed", LISTS)
def test_every_entry_is_mapped_or_left_out_and_every_parameter_is_filled(
    listed: str, tmp_path: Path
) -> None:
    tensors = meta_tensors(shapes_of(listed))
    entities = tmp_path / "entity2id.txt"
    entities.write_text(
        "50\n" + "".join(f"C{number}\t{number}\tname {number}\n" for number in range(50))
    )
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    given = {"arl": {"entities": entities}, "lvit": {"tokenizer": tmp_path}}.get(LISTS[listed], {})
    model, mapped, zeros = fitted(tensors, LISTS[listed], **given)
    loaded = [key for keys in mapped.sources.values() for key in keys]
    assert len(loaded) == len(set(loaded))
    keys = {key.removeprefix("module.") for key in tensors}
    assert set(loaded) | set(mapped.left_out) == keys
    assert not set(loaded) & set(mapped.left_out)
    assert all(len(why) > 10 for why in mapped.left_out.values())
    state = model.state_dict()
    assert set(mapped.tensors) | set(zeros) == set(state)
    assert {name: tensor.shape for name, tensor in mapped.tensors.items()} == {
        name: state[name].shape for name in mapped.tensors
    }
    assert LISTS[listed] in matching_importers(list(tensors))
    if LISTS[listed] in SYSTEMS - {*VOLUMES} and listed != "lvit bioclinicalbert":
        assert model.transform.resize == RESIZED.get(LISTS[listed], "area")
        assert model.transform.pad_first == (LISTS[listed] == "medclip")
    if LISTS[listed] in SYSTEMS - {"ct_clip"}:  # no rule is so broad that it drops a layer
        copies = (
            ".crossattention.",
            "/res_features.",
            ".knowledge_",
        )  # unused, or tensors that the file has twice
        copies += ("pix_module", ".conv_sig.", ".CTBN", "upVit", ".head.", ".self_attn.")
        assert len([key for key in mapped.left_out if not any(part in key for part in copies)]) < 25


@pytest.mark.parametrize("listed", [name for name in LISTS if LISTS[name] in EXPORTED])
def test_published_exports_have_the_listed_names_and_shapes(listed: str) -> None:
    """What is missing are tensors that no output depends on, and MedCLIP's loader requires all."""
    shapes = shapes_of(listed)
    model, _, _ = fitted(meta_tensors(shapes), LISTS[listed])
    contents, unknown = published_contents(model, find_importer(LISTS[listed]))
    assert not unknown
    files = [content.get("state_dict", content) for content in contents.values()]
    written = {key: tuple(tensor.shape) for file in files for key, tensor in file.items()}
    missing = {key for key in shapes if key not in written}
    assert written == {key: shape for key, shape in shapes.items() if key not in missing}
    unused = ("position_ids", ".pooler.", ".crossattention.", "_local_atten_layer.", "loss_module.")
    assert all(any(part in key for part in unused) for key in missing)
    assert not (LISTS[listed] == "medclip" and missing)


def test_importers_and_published_lists_correspond() -> None:
    without_list = {
        "convirt_vilmedic",
        "lxmert",
        "vilt",
        "visualbert",
    }  # layouts of libraries, or known by prefixes
    without_list |= {"lvit_monuseg"}  # the layout of lvit
    without_list |= {
        "albef",
        "meter",
    }  # by their code alone; tested in test_imported_fusion_encoders.py
    without_list |= {"hf-clip", "hf-siglip"}  # of transformers; test_imported_hugging_face.py
    without_list |= {"albert_mlm", "albert_mlm_sop", "bert_mlm", "bert_mlm_nsp"}
    assert {importer.name for importer in list_importers()} == set(LISTS.values()) | without_list
    assert {importer.name for importer in list_importers() if importer.kind == "system"} == SYSTEMS
    assert set(NOT_IMPORTED) == {"benchx_converters"}
    with raises(ConfigError, "unsupported", "system", names="benchx_converters"):
        find_importer("benchx_converters")
    with raises(ConfigError, "unknown_name", "system", names="did you mean medclip"):
        find_importer("medclap")


@pytest.mark.parametrize("listed", ["gloria_resnet18", "m3ae"])
def test_missing_unexpected_and_misshaped_entries_are_refused(listed: str) -> None:
    name = LISTS[listed]
    shapes = shapes_of(listed)
    loaded = next(key for key in shapes if key.endswith("layer.3.output.dense.weight"))
    without = {key: shape for key, shape in shapes.items() if key != loaded}
    names = "missing text_encoder.backbone.encoder.layer.3.output.dense.weight"
    assert names in import_error(meta_tensors(without), name)
    assert "unexpected spam.weight" in import_error(
        meta_tensors({**shapes, "spam.weight": (2, 2)}), name
    )
    text = import_error(meta_tensors({**shapes, loaded: (5, 7)}), name)
    assert f"{loaded} is (5, 7), expected " in text


def test_error_for_another_systems_file_names_that_system() -> None:
    text = import_error(meta_tensors(shapes_of("gloria_resnet50")), "chexzero")
    assert "unexpected gloria.text_encoder.model.embeddings" in text
    assert "; and 5" in text
    assert text.endswith(" Its keys are those of gloria or gloria_encoders.")
    text = import_error(
        meta_tensors({"conv1.weight": (64, 3, 7, 7), "fc.weight": (10, 64)}), "medklip_image"
    )
    assert "unexpected conv1.weight; unexpected fc.weight" in text
    assert "unknown architecture of the image encoder" in text


def test_missing_piece_of_a_fused_matrix_is_named() -> None:
    shapes = shapes_of("cxrclip_swin_tiny")
    block = "image_encoder.image_encoder.encoder.layers.2.blocks.1.attention.self"
    del shapes[f"{block}.key.bias"]
    text = import_error(meta_tensors(shapes), "cxrclip")
    assert (
        f"layers.2.blocks.1.attn.qkv.bias needs 3 pieces, got {block}.query.bias, "
        f"{block}.value.bias" in text
    )


def test_pieces_that_cannot_be_one_matrix_are_refused() -> None:
    """Pieces of unequal heights may have the right sum."""
    table = [
        keep(f"{name}.weight", "qkv.weight", part=(index, 3)) for index, name in enumerate("qkv")
    ]
    for shapes in ([(4, 4), (2, 4), (6, 4)], [(4, 4), (4, 5), (4, 4)], [(), (), ()]):
        tensors = {
            f"{name}.weight": torch.zeros(shape) for name, shape in zip("qkv", shapes, strict=True)
        }
        mapped = to_medvl(tensors, table)
        assert not mapped.tensors
        assert (
            f"qkv.weight needs 3 pieces of equal shape, got q.weight {shapes[0]}, k.weight"
            in mapped.problems[0]
        )


def test_entry_under_its_old_and_new_name_is_refused() -> None:
    tensors = {f"LayerNorm.{name}": torch.zeros(2) for name in ("gamma", "weight", "bias")}
    mapped = to_medvl(tensors, [keep("LayerNorm.*", "norm.*")])
    assert mapped.problems == ["LayerNorm.weight is in the file twice, under an old name too"]


def test_sizes_cannot_be_read_from_tensors_of_other_ranks() -> None:
    resnet = {"res_features.0.weight": (64,), "res_features.4.0.conv1.weight": (64, 64, 1, 1)}
    assert "shapes from which no model can be built" in import_error(
        meta_tensors(resnet), "medklip_image"
    )
    model = "img_encoder_q.model"
    transformer = {f"{model}.cls_token": (1, 1, 768), f"{model}.pos_embed": (1, 197, 768)}
    transformer |= {f"{model}.patch_embed.proj.weight": (768, 3, 16)}
    assert "shapes from which no model can be built" in import_error(
        meta_tensors(transformer), "mgca"
    )
    flat = {**shapes_of("gloria_resnet50"), "gloria.img_encoder.local_embedder.weight": (768,)}
    assert (
        "gloria.img_encoder.local_embedder.weight is (768,), expected (768, 1024)"
        in import_error(meta_tensors(flat), "gloria")
    )


def test_parallel_wrapper_and_old_layer_norm_names_are_normalized() -> None:
    shapes = {
        f"module.{key}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): shape
        for key, shape in shapes_of("gloria_resnet18").items()
    }
    model, mapped, _ = fitted(meta_tensors(shapes), "gloria_encoders")
    assert set(mapped.tensors) == set(model.state_dict())


def test_gloria_region_head_is_imported_from_a_1x1_convolution() -> None:
    tensors = meta_tensors(shapes_of("gloria_resnet50"))
    kernel = torch.randn(768, 1024, 1, 1)
    _, mapped, _ = fitted({**tensors, "gloria.img_encoder.local_embedder.weight": kernel}, "gloria")
    assert torch.equal(mapped.tensors["region_head.weight"], kernel[:, :, 0, 0])
    text = import_error(meta_tensors(shapes_of("gloria_resnet18")), "gloria")
    assert "gloria.img_encoder.local_embedder.weight is (768, 1024), expected (768, 256)" in text
    assert text.endswith(" Its keys are those of gloria_encoders.")


def test_chexzero_with_320_pixels_is_imported() -> None:
    """Patches of 16 pixels, 320 pixels, 768 shared dimensions, as its code builds it without
    pretraining.
    """
    shapes = shapes_of("chexzero")
    shapes |= {
        "visual.conv1.weight": (768, 3, 16, 16),
        "visual.positional_embedding": (401, 768),
        "visual.proj": (768, 768),
        "text_projection": (512, 768),
    }
    model, _, _ = fitted(meta_tensors(shapes), "chexzero")
    assert model.config.image_size == 320
    assert model.image_encoder.feature_dim == model.text_encoder.feature_dim == 768


def test_kad_at_224_pixels_may_lack_the_copy_of_its_last_stage() -> None:
    shapes = {
        key: shape
        for key, shape in shapes_of("kad").items()
        if not key.startswith("image_encoder/res_features.7")
    }
    shapes |= {"image_encoder/res_l1.weight": (1024, 1024), "image_encoder/res_l1.bias": (1024,)}
    shapes |= {"image_encoder/res_l2.weight": (768, 1024)}
    model, _, _ = fitted(meta_tensors(shapes), "kad")
    assert model.image_encoder.feature_dim == 2048
    assert model.image_encoder.patch_dim == 1024
    assert model.config.fit == "squash"


def test_convirt_from_vilmedic_is_imported() -> None:
    """Keys from BenchX's table of prefixes: torchvision's ResNet, a BERT, both heads 768 wide."""
    official = shapes_of("convirt_pytorch")
    children = {
        "0": "conv1",
        "1": "bn1",
        "4": "layer1",
        "5": "layer2",
        "6": "layer3",
        "7": "layer4",
    }
    shapes = {}
    for key, shape in official.items():
        if key.startswith("res_features."):
            child, _, rest = key.removeprefix("res_features.").partition(".")
            shapes[f"visual.model.{children[child]}.{rest}"] = shape
        elif key.startswith("bert_model."):
            shapes[key.replace("bert_model.", "linguistic.encoder.")] = shape
    for side, width in (("vis", 2048), ("lin", 768)):
        shapes |= {f"{side}_proj.0.weight": (768, width), f"{side}_proj.0.bias": (768,)}
        shapes |= {f"{side}_proj.2.weight": (768, 768), f"{side}_proj.2.bias": (768,)}
    model, _, _ = fitted(meta_tensors(shapes), "convirt_vilmedic")
    assert (model.config.projection_dim, model.config.hidden_dim) == (768, 768)
    assert model.config.text_pool == "max"


def test_open_clip_models_are_imported_by_name() -> None:
    import open_clip

    with torch.device("meta"):
        for name, bias in (
            ("ViT-B-16-SigLIP", True),
            ("RN50-quickgelu", False),
            ("ViT-B-32", False),
        ):
            state = open_clip.create_model(name, device="meta").state_dict()
            model, mapped, _ = match_checkpoint(state, find_importer(f"open_clip:{name}"), "file")
            assert set(mapped.tensors) == set(model.state_dict())
            assert ("logit_bias" in mapped.tensors) == bias
            assert model.name == ("siglip" if bias else "clip")
    with raises(ConfigError, "unknown_name", "system", names="ViT-B-31"):
        find_importer("open_clip:ViT-B-31")
