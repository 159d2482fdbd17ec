"""MRM on MIMIC-CXR: an image encoder from masked reports and pixels (Zhou et al., ICLR 2023, arXiv
2301.13155).

    torchrun --nproc-per-node 4 recipes/mrm_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/mrm_mimic.py ecamp ...       # ECAMP's words and fusion (arXiv 2312.13316)
    torchrun recipes/mrm_mimic.py maco ...  # MaCo's contrast in place of words (arXiv 2309.05904)
    torchrun recipes/mrm_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/carzero_mimic.py --init-from runs/mrm/best ...       # a system on its encoders

Preset `paper`: MAE's ViT-B/16, images of all views, of whose 448 pixels 224 are read, three
quarters of the patches removed, half of the words masked, 200 epochs in batches of 256. Preset
`ecamp`: 0.7 of the words masked, 120 epochs in batches of 8,192. Both warm up for 40 epochs.
Vocabulary:
    medvl vocab --data shards/mimic-cxr-all/train --out vocab/mrm --size 30000 --max-tokens 256
Differences: padding and visible words have no loss; mirrored images have mirrored texts, where the
authors' keep their sides; 448 pixels are shrunk to 224 with antialiasing, where the authors have
none (`--model.shrink-antialias False`). `ecamp` has no summaries by a language model, reconstructs
the large image itself in place of a super-resolution head, and masks entities and their neighbours
first, where the released code draws every word alone, 0.75 of the entities and 0.7 of the others.
`maco` crops as MRM does; its authors rotate by up to 20 degrees and scale by 0.8 to 1.2.

Goals on MIMIC-CXR, fine-tuned on 1, 10 and 100 % (`medvl train linear_probe finetune
--data.fraction 0.01` on your shards), the published figures: AUROC of ChestX-ray14 0.79, 0.84 and
0.86, of CheXpert 0.89 at each. About 5 EFLOP: five hours of an H200.

Preset `tiny`: a small ViT on the phantom; the loss says little, probe the encoder (`medvl train
linear_probe`).
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, ShuffledSentences, WholeText
from medvl.models import MRMConfig
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

EPOCH = 368_960
"""Images of the training split, of which the epochs of warm-up below are steps."""
MODEL = MRMConfig()
paper = Recipe(
    model=MODEL,
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-all/train",
        valid=Path("shards/mimic-cxr-all/validate"),
        tokenizer=Path("vocab/mrm"),
        text=WholeText(),
        image=ConVIRTAugmentation.crop(448, area=(0.2, 1.0), flip="swap_text"),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1.5e-4,
        betas=(0.9, 0.95),
        weight_decay=0.05,
        schedule=Cosine(warmup_steps=40 * EPOCH // 256),
    ),
    train=TrainConfig(
        run_dir=Path("runs/mrm"), epochs=200, global_batch=256, accumulate=2, precision="bf16"
    ),
)
_ECAMP = dataclasses.replace(
    MODEL,
    text_arguments={"num_hidden_layers": 6},
    max_tokens=256,
    pixel_mean=0.4721,
    pixel_std=0.3037,
    decoder_width=512,
    decoder_heads=16,
    mlm_probability=0.7,
    entities_first=True,
    negation_weight=0.05,
    text_fusion="attention",
)
_MACO = dataclasses.replace(MODEL, mask_ratio=0.5, mlm_weight=0.0, contrast_weight=1.0)
ecamp = dataclasses.replace(
    paper,
    model=_ECAMP,
    optim=dataclasses.replace(paper.optim, schedule=Cosine(warmup_steps=40 * EPOCH // 8_192)),
    train=dataclasses.replace(
        paper.train, run_dir=Path("runs/ecamp"), epochs=120, global_batch=8_192, accumulate=8
    ),
)
maco = dataclasses.replace(
    paper,
    model=_MACO,
    data=dataclasses.replace(paper.data, text=ShuffledSentences()),
    optim=dataclasses.replace(
        paper.optim, lr=2.5e-4, schedule=Cosine(warmup_steps=2 * EPOCH // 2_048)
    ),
    train=dataclasses.replace(
        paper.train, run_dir=Path("runs/maco"), epochs=51, global_batch=2_048, accumulate=1
    ),
)
tiny = Recipe(
    model=MRMConfig(
        image_encoder="timm:vit_tiny_patch16_224",
        image_arguments={"embed_dim": 192, "depth": 4, "num_heads": 3},
        image_size=112,
        fit="squash",
        text_encoder="tiny_bert",
        text_arguments={"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
        max_tokens=48,
        decoder_width=96,
        decoder_layers=2,
        decoder_heads=3,
        target_scale=1,
    ),
    pretrained=False,
    data=quickstart.DATA,
    optim=quickstart.OPTIM,
    train=dataclasses.replace(
        quickstart.TRAIN,
        run_dir=Path("quickstart/mrm"),
        epochs=12,
        scale_below=12 * quickstart.SCALED,
        best_metric="loss",
        best_mode="min",
    ),
)

PRESETS = {"paper": paper, "ecamp": ecamp, "maco": maco, "tiny": tiny}
MAKE_DATA = """medvl shards mimic-cxr --root MIMIC-CXR --out shards/mimic-cxr-all
    medvl vocab --data shards/mimic-cxr-all/train --out vocab/mrm --size 30000 --max-tokens 256"""
prepare = pretraining_run("mrm_mimic", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "MRM on MIMIC-CXR.")
