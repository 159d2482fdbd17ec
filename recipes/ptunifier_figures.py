"""PTUnifier on ROCO, MedICaT and MIMIC-CXR (Chen et al., arXiv 2302.08958, ICCV 2023).

    torchrun --nproc-per-node 4 recipes/ptunifier_figures.py \\
        --model.text-weights biomed_roberta_base
    torchrun recipes/ptunifier_figures.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/ptunifier_figures.py tiny --help-all     # every setting
    torchrun recipes/vqa_finetune.py --init-from runs/ptunifier/best     # fine-tune for VQA

Preset `paper`: CLIP's ViT-B/16 without its last block, BiomedRoBERTa (give the folder of
allenai/biomed_roberta_base), six co-attention layers a stream, two pools of 2,048 prompts; 100,000
steps of 256 pairs at 288 pixels, 1e-5 for the encoders and five times that for the rest, warmed up
for a tenth and then linear; crops of 0.9 to 1.0 of the image. Shards of MIMIC-CXR are of frontal
views. Differences: a figure is one sample with one of its texts selected at random; so is a report
with one of its sections, where the paper samples a sentence; images are shrunk by averaging areas,
instead of bicubic.

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of the quickstart's ConVIRT, whose
cells and words the prompts stand for.
"""

from pathlib import Path

from medvl.data import ConVIRTAugmentation, RandomSection
from medvl.models import PTUnifierConfig
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
    model=PTUnifierConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/roco-references/train",
        extra_train=(Path("shards/medicat-radiology/train"), Path("shards/mimic-cxr/train")),
        valid=Path("shards/roco-references/validation"),
        text=RandomSection(),
        image=ConVIRTAugmentation.crop(288, area=(0.9, 1.0)),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-5,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        schedule=Linear(warmup_steps=10_000),
    ),
    train=TrainConfig(
        run_dir=Path("runs/ptunifier"),
        steps=100_000,
        global_batch=256,
        precision="bf16",
        validate_every=5000,
        checkpoint_every=5000,
    ),
)
tiny = quickstart.fusion_recipe(
    "ptunifier",
    PTUnifierConfig(
        **quickstart.ENCODERS,
        **quickstart.FASTER_FUSION,
        width=192,
        image_positions=True,
        prompts=256,
        image_prompts=16,
        text_prompts=16,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """medvl shards roco --root ROCO --splits repaired --references MEDICAT/roco_references \\
        --out shards/roco-references
    medvl shards medicat --root MEDICAT --radiology-only --out shards/medicat-radiology
    medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr"""
prepare = pretraining_run("ptunifier_figures", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "PTUnifier on ROCO, MedICaT and MIMIC-CXR.")
