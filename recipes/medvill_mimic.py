"""MedViLL on MIMIC-CXR (Moon et al., arXiv 2105.11333, JBHI 2022).

    torchrun --nproc-per-node 8 recipes/medvill_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/medvill_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/medvill_mimic.py tiny --help-all     # every setting
    torchrun recipes/vqa_finetune.py --init-from runs/medvill-mimic/best --data.image.size 512 \\
        --head product \
        --optim.lr 3e-5 --train.epochs 100  # VQA, at the rate and length of the released code
    torchrun recipes/medvill_mimic.py paper-report                       # or for report generation
    medvl eval report-generation --checkpoint runs/medvill-report/best --data DIR/test

Preset `paper`: BERT-base over 180 cells of a ResNet-50 at 512 pixels and the report, masked words
and image-text matching from one pass, the bidirectional-autoregressive mask; AdamW at 1e-5 without
weight decay (the released code does not read the 0.01 of its settings), 50 epochs, batch 128. Its
shards are of the AP views: `medvl shards mimic-cxr --views AP --short-side 512`. The paper crops
0.8 to 1.1 of the image; here a crop is never larger than the image.

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of the quickstart's ConVIRT
instead of ImageNet's ResNet and Google's BERT.

Presets `paper-report` and `tiny-report`: training of a model above continues with the
sequence-to-sequence mask and masked words only, on all 256 cells, at 3e-5, warmed up for a tenth of
the steps (91,685 images), then linear. The paper masks 0.15 of the words and at most three per
text, and the closing token in half of the texts. `paper-report` masks 0.15 of all of them;
`tiny-report`, which has fewer texts, 0.4.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, WholeText
from medvl.models import MedViLLConfig
from medvl.train import (
    Constant,
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
    model=MedViLLConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-ap/train",
        valid=Path("shards/mimic-cxr-ap/validate"),
        text=WholeText(),
        image=ConVIRTAugmentation.crop(512, area=(0.8, 1.0)),
    ),
    optim=OptimConfig(optimizer="adamw", lr=1e-5, weight_decay=0.0, schedule=Constant()),
    train=TrainConfig(
        run_dir=Path("runs/medvill-mimic"),
        epochs=50,
        global_batch=128,
        precision="bf16",
        channels_last=True,
    ),
)
SMALL = MedViLLConfig(**quickstart.ENCODERS, frozen_image_layers=0)
tiny = quickstart.fusion_recipe("medvill", SMALL)

paper_report = dataclasses.replace(
    paper,
    model=MedViLLConfig(attention="seq2seq", objective="report", image_tokens=256, max_tokens=128),
    pretrained=False,
    init_from=Path("runs/medvill-mimic/best"),
    optim=dataclasses.replace(paper.optim, lr=3e-5, schedule=Linear(warmup_steps=3_580)),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/medvill-report")),
)
tiny_report = dataclasses.replace(
    tiny,
    model=dataclasses.replace(SMALL, attention="seq2seq", objective="report", mlm_probability=0.4),
    init_from=Path("quickstart/medvill/best"),
    train=dataclasses.replace(tiny.train, run_dir=Path("quickstart/medvill-report"), epochs=30),
)

PRESETS = {"paper": paper, "tiny": tiny, "paper-report": paper_report, "tiny-report": tiny_report}
MAKE_DATA = (
    "medvl shards mimic-cxr --root MIMIC-CXR --views AP --short-side 512 --out shards/mimic-cxr-ap"
)
prepare = pretraining_run("medvill_mimic", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "MedViLL on MIMIC-CXR.")
