"""Knowledge encoder of KAD's first stage, Med-KEBERT (Zhang et al., Nature Communications 2023,
arXiv 2302.14042).

    medvl knowledge build --umls 2024AB --out knowledge/umls --keep-isolated
    medvl shards concepts --knowledge knowledge/umls --umls 2024AB --out shards/concepts
    torchrun --nproc-per-node 4 recipes/kebert.py
    torchrun recipes/kad_mimic.py --init-from runs/kebert/best ...        # the encoder and the head
    torchrun recipes/kebert.py tiny  # the phantom's ontology, with the vocabulary of the quickstart

UMLS needs a licence of its own. Preset `paper`: the settings of the released code, 100 epochs of
256 pairs of up to 128 tokens. Differences: start from PubMedBERT, of which UMLSBert is a further
training; targets of a concept that occurs twice in a batch sum to 1; concepts without a held-out
fact measure the retrieval of names.

Preset `tiny`: the three-layer BERT of the quickstart's ConVIRT on the facts of `medvl phantom
umls`. Validation prints `concepts/mrr`, of names of held-out concepts found from facts about them,
beside that by chance.
"""

from pathlib import Path

from medvl.models import ConceptScore, KEBERTConfig
from medvl.train import (
    Cosine,
    OptimConfig,
    Recipe,
    TextDataConfig,
    TrainConfig,
    launch,
    text_run,
)

paper = Recipe(
    model=KEBERTConfig(),
    pretrained=True,
    data=TextDataConfig(
        train=Path("shards/concepts/train"), valid=Path("shards/concepts/validate")
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=5e-5,
        weight_decay=0.2,
        eps=1e-8,
        schedule=Cosine(warmup_steps=10_000, min_lr=0.0),
    ),
    train=TrainConfig(
        run_dir=Path("runs/kebert"),
        epochs=100,
        global_batch=256,
        precision="bf16",
        packed_text=True,
        best_metric="concepts/mrr",
        best_mode="max",
    ),
)
tiny = Recipe(
    model=KEBERTConfig(
        text_encoder="tiny_bert",
        text_arguments={"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
        projection_dim=192,
        max_tokens=64,
    ),
    pretrained=False,
    init_from=Path("quickstart/convirt/best"),
    data=TextDataConfig(
        train=Path("quickstart/concepts/train"),
        valid=Path("quickstart/concepts/validate"),
        tokenizer=Path("quickstart/vocab"),
        workers=1,
    ),
    optim=OptimConfig(
        optimizer="adamw", lr=5e-4, weight_decay=0.01, schedule=Cosine(warmup_steps=20)
    ),
    train=TrainConfig(
        run_dir=Path("quickstart/kebert"),
        epochs=30,
        global_batch=64,
        precision="bf16",
        packed_text=True,
        best_metric="concepts/mrr",
        best_mode="max",
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = (
    "medvl knowledge build --umls UMLS --out knowledge/umls --keep-isolated\n"
    "    medvl shards concepts --knowledge knowledge/umls --umls UMLS --out shards/concepts"
)
PHANTOM = (
    "medvl phantom quickstart\n"
    "    medvl phantom umls --out quickstart/umls\n"
    "    medvl knowledge build --umls quickstart/umls --out quickstart/knowledge\n"
    "    medvl shards concepts --knowledge quickstart/knowledge --umls quickstart/umls --out "
    "quickstart/concepts"
)
prepare = text_run("kebert", MAKE_DATA, PHANTOM, evaluator=ConceptScore)

if __name__ == "__main__":
    launch(prepare, PRESETS, "KAD's knowledge encoder on the concepts of UMLS.")
