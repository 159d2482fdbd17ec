"""CheXzero on MIMIC-CXR (Tiu et al., Nature Biomedical Engineering 2022, doi
10.1038/s41551-022-00936-9).

    torchrun --nproc-per-node 8 recipes/chexzero_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/chexzero_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/chexzero_mimic.py tiny --help-all    # every setting
    # continue
    torchrun recipes/chexzero_mimic.py --init-from imported/chexzero --data.train OURS/train ...

The paper averages ten runs with batches of 64 and 128 and rates of 5e-5, 1e-4 and 2e-4. Each is
this recipe with other flags (--train.run-dir, --train.global-batch, --optim.lr, --data.seed), and
they are evaluated together:

    medvl eval zero-shot --checkpoint RUN_1/best RUN_2/best ... --prompts chexzero_template \\
        --data DIR/test
    python scripts/zeroshot_chexpert.py --checkpoint RUN_1/best RUN_2/best ... \\
        --prompts chexzero_template --root DIR

Preset `paper`: OpenAI's CLIP ViT-B/32 from the hub on first use, impressions ("NO IMPRESSION" where
a report has none), no augmentation, plain SGD. Differences from the paper: bf16 autocast; the scale
is limited to CLIP's 100; the best checkpoint is selected on MIMIC-CXR's validation split instead of
CheXpert's. The ensemble of the authors' notebook has a mean AUROC of the five competition findings
of 0.889 on the 500 test images of CheXpert.

Preset `tiny`: a small CLIP from scratch. A vision Transformer learns little from 5,000 images, so
the image encoder is ConVIRT's small ResNet; the text encoder is CLIP's causal Transformer with the
last token as output; AdamW with a cosine schedule instead of SGD; the loss, its learned temperature
and the text policy are CheXzero's.
"""

import dataclasses
from pathlib import Path

from medvl.data import EvalTransform, WholeText
from medvl.eval import ZeroShotEval
from medvl.models import CheXzeroConfig
from medvl.train import (
    DataConfig,
    OptimConfig,
    TrainConfig,
    ZeroShotRecipe,
    launch,
    quickstart,
    zero_shot_run,
)

paper = ZeroShotRecipe(
    model=CheXzeroConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-320/train",
        valid=Path("shards/mimic-cxr-320/validate"),
        text=WholeText(sections=("impression",), missing="literal"),
        image=EvalTransform(size=224, fit="pad", stored_size=320),
    ),
    optim=OptimConfig(optimizer="sgd", lr=1e-4, momentum=0.9),
    train=TrainConfig(
        run_dir=Path("runs/chexzero-mimic"),
        epochs=4,
        global_batch=64,
        precision="bf16",
        validate_every=1000,
        checkpoint_every=1000,
        best_metric="zero_shot/auroc_macro_competition",
        best_mode="max",
    ),
    prompts="chexzero_template",
)
tiny = quickstart.zero_shot_recipe(
    "chexzero",
    CheXzeroConfig(
        image_encoder="resnet_tiny",
        text_encoder="open_clip:custom",
        text_arguments={
            "num_hidden_layers": 3,
            "width": 192,
            "heads": 3,
            "context_length": 48,
            "embed_dim": 128,
        },
        image_size=112,
        fit="squash",
        stored_size=None,
        image_mean=None,
        image_std=None,
        max_tokens=48,
    ),
    dataclasses.replace(
        quickstart.DATA, text=WholeText(sections=("impression",), missing="literal")
    ),
    packed_text=False,
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --out shards/mimic-cxr-320 --short-side 320"
prepare = zero_shot_run("chexzero_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "CheXzero on MIMIC-CXR.")
