"""ARL on MedICaT, ROCO and MIMIC-CXR with UMLS (Chen et al., arXiv 2209.07118, ACM MM 2022).

    torchrun --nproc-per-node 4 recipes/arl_mimic.py
    torchrun recipes/arl_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/arl_mimic.py tiny --help-all     # every setting
    torchrun recipes/vqa_finetune.py --init-from runs/arl/best     # fine-tune for VQA

Preset `paper`: M3AE's encoders and fusion-encoder with a stream of entities, and a graph of the
concepts that the three corpora mention more than 20 times, with TransE's vectors; 100,000 steps of
256 pairs at 288 pixels, 1e-5 for the encoders and five times that for the rest, warmed up for a
tenth and then linear. Differences from the paper: it starts from CLIP and RoBERTa, not from METER,
unless `--init-from` names a checkpoint; entities are found by their names; a figure is one sample
with one of its texts selected at random; and the checkpoint is selected by the validation loss. The
release states 10 epochs and 100,000 steps, whichever ends first; here it is the steps.

Preset `tiny`: the phantom's radiographs and its ontology instead of UMLS. It starts from the
ResNet-10 and the three-layer BERT of the quickstart's ConVIRT; masked patches are cells of the
ResNet's grid.
"""

from pathlib import Path

from medvl.data import EvalTransform, RandomSection
from medvl.models import ARLConfig
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
    model=ARLConfig(knowledge="knowledge/umls"),
    pretrained=True,
    data=DataConfig(
        train="shards/roco-references/train",
        extra_train=(Path("shards/medicat-radiology/train"), Path("shards/mimic-cxr/train")),
        valid=Path("shards/roco-references/validation"),
        text=RandomSection(),
        image=EvalTransform(size=288),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-5,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        schedule=Linear(warmup_steps=10_000),
    ),
    train=TrainConfig(
        run_dir=Path("runs/arl"),
        steps=100_000,
        global_batch=256,
        precision="bf16",
        validate_every=5000,
        checkpoint_every=5000,
    ),
)
tiny = quickstart.fusion_recipe(
    "arl",
    ARLConfig(
        **quickstart.ENCODERS,
        **quickstart.FASTER_FUSION,
        knowledge="quickstart/knowledge",
        width=192,
        image_positions=True,
        mim_layer=1,
        decoder_width=96,
        decoder_layers=2,
        decoder_heads=3,
        entity_width=64,
        entity_intermediate=256,
        graph_head_width=16,
        mlm_probability=0.3,
    ),
    epochs=6,
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """medvl shards roco --root ROCO --splits repaired --references MEDICAT/roco_references \\
        --out shards/roco-references
    medvl shards medicat --root MEDICAT --radiology-only --out shards/medicat-radiology
    medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr
    medvl knowledge build --umls UMLS --out knowledge/umls \\
        --shards shards/roco-references/train shards/medicat-radiology/train shards/mimic-cxr/train
    medvl knowledge train --knowledge knowledge/umls"""
PHANTOM = """medvl phantom quickstart
    medvl train convirt tiny
    medvl phantom umls --out quickstart/umls
    medvl knowledge build --umls quickstart/umls --out quickstart/knowledge
    medvl knowledge train --knowledge quickstart/knowledge --dim 64 --epochs 100 --batches 4"""
prepare = pretraining_run("arl_mimic", MAKE_DATA, PHANTOM)

if __name__ == "__main__":
    launch(prepare, PRESETS, "ARL on MedICaT, ROCO and MIMIC-CXR, with UMLS.")
