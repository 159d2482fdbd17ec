"""M2I2 on the captions of ImageCLEF 2022 (Li et al., arXiv 2211.13594, ISBI 2023).

    torchrun recipes/m2i2_clef.py --model.image-weights mae_pretrain_vit_base.pth
    torchrun recipes/m2i2_clef.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/m2i2_clef.py tiny --help-all     # every setting
    # fine-tune for VQA
    torchrun recipes/vqa_finetune.py --init-from runs/m2i2/best --head ranking --optim.lr 2e-5

Preset `paper`: ViT-B/16 from MAE's published file (give its path), BERT-base in two halves, 256
pixels, 15 % of the patches removed; AdamW at 1e-4 with weight decay 0.02, warmed up for 2,000 steps
and then cosine to 1e-5, 30 epochs in batches of 16; crops of 0.2 to 1.0 of the image. ImageCLEF's
captions are a table of your own; the published run trains
on its validation split too. Differences: no RandAugment, and no flips, because captions name sides;
images are shrunk by averaging areas, instead of bicubic; captions and questions are not cleaned and
end with [SEP], as in `recipes/albef_roco_medicat.py`.

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of the quickstart's ConVIRT, with
a fusion-encoder of two layers, a short queue, and a teacher that follows faster. Cells of the
ResNet's grid are removed, a quarter of them.
"""

from pathlib import Path

from medvl.data import ConVIRTAugmentation, RandomSection
from medvl.models import M2I2Config
from medvl.train import (
    Cosine,
    DataConfig,
    OptimConfig,
    Recipe,
    TrainConfig,
    launch,
    pretraining_run,
    quickstart,
)

paper = Recipe(
    model=M2I2Config(image_weights="mae_pretrain_vit_base.pth"),
    pretrained=True,
    data=DataConfig(
        train="shards/clef2022/train",
        valid=Path("shards/clef2022/validate"),
        text=RandomSection(),
        image=ConVIRTAugmentation.crop(256, area=(0.2, 1.0)),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.02,
        schedule=Cosine(warmup_steps=2000, min_lr=1e-5),
    ),
    train=TrainConfig(run_dir=Path("runs/m2i2"), epochs=30, global_batch=16, precision="bf16"),
)
tiny = quickstart.fusion_recipe(
    "m2i2",
    M2I2Config(
        **quickstart.ALIGNED, mask_ratio=0.25, decoder_width=96, decoder_layers=2, decoder_heads=3
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """medvl shards table --table CLEF2022.csv --name clef2022 --image-column file --patient-column article \
        --text-column caption --out shards/clef2022"""
prepare = pretraining_run("m2i2_clef", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "M2I2 on ImageCLEF 2022.")
