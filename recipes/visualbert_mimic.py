"""VisualBERT on MIMIC-CXR (Li et al., arXiv 1908.03557).

    torchrun --nproc-per-node 8 recipes/visualbert_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/visualbert_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/visualbert_mimic.py tiny --help-all     # every setting
    torchrun recipes/vqa_finetune.py --init-from runs/visualbert-mimic/best     # fine-tune for VQA

Preset `paper`: BERT-base over the cells of a ResNet-50 at 224 pixels and 128 tokens; 5e-5 with
linear decay, batch 48, ten epochs, gradients clipped at 1, as in the released configuration for
COCO, which warms up for a tenth of the run, as 5,000 steps are here. A detector's regions as in the
paper: `--model.image-encoder regions:2048`.

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of the quickstart's ConVIRT; cells
have positions.
"""

from pathlib import Path

from medvl.data import EvalTransform, WholeText
from medvl.models import VisualBERTConfig
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
    model=VisualBERTConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-frontal/train",
        valid=Path("shards/mimic-cxr-frontal/validate"),
        text=WholeText(),
        image=EvalTransform(size=224),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=5e-5,
        weight_decay=0.01,
        clip_norm=1.0,
        schedule=Linear(warmup_steps=5000),
    ),
    train=TrainConfig(
        run_dir=Path("runs/visualbert-mimic"),
        epochs=10,
        global_batch=48,
        precision="bf16",
        channels_last=True,
    ),
)
tiny = quickstart.fusion_recipe(
    "visualbert", VisualBERTConfig(**quickstart.ENCODERS, image_positions=True)
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr-frontal"
prepare = pretraining_run("visualbert_mimic", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "VisualBERT on MIMIC-CXR.")
