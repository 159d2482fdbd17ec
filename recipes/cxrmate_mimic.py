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

Preset `tiny`: the ResNet-10 of the quickstart's ConVIRT, frozen, and a decoder of two layers of
width 128. Preset `rewards-tiny` compares texts of one image with each other (GRPO), near the start.

Measured on 586 test studies of `medvl phantom openi --patients 6000 --size 160` (4,754 studies to
train on), greedy, on a loaded CPU core, 7 and 4 minutes, one seed each:

    medvl train cxrmate tiny --init-from demo --train.epochs None --train.steps 1000
    medvl train cxrmate rewards-tiny --train.epochs None --train.steps 81
    medvl eval report-generation --checkpoint quickstart/cxrmate-rewards/last --data SHARDS/test

                 F1, micro              BLEU-4   distinct, commonest   repeated   contrary   sides
    tiny         0.461 [0.433, 0.493]   0.166    414, 27               0.099      0.034      0.676
    control      0.501 [0.473, 0.531]   0.185    458, 20               0.077      0.056      0.703
    rewards      0.573 [0.545, 0.599]   0.219    390, 26               0.367      0.119      0.795
    beta 0       0.590 [0.564, 0.615]   0.176    347, 43               0.265      0.340      0.717
    free         0.591 [0.565, 0.618]   0.182    360, 84               0.672      0.189      0.688

`tiny` stopped after 946 steps with an older preset: `--model.frozen-image False --optim.lr 1e-3`,
and words of findings alone (`medvl vocab --sections findings`), all without "cardiopulmonary".
`control` goes on with the loss of words for as many seconds as `rewards` (239 steps of 32, frozen,
1e-4). Above it, paired: F1 by 0.071 [0.049, 0.095], BLEU-4 by 0.033 [0.026, 0.040], equal sides by
0.091 [0.012, 0.172]. `beta 0` has no distance to the start, and `free` neither that nor a cost of
repetition: of its repeated sentences most assert a finding, which was free once it was right.
`contrary` findings are denied in the same text, mostly a normal report with a finding at its end.
The reward gives nothing for these since: on validation 47 steps reach F1 0.590 [0.566, 0.614] with
0.060 contrary, but 0.377 repeated and 0.66 equal sides (`rewards` 0.78). Not right: severities
(0.52 equal, 0.59 for `control`; `--rewards.weights.severities 0.5` did not raise them, on
validation 0.65 before and 0.56 after, from another start) and Pneumothorax, which `beta 0` writes
7 times, 6 of them right, and `rewards` once.

On validation, F1 of 0.436 at the start: control 0.474; `rewards` 0.555, 0.349 repeated and 0.108
contrary; `beta 0` 0.569, 0.228 and 0.336; two false findings a repetition 0.573, 0.259 and 0.120;
`free` 0.571, 0.640 and 0.193, with `--decoding.block-ngrams 6` 0.566 and 0.01 repeated. Before the
cost of repetition, 81, 55 and 53 steps in the same seconds: GRPO 0.571, `--rewards.weights.novelty
0.5` 0.514, self-critical with an entropy (EAST, 4 samples) 0.496.

The images are not at fault: of the trained encoder's mean, a ridge regression on 3,324 studies
tells validation's left effusions from right ones with an AUROC of 0.999, left, right and both in
0.87 of them (commonest 0.48), and Pneumothorax with 0.96, which `tiny` writes in 0.15 of its
samples for images that have it. After 200 steps of a shorter schedule, the loss a word on
validation is 1.023 with an encoder that trains, 0.997 with a frozen one and 0.846 with 2e-3;
images of other patients raise it by 0.018, 0.024 and 0.042, hence the present preset, which has no
F1 yet.

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
