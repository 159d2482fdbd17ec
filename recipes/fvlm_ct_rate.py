"""fVLM on CT-RATE: volumes and reports, organ by organ (Shui et al., ICLR 2025).

    TotalSegmentator -i CT-RATE/dataset/train_fixed/.../NAME.nii.gz -o masks/NAME.nii.gz --ml
    medvl shards ct-rate --root CT-RATE --spacing 3 1 1 --organ-masks masks \\
        --organ-descriptions desc_info.json --organ-conclusions conc_info.json --out shards/ct-organs
    torchrun --nproc-per-node 4 recipes/fvlm_ct_rate.py --data.train shards/ct-organs/train \\
        --data.valid shards/ct-organs/validate --model.image-weights mae_pretrain_vit_base.pth
    medvl eval zero-shot --checkpoint runs/fvlm-ct-rate/best --data shards/ct-organs/test
    torchrun recipes/fvlm_ct_rate.py tiny  # phantom chest CTs, two CPU cores
    torchrun recipes/fvlm_ct_rate.py tiny --help-all      # every setting

Preset `paper`: 112 x 256 x 352 voxels of 3 x 1 x 1 mm around the box of the organs, patches of 16 x
16 x 32, a ViT-B inflated from MAE's, CXR-BERT, and the settings of the released code. One
reconstruction of a scan is drawn in each epoch. The authors publish the texts by organ; without
these files, sentences of the report are parted by the organs that they name. Differences: an organ
is normal where its text states no finding, whatever its text begins with; gradients are those of
the global batch; crops are drawn up to 16 voxels around the middle of the organs. A run of ours
needs the volumes.

Preset `tiny`: 16 x 32 x 32 voxels, one sentence of an organ at a time, and both encoders from
scratch; on scans of the phantom:

    medvl phantom ct-rate --out ct-rate --patients 1600 --shape 16 32 32 --reconstructions 1 \\
        --organ-masks
    medvl shards ct-rate --root ct-rate --out ct-rate-shards --organ-masks ct-rate/organ_masks
    medvl vocab --data ct-rate-shards/train --out ct-rate-vocab --kind words
    medvl train fvlm_ct_rate tiny
    medvl eval zero-shot --checkpoint fvlm-run/best --data ct-rate-shards/test \\
        --prompts phantom_ct

On 600 scans of 400 patients, with the salt of `bash scripts/reproduce_results.sh volumes`, after
four minutes on one core: mean AUROC 0.858 [0.848, 0.867]; 1.000 for both effusions, cardiomegaly,
consolidation and calcifications of the aorta, and chance for nodules and emphysema. With another
salt it is 0.723 without masks (`medvl infer --all-tokens`), and maps of findings in 200 other scans
(`medvl eval volume-grounding --prompts phantom_ct`) have their highest voxel inside in 38.1 %
[34.4, 42.1], after one step at a rate near 0 in 9.6 % [7.4, 12.0]; the AUROC of voxels, 0.873
[0.862, 0.882] and 0.846 [0.835, 0.858], comes mostly from the masks.
"""

import dataclasses
from pathlib import Path

from medvl.data import RandomSentence, VolumeTransform, WholeText
from medvl.models import FVLMConfig
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
    model=FVLMConfig(),
    pretrained=True,
    data=VolumeDataConfig(
        train="shards/ct-organs/train",
        valid=Path("shards/ct-organs/validate"),
        text=WholeText(sections=("conclusion", "description")),
        volume=VolumeTransform(size=(112, 256, 352), shift=(4, 16, 16)),
        reconstructions="one",
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.05,
        schedule=Cosine(warmup_steps=377, min_lr=1e-6),
    ),
    train=TrainConfig(
        run_dir=Path("runs/fvlm-ct-rate"),
        epochs=20,
        global_batch=56,
        seed=42,
        checkpoint_activations=True,
    ),
)


def _tiny() -> Recipe[FVLMConfig, VolumeDataConfig]:
    """Return the preset of systems of volumes, with sentences of organs."""
    sizes = {name: value for name, value in quickstart.VOLUMES.items() if name != "positives"}
    model = FVLMConfig(
        image_arguments={
            "patch_size": (4, 8, 8),
            "embed_dim": 96,
            "depth": 3,
            "num_heads": 3,
            "attention": ("study",) * 3,
            "layers": (0, 1),
        },
        organ_dropout=0.0,
        **sizes,
    )
    recipe = quickstart.volume_recipe("fvlm-run", model)
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, text=RandomSentence(sections=("description",))),
        train=dataclasses.replace(
            recipe.train, steps=500, validate_every=250, checkpoint_every=250
        ),
    )


tiny = _tiny()

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = (
    "medvl shards ct-rate --root CT-RATE --spacing 3 1 1 --organ-masks masks --out shards/ct-organs"
)
PHANTOM = (
    "medvl phantom ct-rate --out ct-rate --patients 1600 --shape 16 32 32 --reconstructions 1 "
    "--organ-masks && medvl shards ct-rate --root ct-rate --out ct-rate-shards --organ-masks "
    "ct-rate/organ_masks && medvl vocab --data ct-rate-shards/train --out ct-rate-vocab --kind "
    "words && medvl train fvlm_ct_rate tiny"
)
prepare = pretraining_run("fvlm_ct_rate", MAKE_DATA, PHANTOM)

if __name__ == "__main__":
    launch(prepare, PRESETS, "fVLM on CT-RATE.")
