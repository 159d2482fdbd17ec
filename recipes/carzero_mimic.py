"""CARZero on MIMIC-CXR: cross-attention of images and statements (Lai et al., CVPR 2024, arXiv
2402.17417).

    torchrun --nproc-per-node 2 recipes/carzero_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/carzero_mimic.py --model.image-weights MRM.safetensors \\
        --data.text.source file ...
    torchrun recipes/carzero_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/carzero_mimic.py tiny --help-all     # every setting

Preset `paper`: the settings of the authors' configuration. ImageNet's ViT-B/16 and BioBERT come
from the hub on first use; the authors start from a masked record model (`--model.image-weights`)
and a BioBERT trained on reports, and read one random statement an image, which a language model
wrote; here the labeler does. Other differences: bf16 for fp16; 256 pairs from the first epoch on,
where the authors go from 64 over 128 to 256; mirrored images have mirrored texts.

Goals on MIMIC-CXR with prompts `statements`, the published figures: mean AUROC of CheXpert's five
0.92, of ChestX-ray14 0.81, of PadChest's 192 labels 0.81, pointing game of MS-CXR 0.75. A run of
ours needs the credentialed data.

Preset `tiny`: the encoders, augmentation and schedule of `recipes/convirt_mimic.py tiny`, a decoder
of two layers, and statements of the labeler.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, Statements
from medvl.eval import ZeroShotEval
from medvl.models import CARZeroConfig
from medvl.train import (
    DataConfig,
    OptimConfig,
    Plateau,
    TrainConfig,
    ZeroShotRecipe,
    launch,
    quickstart,
    zero_shot_run,
)

paper = ZeroShotRecipe(
    model=CARZeroConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=Statements(),
        image=ConVIRTAugmentation(
            size=224,
            flip_rate=0.3,
            pad=True,
            area=(0.7656, 0.7656),  # 224 of 256 pixels
            aspect=(1.0, 1.0),
            rotation=30,
            translation=0.1,
            scale=(0.9, 1.1),
            brightness=0.2,
            contrast=0.2,
            blur_sigma=(0.1, 0.1),
        ),
    ),
    optim=OptimConfig(
        optimizer="adam",
        lr=5e-5,
        betas=(0.5, 0.999),
        weight_decay=1e-6,
        clip_norm=0.25,
        schedule=Plateau(factor=0.5, patience=5),
    ),
    train=TrainConfig(
        run_dir=Path("runs/carzero-mimic"),
        epochs=15,
        global_batch=256,
        precision="bf16",
        early_stop_patience=10,
    ),
    prompts="statements",
)
tiny = quickstart.zero_shot_recipe(
    "carzero",
    CARZeroConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        fit="squash",
        margin=0,
        pixel_mean=None,
        pixel_std=None,
        attention_dropout=0.0,
        projection_dim=128,
        text_layers=1,
        max_tokens=48,
        decoder_layers=2,
        decoder_hidden=256,
        dropout=0.0,
        init_std=None,
        head_dims=(128,),
    ),
    dataclasses.replace(quickstart.DATA, text=Statements()),
    prompts="statements",
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr"
prepare = zero_shot_run("carzero_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "CARZero on MIMIC-CXR.")
