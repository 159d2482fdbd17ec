"""Biomedical vision-language training on one set of shared image and clinical-text encoders.

    import medvl
    model = medvl.create_model("convirt")
    model = medvl.load("runs/convirt")
    medvl.infer(model, "chest.dcm", ["pleural effusion"])

Everything is imported on first use: `import medvl` costs milliseconds.
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports, repair_torchvision

if TYPE_CHECKING:
    from medvl import (
        data as data,
        encoders as encoders,
        errors as errors,
        eval as eval,
        export as export,
        inference as inference,
        losses as losses,
        models as models,
        phantom as phantom,
        schema as schema,
        serve as serve,
        train as train,
    )
    from medvl.inference import (
        answer as answer,
        heatmap as heatmap,
        infer as infer,
        write_report as write_report,
    )
    from medvl.models import (
        create_model as create_model,
        create_model_and_transforms as create_model_and_transforms,
        from_pretrained as from_pretrained,
        get_tokenizer as get_tokenizer,
        list_models as list_models,
        list_pretrained as list_pretrained,
        load as load,
    )

__version__ = "0.1.0"

repair_torchvision()  # must come before timm, open_clip or transformers are imported

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
