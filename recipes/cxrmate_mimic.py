"""CXRMate on MIMIC-CXR (Nicolson et al., arXiv 2307.09758, 2406.13181): findings and impression.

    medvl shards mimic-cxr --root MIMIC-CXR --short-side 512 --out shards/mimic-cxr
    medvl vocab --data shards/mimic-cxr/train --out shards/mimic-cxr/words --kind words \\
        --min-frequency 10
    torchrun --nproc-per-node 4 recipes/cxrmate_mimic.py
    # phantom Open-i, two CPU cores; without its data it prints how
    torchrun recipes/cxrmate_mimic.py tiny
    torchrun recipes/cxrmate_mimic.py rewards-tiny
    medvl eval report-generation --checkpoint runs/cxrmate-mimic/best --data shards/mimic-cxr/test

Preset `paper`: at most five images of a study, the previous image and report, and the indication,
as a prefix; a Llama of six layers of width 768 from random weights; AdamW at 5e-5, constant, batch
32. The published image encoder, UniFormer-B, is not in timm.

Preset `rewards`: self-critical training of the result of `paper` on the F1 of present findings with
their sides, and on n-grams, with an entropy of 0.05 (EAST). `--rewards.weights.sentences 1` also
rewards sentences that are near by MiniLM, which gives 0.955 to a denied finding, so not without
findings; `--rewards.weights.radgraph` needs `medvl[reports]`. `--rewards.token-budget` and
`--rewards.second-budget` end a run.

Preset `tiny`: the ResNet-10 of the quickstart's ConVIRT, frozen, and a decoder of two layers of
width 128. Preset `rewards-tiny` compares texts of one image with each other (GRPO), near the start.

Measured on 586 test studies of `medvl phantom openi --patients 6000 --size 160` (4,754 studies to
train on), greedy, with one CPU core for each run, after 5 and 4 minutes, seed 0:

    medvl train cxrmate tiny --init-from demo --model.views 2 --train.epochs None --train.steps 1000
    medvl train cxrmate rewards-tiny --model.views 2 --train.epochs None --train.steps 81
    medvl eval report-generation --checkpoint quickstart/cxrmate-rewards/last --data SHARDS/test

                 F1, micro              BLEU-4   distinct, commonest   repeated   contrary   sides
    tiny         0.497 [0.468, 0.526]   0.158    398, 35               0.102      0.078      0.723
    control      0.522 [0.496, 0.550]   0.166    423, 41               0.154      0.118      0.713
    rewards      0.575 [0.548, 0.601]   0.186    339, 77               0.321      0.049      0.793

`control` goes on with the loss of words for as many seconds as `rewards` (686 steps of 32 at 1e-4).
Above it, paired, with seeds 0 and 1: F1 by 0.053 [0.031, 0.077] and 0.050 [0.027, 0.071], BLEU-4 by
0.020 and 0.014, equal sides by 0.079 [0.001, 0.162] and 0.116 [0.043, 0.188]. Contrary findings are
denied in the same text: -0.068 [-0.099, -0.038] and 0.020 [-0.010, 0.049]. Equal severities do not
change (0.63 and 0.66). Most repeated sentences are an impression that states the finding again, as
0.114 a report of the references do; 13 and 14 reports have more than one. Not right: Pneumothorax
(F1 0.31 and 0.17 in `control`, 0.07 and 0 in `rewards`), Atelectasis, devices and fractures.

From an older start (F1 0.461), the reward without a cost of repetition and contradiction and
without a distance to the start has F1 0.591, 0.672 repeated and 0.189 contrary; with the cost of
repetition alone 0.590, 0.265 and 0.340: a normal report with a finding at its end. On validation,
in the same seconds and before these costs: GRPO 0.571, `--rewards.weights.novelty 0.5` 0.514,
self-critical with an entropy (EAST, 4 samples) 0.496. `--rewards.weights.severities 0.5` did not
raise severities (0.65 to 0.56).

Rewards silence rare findings that the start seldom gets right: `tiny` mentions Pneumothorax in 0.21
of its sampled texts where the reference has it (0.058 of 602 validation studies) and in 0.06 of the
others, so 0.18 of these mentions are right, too few for F1. `--rewards.word-weight 0.3`, which also
trains on the true words, keeps them. On validation, seed 0, `control`, `rewards` and this: F1 of
Pneumothorax 0.204, 0.054, 0.238; micro 0.504, 0.543, 0.531 (0.027 [0.007, 0.047] above `control`,
-0.012 [-0.029, 0.007] beside `rewards`); macro 0.365, 0.365, 0.364; repeated 0.145, 0.291, 0.164;
contrary 0.126, 0.042, 0.076; equal severities 0.63, 0.59, 0.63. F2 with inverse frequencies as
weights of findings, beside it, has micro 0.530, Pneumothorax 0.143 and 0.331 repeated.

The images are not at fault: of the trained encoder's mean, a ridge regression on 3,324 studies
tells validation's left effusions from right ones with an AUROC of 0.999, left, right and both in
0.87 of them (commonest 0.48), and Pneumothorax with 0.96. Severities are at their limit: equal in
0.709 [0.651, 0.761] of 395 validation studies of 4,000 patients (reports of other images 0.422),
0.702 with `--model.frozen-image False --model.image-lr-mult 0.2`. For a given finding, a ridge
regression on the encoder's mean has 0.69 and the commonest severity 0.47.

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
    rewards=RewardConfig(method="group", samples=8, weights=WEIGHTS, reference_weight=0.04),
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
