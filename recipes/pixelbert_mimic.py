"""PixelBERT on MIMIC-CXR (Huang et al., arXiv 2004.00849).

    torchrun --nproc-per-node 8 recipes/pixelbert_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/pixelbert_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/pixelbert_mimic.py tiny --help-all     # every setting
    torchrun recipes/vqa_finetune.py --init-from runs/pixelbert-mimic/best     # fine-tune for VQA

Preset `paper`: BERT-base over 100 sampled cells of a ResNet-50 at 448 pixels and the report, both
trained end to end; 40 epochs. The learning rate, 1e-4 for everything, and the batch of 256 are not
the paper's, whose CNN has another optimiser (SGD) than its Transformer and whose batch is several
thousand.

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of the quickstart's ConVIRT; 8 of
16 cells are sampled.
"""

from pathlib import Path

from medvl.data import EvalTransform, WholeText
from medvl.models import PixelBERTConfig
from medvl.train import (
    DataConfig,
    Linear,
    OptimConfig,
    Recipe,
    TrainConfig,
    launch,
    pretraining_run,
    quickstart,
)

paper = Recipe(
    model=PixelBERTConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-frontal/train",
        valid=Path("shards/mimic-cxr-frontal/validate"),
        text=WholeText(),
        image=EvalTransform(size=448),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.01,
        clip_norm=1.0,
        schedule=Linear(warmup_steps=1000),
    ),
    train=TrainConfig(
        run_dir=Path("runs/pixelbert-mimic"),
        epochs=40,
        global_batch=256,
        precision="bf16",
        channels_last=True,
    ),
)
tiny = quickstart.fusion_recipe("pixelbert", PixelBERTConfig(**quickstart.ENCODERS, image_tokens=8))

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr-frontal"
prepare = pretraining_run("pixelbert_mimic", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "PixelBERT on MIMIC-CXR.")
