"""A published BERT further pretrained on text of your own, with its vocabulary or under a new one.

    medvl shards text --sources notes.jsonl --out shards/notes --name notes
    torchrun --nproc-per-node 8 recipes/continue_bert.py
    torchrun recipes/continue_bert.py --init-from RUN/best  # from a run of recipes/pubmedbert.py
    medvl vocab --data shards/notes/train --out vocab/notes --size 30522 --max-tokens 512
    torchrun --nproc-per-node 8 recipes/continue_bert.py new-words
    torchrun recipes/continue_bert.py tiny            # reports of `medvl phantom quickstart`

Preset `paper`: BioBERT's way (Lee et al., arXiv 1901.08746, Bioinformatics 2020), as compared in
PubMedBERT's paper: BERT's published weights and vocabulary, masked words and next sentence
prediction. Batch, steps and rate are smaller than those of a training from scratch and of no paper:
20,000 steps of 256 with 5e-5. Preset `new-words`: the same weights under a vocabulary of the text's
own, whose vectors are drawn anew (column 2 of its Table 9, no better there). The vocabulary of the
weights is taken from the hub; a tokenizer of another one must be given with `new_vocabulary`.

Preset `tiny`: continues the text encoder of the quickstart's ConVIRT on the reports that it was
trained with.
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

MODEL = MaskedTextConfig(text_encoder="bert", attention_dropout=0.0)
paper = Recipe(
    model=MODEL,
    pretrained=True,
    data=TextDataConfig(train=Path("shards/notes/train"), valid=Path("shards/notes/validate")),
    optim=OptimConfig(
        optimizer="adamw",
        lr=5e-5,
        weight_decay=0.01,
        clip_norm=1.0,
        schedule=Linear(warmup_steps=2_000),
    ),
    train=TrainConfig(
        run_dir=Path("runs/continue-bert"),
        steps=20_000,
        global_batch=256,
        precision="bf16",
        packed_text=True,
        validate_every=1_000,
        checkpoint_every=500,
        best_metric="masked/accuracy",
        best_mode="max",
    ),
)
new_words = dataclasses.replace(
    paper,
    model=dataclasses.replace(MODEL, new_vocabulary=True),
    data=dataclasses.replace(paper.data, tokenizer=Path("vocab/notes")),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/continue-bert-new-words")),
)
tiny = Recipe(
    model=MaskedTextConfig(
        text_encoder="tiny_bert", pairs="none", attention_dropout=0.0, max_tokens=128
    ),
    pretrained=False,
    init_from=Path("quickstart/convirt/best"),
    data=quickstart.text_data(),
    optim=OptimConfig(
        optimizer="adamw",
        lr=5e-4,
        weight_decay=0.01,
        clip_norm=1.0,
        schedule=Linear(warmup_steps=50),
    ),
    train=dataclasses.replace(
        quickstart.TEXT_TRAIN, run_dir=Path("quickstart/continue-bert"), epochs=3
    ),
)

PRESETS = {"paper": paper, "new-words": new_words, "tiny": tiny}
MAKE_DATA = "medvl shards text --sources notes.jsonl --out shards/notes --name notes"
prepare = text_run("continue_bert", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "A published BERT further pretrained on text of your own.")
