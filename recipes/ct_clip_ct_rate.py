"""CT-CLIP on CT-RATE: volumes and reports on CT-ViT (Hamamci et al., arXiv 2403.17834).

    medvl shards ct-rate --root CT-RATE --size 240 480 480 --spacing 1.5 0.75 0.75 \\
        --out shards/ct-rate-fine
    torchrun --nproc-per-node 8 recipes/ct_clip_ct_rate.py --data.train shards/ct-rate-fine/train \\
        --data.valid shards/ct-rate-fine/validate
    medvl eval zero-shot --checkpoint runs/ct-clip-ct-rate/best --data shards/ct-rate-fine/test
    torchrun recipes/ct_clip_ct_rate.py tiny  # phantom chest CTs, two CPU cores
    torchrun recipes/ct_clip_ct_rate.py tiny --help-all      # every setting

Preset `paper`: 240 x 480 x 480 voxels of 1.5 x 0.75 x 0.75 mm, patches of 10 x 20 x 20, findings,
and batches of eight. Differences: patches are not replaced by codes, whose autoencoder is trained
before (`medvl import ct_clip` reads the released model with them, and `--init-from` continues from
it); all reconstructions of all patients are read, and those of a scan are positives, where the
released loop keeps the first 80 % of a directory listing. A run of ours needs the volumes.

Preset `tiny`: 16 x 32 x 32 voxels, some sentences of a report in random order, and both encoders
from scratch. Deviations: convolutions in place of the linear map of patches, whose norm removes the
brightness of a patch, and texts as the maximum over their tokens. On scans of the phantom:

    medvl phantom ct-rate --out ct-rate --patients 1600 --shape 16 32 32 --reconstructions 1
    medvl shards ct-rate --root ct-rate --out ct-rate-shards
    medvl vocab --data ct-rate-shards/train --out ct-rate-vocab --kind words
    medvl train ct_clip_ct_rate tiny
    medvl eval zero-shot --checkpoint ct-clip-run/best --data ct-rate-shards/test \\
        --prompts phantom_ct

On 600 scans of 400 patients, with the salt of `bash scripts/reproduce_results.sh volumes`, after
three minutes on one core: mean AUROC 0.933 [0.926, 0.940]; 0.985 or more for six findings, and
0.551 [0.504, 0.595] for nodules. `medvl eval retrieval` finds the report of a volume among the
first five in 46.2 % [42.1, 50.2], the commonest texts in 3.0 % [1.7, 4.4]. Maps of findings in 200
other scans (`medvl eval volume-grounding --prompts phantom_ct`) have an AUROC of voxels of 0.706
[0.685, 0.726], after two steps at a rate near 0 of 0.523 [0.507, 0.542].
"""

from pathlib import Path

from medvl.data import VolumeTransform, WholeText
from medvl.models import CTCLIPConfig
from medvl.train import (
    Constant,
    OptimConfig,
    Recipe,
    TrainConfig,
    VolumeDataConfig,
    launch,
    pretraining_run,
    quickstart,
)

paper = Recipe(
    model=CTCLIPConfig(
        image_arguments={
            "patch_size": (10, 20, 20),
            "window": (-1000.0, 1000.0),
            "mean": 0.5,
            "std": 0.5,
        }
    ),
    pretrained=True,
    data=VolumeDataConfig(
        train="shards/ct-rate-fine/train",
        valid=Path("shards/ct-rate-fine/validate"),
        text=WholeText(sections=("findings",)),
        volume=VolumeTransform(size=(240, 480, 480)),
    ),
    optim=OptimConfig(optimizer="adam", lr=1.25e-6, clip_norm=0.5, schedule=Constant()),
    train=TrainConfig(
        run_dir=Path("runs/ct-clip-ct-rate"),
        steps=100_000,
        global_batch=8,
        precision="bf16",
        validate_every=5000,
        checkpoint_every=5000,
    ),
)
tiny = quickstart.volume_recipe(
    "ct-clip-run",
    CTCLIPConfig(
        image_arguments={
            "patch_size": (4, 8, 8),
            "embed_dim": 64,
            "depth": 1,
            "num_heads": 2,
            "head_dim": 32,
            "stem": "convolutions",
            "window": (-1150.0, 350.0),
        },
        **quickstart.VOLUMES,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = (
    "medvl shards ct-rate --root CT-RATE --size 240 480 480 --spacing 1.5 0.75 0.75 "
    "--out shards/ct-rate-fine"
)
PHANTOM = f"{quickstart.VOLUME_DATA}ct_clip_ct_rate tiny"
prepare = pretraining_run("ct_clip_ct_rate", MAKE_DATA, PHANTOM)

if __name__ == "__main__":
    launch(prepare, PRESETS, "CT-CLIP on CT-RATE.")
