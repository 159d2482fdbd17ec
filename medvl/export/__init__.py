"""Import of published checkpoints, and export to other formats.

    from medvl.export import export_onnx, import_checkpoint, list_importers, load_encoder

    imported = import_checkpoint("gloria", "chexpert_resnet50.ckpt", out="imported/gloria")
    imported.left_out                         # key of the file -> why it was left out
    load_encoder("imported/gloria/image_encoder")
    export_onnx(medvl.load("runs/convirt/best"), "exported").differences

The tables of `importers` (`dual_encoders`, `fusion_encoders`, `language`, ...) map the keys of
a published file to medvl's, one rule for a key or a family of keys; `importers.backbones` has the
rules of the backbones.
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.export.exporters.common import Exported as Exported
    from medvl.export.exporters.hugging_face import export_hugging_face as export_hugging_face
    from medvl.export.exporters.onnx import export_onnx as export_onnx
    from medvl.export.exporters.open_clip import export_open_clip as export_open_clip
    from medvl.export.exporters.published import export_published as export_published
    from medvl.export.importers.hugging_face import (
        read_image_transform as read_image_transform,
    )
    from medvl.export.importers.import_checkpoint import (
        Imported as Imported,
        import_checkpoint as import_checkpoint,
        list_importers as list_importers,
        load_encoder as load_encoder,
    )
    from medvl.export.importers.stable_diffusion import (
        load_stable_diffusion as load_stable_diffusion,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
