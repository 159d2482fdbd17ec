"""COLIPRI on CT-RATE: its contrast of volumes and reports, on Primus (Wald et al., arXiv
2510.15042).

    medvl shards ct-rate --root CT-RATE --size 192 192 192 --spacing 2 2 2 --out shards/ct-rate-cubes
    torchrun --nproc-per-node 8 recipes/colipri_ct_rate.py --data.train shards/ct-rate-cubes/train \\
        --data.valid shards/ct-rate-cubes/validate
    medvl eval zero-shot --checkpoint runs/colipri-ct-rate/best --data shards/ct-rate-cubes/test
    torchrun recipes/colipri_ct_rate.py tiny  # phantom chest CTs, two CPU cores
    torchrun recipes/colipri_ct_rate.py tiny --help-all      # every setting

Preset `paper`: 192 x 192 x 192 voxels of 2 mm, patches of 8 x 8 x 8, Primus-M from scratch, and
CXR-BERT, which learns too. It is the contrastive baseline alone: the released model is also trained
to write reports, to fill masked volumes and to tell opposite sentences apart, and reads volumes
without reports (`medvl import colipri` reads it, and `--init-from` continues from it). Optimiser,
rate, batch and length are ours. One reconstruction of a scan is drawn in each epoch. A forward pass
takes 25 times that of HLIP, so layers are recomputed. A run of ours needs the volumes.

Preset `tiny`: 16 x 32 x 32 voxels, some sentences of a report in random order, and both encoders
from scratch. Deviations: layer scales start at 1, and the window is that of HLIP. On scans of the
phantom:

    medvl phantom ct-rate --out ct-rate --patients 1600 --shape 16 32 32 --reconstructions 1
    medvl shards ct-rate --root ct-rate --out ct-rate-shards
    medvl vocab --data ct-rate-shards/train --out ct-rate-vocab --kind words
    medvl train colipri_ct_rate tiny
    medvl eval zero-shot --checkpoint colipri-run/best --data ct-rate-shards/test \\
        --prompts phantom_ct

On 600 scans of 400 patients, after four minutes on one core: mean AUROC 0.640 [0.625, 0.656]; 1.000
for cardiomegaly, 0.981 for pericardial effusions, and chance for the other five findings.
"""

from pathlib import Path

from medvl.data import VolumeTransform, WholeText
from medvl.models import COLIPRIConfig
from medvl.train import (
    Cosine,
    OptimConfig,
    Recipe,
    TrainConfig,
    VolumeDataConfig,
    launch,
    pretraining_run,
    quickstart,
)

paper = Recipe(
    model=COLIPRIConfig(),
    pretrained=True,
    data=VolumeDataConfig(
        train="shards/ct-rate-cubes/train",
        valid=Path("shards/ct-rate-cubes/validate"),
        text=WholeText(sections=("findings", "impression")),
        volume=VolumeTransform(size=(192, 192, 192), shift=(8, 8, 8)),
        reconstructions="one",
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.05,
        clip_norm=1.0,
        schedule=Cosine(warmup_steps=377),
    ),
    train=TrainConfig(
        run_dir=Path("runs/colipri-ct-rate"),
        epochs=20,
        global_batch=64,
        precision="bf16",
        checkpoint_activations=True,
    ),
)
tiny = quickstart.volume_recipe(
    "colipri-run",
    COLIPRIConfig(
        image_arguments={
            "patch_size": (4, 8, 8),
            "embed_dim": 96,
            "depth": 3,
            "num_heads": 4,
            "layer_scale": 1.0,
            "window": (-1150.0, 350.0),
            "mean": 0.5,
            "std": 0.5,
        },
        pool_heads=4,
        **{**quickstart.VOLUMES, "projection_dim": 96},
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = (
    "medvl shards ct-rate --root CT-RATE --size 192 192 192 --spacing 2 2 2 "
    "--out shards/ct-rate-cubes"
)
PHANTOM = f"{quickstart.VOLUME_DATA}colipri_ct_rate tiny"
prepare = pretraining_run("colipri_ct_rate", MAKE_DATA, PHANTOM)

if __name__ == "__main__":
    launch(prepare, PRESETS, "COLIPRI on CT-RATE.")
