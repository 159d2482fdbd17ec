"""MGCA on MIMIC-CXR (Wang et al., NeurIPS 2022, arXiv 2210.06044).

    torchrun --nproc-per-node 2 recipes/mgca_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/mgca_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/mgca_mimic.py tiny --help-all      # every setting
    torchrun recipes/mgca_mimic.py --init-from imported/mgca --data.train OURS/train ...  # continue

Preset `paper`: the settings of the authors' code with a ResNet-50. ImageNet's ResNet-50 and
Bio_ClinicalBERT, of which the lower six layers are used, come from the hub on first use. Frontal
images (make the shards with `--views PA AP`), impression and findings of at least three words, 112
tokens. Differences: bf16 autocast, negatives and prototype codes from all ranks, punctuation is
read, biases and norms do not decay, which do in the authors' code, and the ResNet-50 starts from
torchvision's first weights, where the authors take the second ones (`--model.image-weights
timm/resnet50.tv2_in1k@COMMIT`). The steps of the warm-up and of the frozen prototypes are those of
187,147 pairs, 1,300
an epoch: for another number of pairs, set `--optim.schedule.warmup-steps` to 40 % of all steps and
`--model.freeze-prototypes-steps` to one epoch. Published with it: linear classification of
CheXpert, AUROC .876, .880 and .882 with 1, 10 and 100 % of the labels; a figure of ours needs the
credentialed data.

Preset `paper-vit`: the same with DeiT-B/16, whose weights are named by `--model.image-weights
timm/deit_base_patch16_224.fb_in1k@COMMIT`, or a file.

Preset `tiny`: 12 epochs from the encoders of `recipes/convirt_mimic.py tiny`, with its text and
augmentation; images of 112 pixels resized to 144, 9 x 9 regions; a larger learning rate, as there.
"""

import dataclasses
from pathlib import Path

from medvl.data import RandomCrop, WholeText
from medvl.eval import ZeroShotEval
from medvl.models import MGCAConfig
from medvl.train import (
    Cosine,
    DataConfig,
    OptimConfig,
    TrainConfig,
    ZeroShotRecipe,
    launch,
    quickstart,
    zero_shot_run,
)

paper = ZeroShotRecipe(
    model=MGCAConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=WholeText(sections=("impression", "findings"), min_tokens=3),
        image=RandomCrop(size=224, padded_size=256),
    ),
    # 40 % of 50 epochs of 1,300 steps.
    optim=OptimConfig(
        optimizer="adamw", lr=2e-5, weight_decay=0.05, schedule=Cosine(warmup_steps=26_000)
    ),
    train=TrainConfig(
        run_dir=Path("runs/mgca-mimic"),
        epochs=50,
        global_batch=144,
        precision="bf16",
        channels_last=True,
        early_stop_patience=5,
    ),
)
paper_vit = dataclasses.replace(
    paper,
    model=MGCAConfig(image_encoder="timm:deit_base_patch16_224", encoder_size=None, patch_level=-1),
    train=dataclasses.replace(
        paper.train, run_dir=Path("runs/mgca-vit-mimic"), channels_last=False
    ),
)
tiny = quickstart.zero_shot_from_convirt(
    "mgca",
    MGCAConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        text_arguments={},
        image_size=112,
        fit="squash",
        margin=0,
        encoder_size=144,
        max_tokens=48,
        hidden_dim=512,
        num_prototypes=100,
        freeze_prototypes_steps=80,
    ),
)

PRESETS = {"paper": paper, "paper-vit": paper_vit, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr"
prepare = zero_shot_run("mgca_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "MGCA on MIMIC-CXR.")
