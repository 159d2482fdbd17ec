"""HLIP on CT-RATE: volumes and reports, with attention within slices and scans (Zhao et al., arXiv
2505.21862).

    medvl shards ct-rate --root CT-RATE --size 112 336 336 --spacing 3 1 1 --out shards/ct-rate
    torchrun --nproc-per-node 4 recipes/hlip_ct_rate.py --data.train shards/ct-rate/train \\
        --data.valid shards/ct-rate/validate --model.image-weights mae_pretrain_vit_base.pth
    medvl eval zero-shot --checkpoint runs/hlip-ct-rate/best --data shards/ct-rate/test
    medvl eval retrieval --checkpoint runs/hlip-ct-rate/best --data shards/ct-rate/test
    torchrun recipes/hlip_ct_rate.py tiny  # phantom chest CTs, two CPU cores
    torchrun recipes/hlip_ct_rate.py tiny --help-all      # every setting

Preset `paper`: 112 x 336 x 336 voxels of 3 x 1 x 1 mm, patches of 8 x 24 x 24, a ViT-B inflated
from MAE's, whose file its authors publish outside of the hub, and CXR-BERT, which is locked. One
reconstruction of a scan is drawn in each epoch. Differences: reports are impression and findings
without the sentence openings of the released code; layer norms of the text encoder are locked too.
A forward pass takes 593 GFLOP a volume; a training step keeps 0.84 GB of it, 0.08 GB where layers
are recomputed (`medvl doctor volumes hlip_ct_rate`). Users report a mean AUROC of 0.758 on 16
findings with batches of 512 and a rate of 8e-5. A run of ours needs the volumes.

Preset `tiny`: 16 x 32 x 32 voxels, some sentences of a report in random order, and both encoders
from scratch. Deviations: a batch norm before the linear layer of volumes, attention over all
patches in each of the three layers, and texts as the maximum over their tokens. On scans of the
phantom:

    medvl phantom ct-rate --out ct-rate --patients 1600 --shape 16 32 32 --reconstructions 1
    medvl shards ct-rate --root ct-rate --out ct-rate-shards
    medvl vocab --data ct-rate-shards/train --out ct-rate-vocab --kind words
    medvl train hlip_ct_rate tiny
    medvl eval zero-shot --checkpoint ct-rate-run/best --data ct-rate-shards/test \\
        --prompts phantom_ct

On 600 scans of 400 patients, with the salt of `bash scripts/reproduce_results.sh volumes`, after
three minutes on one core: mean AUROC 0.920 [0.913, 0.926]; 0.976 or more for six findings and
chance for nodules, which a model has to tell from vessels along z
(`medvl.phantom.population.volumes.Vessel`). ConVIRT on 16 axial slices of each scan has 0.612
[0.595, 0.630] after 600 steps too; `medvl compare` finds HLIP 0.308 [0.290, 0.324] above it, and
CT-CLIP 0.321 [0.304, 0.338]. `medvl eval retrieval` finds the report of a volume among the first
five in 34.2 % [30.7, 37.7], the commonest texts in 3.0 % [1.7, 4.4]. Maps of findings in 200 other
scans (`medvl eval volume-grounding --prompts phantom_ct`) have an AUROC of voxels of 0.613 [0.592,
0.633], after two steps at a rate near 0 already 0.598 [0.580, 0.618]: they show mostly where a
finding usually is. That of cardiomegaly is inverted, 0.349.
"""

import dataclasses
from pathlib import Path

from medvl.data import VolumeTransform, WholeText
from medvl.models import HLIPConfig
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
    model=HLIPConfig(frozen_text_layers=12),
    pretrained=True,
    data=VolumeDataConfig(
        train="shards/ct-rate/train",
        valid=Path("shards/ct-rate/validate"),
        text=WholeText(sections=("impression", "findings")),
        volume=VolumeTransform(size=(112, 336, 336)),
        reconstructions="one",
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-5,
        betas=(0.9, 0.98),
        eps=1e-6,
        weight_decay=0.2,
        schedule=Cosine(warmup_steps=377),
    ),
    train=TrainConfig(
        run_dir=Path("runs/hlip-ct-rate"),
        epochs=20,
        global_batch=64,
        precision="bf16",
        checkpoint_activations=True,
    ),
)


def _tiny() -> Recipe[HLIPConfig, VolumeDataConfig]:
    """Return the preset of systems of volumes at half its learning rate."""
    model = HLIPConfig(
        image_arguments={
            "patch_size": (4, 8, 8),
            "embed_dim": 96,
            "depth": 3,
            "num_heads": 3,
            "attention": ("study",) * 3,
        },
        batch_norm=True,
        **quickstart.VOLUMES,
    )
    recipe = quickstart.volume_recipe("ct-rate-run", model)
    return dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, lr=1e-3))


tiny = _tiny()

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = (
    "medvl shards ct-rate --root CT-RATE --size 112 336 336 --spacing 3 1 1 --out shards/ct-rate"
)
PHANTOM = f"{quickstart.VOLUME_DATA}hlip_ct_rate tiny"
prepare = pretraining_run("hlip_ct_rate", MAKE_DATA, PHANTOM)

if __name__ == "__main__":
    launch(prepare, PRESETS, "HLIP on CT-RATE.")
