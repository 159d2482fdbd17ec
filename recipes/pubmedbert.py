"""PubMedBERT: BERT from scratch on biomedical text (Gu et al., arXiv 2007.15779, ACM HEALTH 2021).

    medvl shards text --sources pubmed/baseline --out shards/pubmed --name pubmed --min-words 128
    medvl vocab --data shards/pubmed/train --out vocab/pubmed --size 30522 --max-tokens 512
    torchrun --nproc-per-node 8 recipes/pubmedbert.py
    torchrun recipes/pubmedbert.py tiny               # reports of `medvl phantom quickstart`
    torchrun recipes/pubmedbert.py tiny --data.train shards/mlm/train \\
        --data.valid shards/mlm/validate \\
        --data.tokenizer vocab/mlm --data.sections text

Preset `paper`: BERT-base from scratch with its own vocabulary of 30,522 pieces, whole words masked
at 15 %, next sentence prediction, 62,500 steps of 8,192 sequences, Adam with a peak rate of 6e-4
after 10 % of linear warm-up. The length of 512, the coefficients .9 and .999 and the weight decay
of .01 are not in the paper. Differences: bf16 autocast, attention without dropout (for packed
texts; `medvl eval text` and exports have it), and a sequence is one block of an abstract, not
filled up from the next one. Presets `sub-words`, `adversarial` and `longer` (100,000 steps) are
ablations of the paper; its first two score below `paper`. `ramp` raises the rate of masking from 5
to 25 %.

Preset `tiny`: a three-layer BERT of 128 tokens, without pairs. Validation prints `masked/accuracy`
beside `masked/unigram`, the share that the most frequent token reaches.
"""

import dataclasses
from pathlib import Path

from medvl.models import MaskedTextConfig
from medvl.train import (
    Linear,
    OptimConfig,
    Recipe,
    TextDataConfig,
    TrainConfig,
    launch,
    quickstart,
    text_run,
)

PAPER = MaskedTextConfig(attention_dropout=0.0)
OPTIM = OptimConfig(
    optimizer="adamw",
    lr=6e-4,
    eps=1e-6,
    weight_decay=0.01,
    clip_norm=1.0,
    schedule=Linear(warmup_steps=6_250),
)
paper = Recipe(
    model=PAPER,
    pretrained=False,
    data=TextDataConfig(
        train=Path("shards/pubmed/train"),
        valid=Path("shards/pubmed/validate"),
        tokenizer=Path("vocab/pubmed"),
    ),
    optim=OPTIM,
    train=TrainConfig(
        run_dir=Path("runs/pubmedbert"),
        steps=62_500,
        global_batch=8_192,
        accumulate=8,
        precision="bf16",
        packed_text=True,
        validate_every=2_500,
        checkpoint_every=500,
    ),
)


def variant(name: str, model: MaskedTextConfig, optim: OptimConfig, steps: int) -> Recipe:
    """Return `paper` with other settings, in a run folder of its own."""
    train = dataclasses.replace(paper.train, steps=steps, run_dir=Path(f"runs/pubmedbert-{name}"))
    return dataclasses.replace(paper, model=model, optim=optim, train=train)


sub_words = variant("sub-words", dataclasses.replace(PAPER, whole_words=False), OPTIM, 62_500)
adversarial = variant(
    "adversarial", dataclasses.replace(PAPER, adversarial_weight=10.0), OPTIM, 62_500
)
ramp = variant(
    "ramp",
    dataclasses.replace(PAPER, rate_ramp=(0.05, 0.1, 0.15, 0.2, 0.25), ramp_steps=62_500),
    OPTIM,
    62_500,
)
longer = variant(
    "longer", PAPER, dataclasses.replace(OPTIM, schedule=Linear(warmup_steps=10_000)), 100_000
)
tiny = Recipe(
    model=MaskedTextConfig(
        text_encoder="tiny_bert", pairs="none", attention_dropout=0.0, max_tokens=128
    ),
    pretrained=False,
    data=quickstart.text_data(),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-3,
        weight_decay=0.01,
        clip_norm=1.0,
        schedule=Linear(warmup_steps=100),
    ),
    train=dataclasses.replace(quickstart.TEXT_TRAIN, run_dir=Path("quickstart/pubmedbert")),
)

PRESETS = {
    "paper": paper,
    "sub-words": sub_words,
    "adversarial": adversarial,
    "longer": longer,
    "ramp": ramp,
    "tiny": tiny,
}
MAKE_DATA = (
    "medvl shards text --sources pubmed/baseline --out shards/pubmed --name pubmed --min-words "
    "128\n"
    "    medvl vocab --data shards/pubmed/train --out vocab/pubmed --size 30522 --max-tokens 512"
)
prepare = text_run("pubmedbert", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "PubMedBERT: BERT from scratch on biomedical text.")
