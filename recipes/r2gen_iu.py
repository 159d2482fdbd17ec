"""R2Gen on IU X-ray or MIMIC-CXR (Chen et al., arXiv 2010.16056, EMNLP 2020): reports from images.

    medvl shards r2gen-annotation --root iu_xray --out shards/iu-xray --short-side 256
    medvl vocab --data shards/iu-xray/train --out shards/iu-xray/words --kind words \\
        --min-frequency 3
    torchrun recipes/r2gen_iu.py                     # two views of each study
    torchrun recipes/r2gen_iu.py paper-mimic         # one image, of shards of the same kind
    # phantom Open-i, two CPU cores; without its data it prints how
    torchrun recipes/r2gen_iu.py tiny
    torchrun recipes/r2gen_iu.py tiny --help-all         # every setting
    medvl eval report-generation --checkpoint runs/r2gen-iu/best --data shards/iu-xray/test \\
        --sections findings

Preset `paper`: IU X-ray in the authors' preparation; Adam with AMSGrad at 1e-4 and 5e-5 for the
ResNet-101, times 0.1 after 50 of 100 epochs, which end early 50 epochs after the best one, batch
16, gradients clipped to 0.1 by value; the checkpoint with the highest BLEU-4 on the validation
reports, which are complete, where the released code compares with truncated ones. Random crops of
0.77 to 1.0 of the image, where the published ones are always 224 of 256 pixels, and no
flip: it contradicts texts that name a side. Shards of Open-i can be used in place of the
preparation.

Preset `paper-mimic`: one image, 100 tokens, words that occur 10 times (`--min-frequency 10`), 30
epochs, times 0.8 after each.

Preset `tiny`: the ResNet-10 of the quickstart's ConVIRT, and a Transformer of width 128.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, WholeText
from medvl.models import R2GenConfig
from medvl.train import (
    DataConfig,
    OptimConfig,
    Recipe,
    Run,
    StepDecay,
    TrainConfig,
    launch,
    pretraining_run,
    quickstart,
)

FINDINGS = WholeText(sections=("findings",), missing="no_text")

paper = Recipe(
    model=R2GenConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/iu-xray/train",
        valid=Path("shards/iu-xray/validate"),
        tokenizer=Path("shards/iu-xray/words"),
        text=FINDINGS,
        image=ConVIRTAugmentation.crop(224, area=(0.77, 1.0)),
        valid_batch=16,
    ),
    optim=OptimConfig(
        optimizer="adam",
        lr=1e-4,
        weight_decay=5e-5,
        amsgrad=True,
        clip_value=0.1,
        schedule=StepDecay(epochs=50),
    ),
    train=TrainConfig(
        run_dir=Path("runs/r2gen-iu"),
        epochs=100,
        global_batch=16,
        best_metric="report/corpus_bleu_4",
        best_mode="max",
        early_stop_patience=50,
        channels_last=True,
    ),
)
paper_mimic = dataclasses.replace(
    paper,
    model=R2GenConfig(views=1, max_tokens=101),
    data=dataclasses.replace(
        paper.data,
        train="shards/r2gen-mimic/train",
        valid=Path("shards/r2gen-mimic/validate"),
        tokenizer=Path("shards/r2gen-mimic/words"),
    ),
    optim=dataclasses.replace(paper.optim, schedule=StepDecay(factor=0.8)),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/r2gen-mimic"), epochs=30),
)
tiny = quickstart.report_recipe(
    "r2gen",
    R2GenConfig(
        image_encoder="resnet_tiny",
        image_size=112,
        width=128,
        intermediate=128,
        heads=4,
        memory_heads=4,
        cell_dropout=0.1,
        image_lr_mult=1.0,
        max_tokens=82,
    ),
    FINDINGS,
)
PRESETS = {"paper": paper, "paper-mimic": paper_mimic, "tiny": tiny}
MAKE_DATA = """medvl shards r2gen-annotation --root iu_xray --out shards/iu-xray --short-side 256
    medvl vocab --data shards/iu-xray/train --out shards/iu-xray/words --kind words --min-frequency 3
    medvl shards r2gen-annotation --root mimic_cxr --out shards/r2gen-mimic --short-side 256         # paper-mimic
    medvl vocab --data shards/r2gen-mimic/train --out shards/r2gen-mimic/words --kind words --min-frequency 10    # paper-mimic"""
PHANTOM = f"{quickstart.REPORT_DATA}r2gen tiny"


def prepare(recipe: Recipe) -> Run:
    """Create the model, the loaders and the evaluator of reports."""
    run = pretraining_run("r2gen_iu", MAKE_DATA, PHANTOM)(recipe)
    from medvl.eval import ReportEval

    return run.with_evaluator(lambda images: ReportEval(images, sections=FINDINGS.sections))


if __name__ == "__main__":
    launch(prepare, PRESETS, "R2Gen on IU X-ray or MIMIC-CXR.")
