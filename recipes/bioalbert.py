"""BioALBERT: ALBERT further pretrained on biomedical text (Naseem et al., arXiv 2107.04374, BMC
Bioinformatics 2022).

    medvl shards text --sources pubmed/baseline --out shards/pubmed --name pubmed
    torchrun --nproc-per-node 8 recipes/bioalbert.py --init-from ALBERT  # `medvl import albert_mlm`
    torchrun recipes/bioalbert.py tiny                # reports of `medvl phantom quickstart`

Preset `paper`: ALBERT-base v2 with its SentencePiece vocabulary, masked words and sentence order
prediction, LAMB, 3,125 steps of warm-up, 200,000 steps of 1,024 sequences (variant Base1). The rate
of 1.76e-3 is ALBERT's for batches of 4,096, scaled by the square root of the batch, because this
paper states none; LAMB's constants are those of its own paper. The limit of 20 masked tokens in a
sequence of 512 is not kept: it leaves 96 % of each sequence without a target. `large` is the larger
model with batches of 256. Differences: bf16 autocast, and a sequence is one block of a document.

Preset `tiny`: four shared layers 128 wide from scratch, with the WordPiece vocabulary of the
quickstart.
"""

import dataclasses
from pathlib import Path

from medvl.models import AlbertTextConfig
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

OPTIM = OptimConfig(
    optimizer="lamb",
    lr=8.8e-4,
    eps=1e-6,
    weight_decay=0.01,
    clip_norm=1.0,
    schedule=Linear(warmup_steps=3_125),
)
paper = Recipe(
    model=AlbertTextConfig(),
    pretrained=False,
    data=TextDataConfig(train=Path("shards/pubmed/train"), valid=Path("shards/pubmed/validate")),
    optim=OPTIM,
    train=TrainConfig(
        run_dir=Path("runs/bioalbert"),
        steps=200_000,
        global_batch=1_024,
        accumulate=2,
        precision="bf16",
        packed_text=True,
        validate_every=5_000,
        checkpoint_every=1_000,
    ),
)
LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
large = dataclasses.replace(
    paper,
    model=AlbertTextConfig(text_arguments=LARGE),
    optim=dataclasses.replace(OPTIM, lr=4.4e-4),
    train=dataclasses.replace(
        paper.train, run_dir=Path("runs/bioalbert-large"), global_batch=256, accumulate=1
    ),
)
SMALL = {
    "embedding_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
}
tiny = Recipe(
    model=AlbertTextConfig(text_arguments=SMALL, max_tokens=128),
    pretrained=False,
    data=quickstart.text_data(),
    optim=dataclasses.replace(OPTIM, lr=5e-3, schedule=Linear(warmup_steps=100)),
    train=dataclasses.replace(quickstart.TEXT_TRAIN, run_dir=Path("quickstart/bioalbert")),
)

PRESETS = {"paper": paper, "large": large, "tiny": tiny}
MAKE_DATA = "medvl shards text --sources pubmed/baseline --out shards/pubmed --name pubmed"
prepare = text_run("bioalbert", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "BioALBERT: ALBERT further pretrained on biomedical text.")
