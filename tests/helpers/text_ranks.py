"""Two updates of a language model on a rank's share of the batches; rank 0 saves the weights."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from helpers.text_shards import text_vocabulary
from medvl.common.ranks import rank_and_world
from medvl.common.seeding import seeded
from medvl.data.loading.text_loader import open_text_loader
from medvl.data.shards.source import ShardSource
from medvl.models import create_model
from medvl.train import OptimConfig, TrainConfig, train


def run(
    shards: Path, out: Path, accumulate: int, optimizer: Any, shard_weights: bool = False
) -> None:
    """Train a small BERT without dropout for two steps of 12 sequences."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    dropout = {
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "max_position_embeddings": 40,
    }
    with seeded(0):
        model = create_model(
            "masked_text",
            tokenizer=text_vocabulary(),
            text_encoder="bert",
            text_arguments={**sizes, **dropout},
            max_tokens=32,
        )
    config = TrainConfig(
        run_dir=out / "run",
        steps=2,
        global_batch=12,
        accumulate=accumulate,
        num_threads=1,
        tensorboard=False,
        checkpoint_every=100,
        shard_weights=shard_weights,
    )
    loader = open_text_loader(
        ShardSource(shards), model.sequences, batch=config.micro_batch, train=True
    )
    optim = OptimConfig(optimizer=optimizer, lr=0.05, eps=1e-2, weight_decay=0.01, clip_norm=1.0)
    train(model, loader, optim=optim, config=config)
    if rank_and_world()[0] == 0:
        save_file(
            {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
            out / "weights",
        )
