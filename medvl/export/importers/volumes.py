"""Key tables of dual-encoders of volumes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medvl.errors import WeightsError
from medvl.export.importers.backbones import IMAGE, TEXT, bert
from medvl.export.importers.importer import Importer, attention_heads, count, text_arguments
from medvl.export.importers.key_map import KeyRule, Shapes, drop, fixed, keep
from medvl.models.volumes.colipri import COLIPRIConfig
from medvl.models.volumes.ct_clip import CTCLIPConfig
from medvl.models.volumes.hlip import HLIPConfig

_TRUNK = "visual.trunk."


def _hlip(shapes: Shapes) -> HLIPConfig:
    width, _, *patch = shapes[f"{IMAGE}patch_embed.proj.weight"]
    grid = shapes[f"{IMAGE}spatial_posemb"][1:4]
    depth = count(shapes, f"{IMAGE}blocks.")
    scans = shapes.get(f"{IMAGE}sequential_posemb", (1, 0))[1]
    inner = "scan" if scans > 1 else "slice"
    image: dict[str, Any] = {
        "patch_size": tuple(patch),
        "embed_dim": width,
        "depth": depth,
        "num_heads": attention_heads(width),
        "attention": tuple("study" if layer % 3 == 2 else inner for layer in range(depth)),
        "drop_path_rate": 0.2,
        "max_scans": scans,
    }
    text = text_arguments(shapes, {"name": "cxrbert"})
    if len(grid) != 3 or len(patch) != 3:
        raise WeightsError("expected positions (1, d, h, w, D) and filters of volumes", "mismatch")
    return HLIPConfig(
        image_arguments=image,
        volume_size=(grid[0] * patch[0], grid[1] * patch[1], grid[2] * patch[2]),
        text_encoder=text.pop("name"),
        vocab_size=text.pop("vocab_size", None),
        text_arguments=text,
        max_tokens=min(
            HLIPConfig.max_tokens, shapes[f"{TEXT}embeddings.position_embeddings.weight"][0]
        ),
        projection_dim=shapes["image_head.weight"][0],
        bias=-10.0 if "logit_bias" in shapes else None,
    )


_CTVIT = "visual_transformer."
_DECODER = "the decoder of the autoencoder, for pretraining"


def _ct_clip(shapes: Shapes) -> CTCLIPConfig:
    width, voxels = shapes[f"{IMAGE}patch_embed.1.weight"]
    heads = shapes[f"{IMAGE}position_bias.4.weight"][0]
    side = round((2 * voxels) ** (1 / 3))
    plane = round((shapes["image_head.weight"][1] / width) ** 0.5)
    text = text_arguments(shapes, {"name": "cxrbert"})
    image: dict[str, Any] = {
        "patch_size": (side // 2, side, side),
        "window": (-1000.0, 1000.0),
        "mean": 0.5,
        "std": 0.5,
        "embed_dim": width,
        "depth": count(shapes, f"{IMAGE}spatial."),
        "num_heads": heads,
        "head_dim": shapes[f"{IMAGE}spatial.0.query_scale"][0],
        "codes": shapes[f"{IMAGE}codebook"][0],
        "transposed": True,
    }
    return CTCLIPConfig(
        image_arguments=image,
        volume_size=(plane * (side // 2), plane * side, plane * side),
        text_encoder=text.pop("name"),
        vocab_size=text.pop("vocab_size", None),
        text_arguments=text,
        max_tokens=min(
            CTCLIPConfig.max_tokens, shapes[f"{TEXT}embeddings.position_embeddings.weight"][0]
        ),
        projection_dim=shapes["image_head.weight"][0],
    )


def _plane_by_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the layer behind the plane, whose places the released code orders by columns."""
    head_EX = tensors.get("image_head.weight")
    embed = tensors.get(f"{IMAGE}patch_embed.1.weight")
    if head_EX is None or embed is None:
        return {}
    side = round((head_EX.shape[1] / len(embed)) ** 0.5)
    by_columns = head_EX.unflatten(1, (side, side, len(embed)))
    return {"image_head.weight": by_columns.transpose(1, 2).flatten(1)}


def _ctvit(source: str, target: str) -> list[KeyRule]:
    """Return the rules of one Transformer of CT-ViT."""
    layer = f"{_CTVIT}{source}.layers.*"
    names = {
        "0.dsconv.*": "conv.*",
        "1.norm.gamma": "norm.weight",
        "1.to_q.weight": "query.weight",
        "1.to_kv.weight": "key_value.weight",
        "1.q_scale": "query_scale",
        "1.k_scale": "key_scale",
        "1.to_out.weight": "out.weight",
        "3.0.*": "mlp_norm.*",
        "3.1.weight": "mlp_in.weight",
        "3.4.weight": "mlp_out.weight",
    }
    zero = "a constant of 0 in place of a bias"
    return [
        *(keep(f"{layer}.{old}", f"{IMAGE}{target}.*.{new}") for old, new in names.items()),
        fixed(f"{layer}.1.norm.beta", torch.zeros_like, zero),
        drop(f"{layer}.1.context_norm.*", "the norm of another input, which it does not have"),
        drop(f"{layer}.1.null_kv", "an empty tensor"),
        keep(f"{_CTVIT}{source}.norm_out.gamma", f"{IMAGE}{target}_norm.weight"),
        fixed(f"{_CTVIT}{source}.norm_out.beta", torch.zeros_like, zero),
    ]


_CT_CLIP = Importer(
    name="ct_clip",
    title="CT-CLIP (Hamamci et al. 2024): CT-ViT and CXR-BERT",
    source="ibrahimethemhamamci/CT-CLIP @ a2a155c, CT_CLIP and transformer_maskgit",
    table=(
        *(
            keep(f"{_CTVIT}to_patch_emb.{number + 1}.*", f"{IMAGE}patch_embed.{number}.*")
            for number in range(3)
        ),
        *(
            keep(f"{_CTVIT}spatial_rel_pos_bias.net.{old}.*", f"{IMAGE}position_bias.{new}.*")
            for old, new in {"0.0": 0, "1.0": 2, "2": 4}.items()
        ),
        *_ctvit("enc_spatial_transformer", "spatial"),
        *_ctvit("enc_temporal_transformer", "axial"),
        keep(f"{_CTVIT}vq._codebook.embed", f"{IMAGE}codebook", change="drop axis"),
        drop(f"{_CTVIT}vq.**", "the state of the codebook's training"),
        drop(f"{_CTVIT}to_patch_emb_first_frame.**", "the first frame of a video"),
        drop(f"{_CTVIT}to_pixels**", _DECODER),
        *bert("text_transformer."),
        keep("to_text_latent.weight", "text_head.weight"),
        keep("to_visual_latent.weight", "image_head.weight"),
        drop("to_*_latent_extra.weight", "a second projection, which its loss does not use"),
        keep("temperature", "logit_scale", change="scalar"),
    ),
    system=_ct_clip,
    computed=_plane_by_rows,
    note="Its loader exchanges y and x of a file's slices, and reads no orientation: volumes are "
    "exchanged here as well.",
)

_PRIMUS = "image_encoder.backbone."
_PRIMUS_HEADS = {396: 6, 792: 12, 864: 12, 1056: 16}
"""Width -> heads of Primus-S, B, M and L, which the file does not contain."""


def _colipri(shapes: Shapes) -> COLIPRIConfig:
    width, _, *patch = shapes[f"{IMAGE}patch_embed.proj.weight"]
    text = text_arguments(shapes, {"name": "cxrbert"})
    size = shapes["image_head.proj.weight"][0]
    if len(patch) != 3:
        raise WeightsError("expected filters of volumes", "mismatch")
    image: dict[str, Any] = {
        **COLIPRIConfig().image_arguments,
        "patch_size": tuple(reversed(patch)),  # of the axes of RAS: x, y, z
        "embed_dim": width,
        "depth": count(shapes, f"{IMAGE}blocks."),
        "num_heads": _PRIMUS_HEADS.get(width, max(1, width // 72)),
        "mlp_ratio": shapes[f"{IMAGE}blocks.0.mlp.fc2.weight"][1] / width,
    }
    return COLIPRIConfig(
        image_arguments=image,
        volume_size=(24 * patch[2], 24 * patch[1], 24 * patch[0]),
        text_encoder=text.pop("name"),
        vocab_size=text.pop("vocab_size", None),
        text_arguments=text,
        max_tokens=min(
            COLIPRIConfig.max_tokens, shapes[f"{TEXT}embeddings.position_embeddings.weight"][0]
        ),
        projection_dim=size,
        pool_heads=attention_heads(size),
    )


def _scale_of_temperature(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scale whose inverse is the temperature of the file."""
    if "logit_scale" not in tensors:
        return {}
    return {"logit_scale": -tensors["logit_scale"].float().log()}


IMPORTERS = (
    Importer(
        name="colipri",
        title="COLIPRI (Wald et al. 2025): Primus-M and CXR-BERT",
        source="microsoft/colipri, package colipri 0.1.3, and dynamic-network-architectures 0.4.4",
        table=(
            keep(f"{_PRIMUS}down_projection.proj.*", f"{IMAGE}patch_embed.proj.*"),
            drop(f"{_PRIMUS}mask_token", "the token of masked patches, for pretraining"),
            keep(f"{_PRIMUS}eva.blocks.**", f"{IMAGE}blocks.**"),
            keep(f"{_PRIMUS}eva.norm.*", f"{IMAGE}norm.*"),
            keep("image_encoder.projector.*", "image_head.proj.*", change="conv to linear"),
            keep("image_encoder.pooler.attn.**", "image_head.pool.attention.**"),
            *bert("text_encoder.backbone."),
            keep("text_encoder.pooler.attn.**", "text_head.attention.**"),
            keep("softmax_temperature", "logit_scale", change="scalar"),
        ),
        system=_colipri,
        computed=_scale_of_temperature,
        note="The size of volumes is not in the file: 24 patches along each axis, as released. "
        "Volumes are turned to RAS; releases 0.1.0 and 0.1.1 of its code turn them to SAR.",
    ),
    _CT_CLIP,
    Importer(
        name="hlip",
        title="HLIP (Zhao et al. 2025): a ViT with attention within slices and scans, and a BERT",
        source="Zch0414/hlip @ fe8d764, src/hlip; the names of open_clip",
        table=(
            keep(f"{_TRUNK}**", f"{IMAGE}**"),
            keep("visual.head.proj.weight", "image_head.weight"),
            *bert("text.transformer."),
            keep("text.proj.weight", "text_head.weight"),
            keep("logit_scale", "logit_scale", change="scalar"),
            keep("logit_bias", "logit_bias", change="scalar"),
        ),
        system=_hlip,
        note="Levels of attention are not in the file: every third layer sees the study, the "
        "others a slice, or a scan where the file has positions of several scans.",
    ),
)
