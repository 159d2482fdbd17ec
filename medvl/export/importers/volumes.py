"""Key tables of dual-encoders of volumes."""

from typing import Any

from medvl.errors import WeightsError
from medvl.export.importers.backbones import IMAGE, TEXT, bert
from medvl.export.importers.importer import Importer, attention_heads, count, text_arguments
from medvl.export.importers.key_map import Shapes, keep
from medvl.models.dual_encoders.hlip import HLIPConfig

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


IMPORTERS = (
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
