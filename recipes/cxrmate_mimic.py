"""CXRMate on MIMIC-CXR (Nicolson et al., arXiv 2307.09758, 2406.13181): findings and impression.

    medvl shards mimic-cxr --root MIMIC-CXR --short-side 512 --out shards/mimic-cxr
    medvl vocab --data shards/mimic-cxr/train --out shards/mimic-cxr/words --kind words \\
        --min-frequency 10
    torchrun --nproc-per-node 4 recipes/cxrmate_mimic.py
    # phantom Open-i, two CPU cores; without its data it prints how
    torchrun recipes/cxrmate_mimic.py tiny
    torchrun recipes/cxrmate_mimic.py rewards-tiny
    medvl eval report-generation --checkpoint runs/cxrmate-mimic/best --data shards/mimic-cxr/test

Preset `paper`: two images of a study, the previous image and report, and the indication, as a
prefix; a Llama of six layers of width 768 from random weights; AdamW at 5e-5, constant, batch 32.
The published image encoder, UniFormer-B, is not in timm.

Preset `rewards`: self-critical training of the result of `paper` on the F1 of present findings with
their sides, and on n-grams, with an entropy of 0.05 (EAST). `--rewards.weights.sentences 1` also
rewards sentences that are near by MiniLM, which gives 0.955 to a denied finding, so not without
findings; `--rewards.weights.radgraph` needs `medvl[reports]`. `--rewards.token-budget` and
`--rewards.second-budget` end a run.

Preset `tiny`: the ResNet-10 of the quickstart's ConVIRT, and a decoder of two layers of width 128.
Preset `rewards-tiny` compares texts of one image with each other (GRPO).

Measured once on 586 test studies of `medvl phantom openi --patients 6000 --size 160` (4,754 studies
to train on; `tiny` was interrupted after 946 steps), greedy, on a loaded CPU core, 7 and 4 minutes:

    medvl train cxrmate tiny --init-from demo --train.epochs None --train.steps 1000
    medvl train cxrmate rewards-tiny --train.epochs None --train.steps 81

                   F1, micro              BLEU-4   distinct, commonest   repeated   opposite sides
    tiny           0.461 [0.433, 0.493]   0.166    414, 27               0.099      0.009 [0, 0.031]
    control        0.501 [0.473, 0.531]   0.185    458, 20               0.077      0.016 [0, 0.040]
    rewards-tiny   0.591 [0.565, 0.618]   0.182    360, 84               0.672      0.029 [0.011, 0.050]

`control` goes on with the loss of words for as many seconds (239 steps of 32, image encoder frozen,
1e-4). Rewards are 0.090 [0.066, 0.115] above it (paired) in F1, and BLEU-4 is -0.004 [-0.013, 0.007].
Not right yet: Pneumothorax, which is never written; repeated sentences; normal reports that end in
"no evidence of acute". Of the findings that text and reference both place on a side, 0.68 to 0.70 are
equal; the others are "bilateral" for one side, rarely the opposite side. In 0.91 [0.88, 0.94] of 323
validation reports the true text is likelier than its mirror image.

On validation, the same seconds, F1 of 0.436 at the start: control 0.474; rewards-tiny 0.571, with
`medvl eval report-generation --block-ngrams 6` 0.566, 0.01 repeated sentences and BLEU-4 0.188;
`--rewards.weights.novelty 0.5` 0.514 with 0.17 repeated sentences in place of 0.64, but BLEU-4 0.107
and one text for 207 of 602 studies, so it is not in the preset; self-critical with an entropy (EAST,
4 samples, 1e-4) 0.496. One seed each, on a machine with other work, so steps differ (81, 55, 53).

Published aims on the findings of MIMIC-CXR's test studies, from ReXrank's table (RadGraph F1,
1/RadCliQ-v1, RaTEScore, GREEN), of other code and splits:

    best of the table (RGv2-2b)    .292   1.267   .603   .366
    MedVersa                       .273   1.103   .550   .374
    CXRMate-RRG24, 152M            .220    .870   .521   .338
    MedGemma 4B                    .159    .744   .549   .293
    MAIRA-2                        .131    .694   .517   .224
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, TextPair, WholeText
from medvl.models import CXRMateConfig
from medvl.train import (
    Constant,
    DataConfig,
    OptimConfig,
    Recipe,
    RewardConfig,
    RewardRecipe,
    Run,
    TrainConfig,
    launch,
    pretraining_run,
    quickstart,
)

SECTIONS = TextPair(
    first=WholeText(sections=("findings",), missing="no_text"),
    second=WholeText(sections=("impression",), missing="no_text"),
)

PAPER = CXRMateConfig(prior=True, prompt=("indication",))
TINY = CXRMateConfig(
    image_encoder="resnet_tiny",
    image_size=112,
    frozen_image=True,
    prompt=("indication",),
    width=128,
    layers=2,
    heads=4,
    intermediate=256,
    dropout=0.1,
    max_tokens=82,
)
paper = Recipe(
    model=PAPER,
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        tokenizer=Path("shards/mimic-cxr/words"),
        text=SECTIONS,
        image=ConVIRTAugmentation.crop(384, area=(0.77, 1.0)),
        valid_batch=16,
    ),
    optim=OptimConfig(optimizer="adamw", lr=5e-5, weight_decay=0.01, schedule=Constant()),
    train=TrainConfig(
        run_dir=Path("runs/cxrmate-mimic"),
        epochs=32,
        global_batch=32,
        precision="bf16",
        best_metric="report/f1_macro",
        best_mode="max",
    ),
)
tiny = quickstart.report_recipe(
    "cxrmate",
    TINY,
    SECTIONS,
)
tiny = dataclasses.replace(tiny, optim=dataclasses.replace(tiny.optim, lr=2e-3))
rewards = RewardRecipe(
    model=PAPER,
    pretrained=False,
    init_from=Path("runs/cxrmate-mimic/best"),
    rewards=RewardConfig(),
    data=paper.data,
    optim=dataclasses.replace(paper.optim, lr=5e-6, schedule=Constant(warmup_steps=500)),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/cxrmate-mimic-rewards"), epochs=4),
)
WEIGHTS = {**RewardConfig().weights, "ngrams": 0.25}
rewards_tiny = RewardRecipe(
    model=TINY,
    pretrained=False,
    init_from=Path("quickstart/cxrmate/best"),
    rewards=RewardConfig(method="group", samples=8, weights=WEIGHTS),
    data=tiny.data,
    optim=dataclasses.replace(tiny.optim, lr=1e-4, schedule=Constant(warmup_steps=4)),
    train=dataclasses.replace(
        tiny.train,
        run_dir=Path("quickstart/cxrmate-rewards"),
        epochs=2,
        global_batch=12,
        validate_every=20,
        checkpoint_every=20,
    ),
)
PRESETS = {"paper": paper, "tiny": tiny, "rewards": rewards, "rewards-tiny": rewards_tiny}
MAKE_DATA = """medvl shards mimic-cxr --root MIMIC-CXR --short-side 512 --out shards/mimic-cxr
    medvl vocab --data shards/mimic-cxr/train --out shards/mimic-cxr/words --kind words --min-frequency 10"""
PHANTOM = f"{quickstart.REPORT_DATA}cxrmate tiny"


def prepare(recipe: Recipe) -> Run:
    """Create the model, the loaders and the evaluator of reports."""
    run = pretraining_run("cxrmate_mimic", MAKE_DATA, PHANTOM)(recipe)
    from medvl.eval import ReportEval

    return run.with_evaluator(lambda images: ReportEval(images))


if __name__ == "__main__":
    launch(prepare, PRESETS, "CXRMate on MIMIC-CXR.")
