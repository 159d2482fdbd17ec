"""Settings of the presets `tiny`: the phantom of `scripts/quickstart.sh`, and minutes on two CPU cores."""

from pathlib import Path

from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.text import WholeText
from medvl.train.config import Cosine, OptimConfig, TrainConfig
from medvl.train.tasks.pretraining import DataConfig

DATA = DataConfig(
    train="quickstart/shards/train",
    valid=Path("quickstart/shards/validate"),
    tokenizer=Path("quickstart/vocab"),
    text=WholeText(sections=("impression",)),
    image=ConVIRTAugmentation.weak(112),
    workers=1,
)
"""Shards of the phantom that `scripts/quickstart.sh` makes. With encoders from scratch and about 5,000 pairs, complete
impressions carry more information per step than single sentences, and a strong augmentation slows down learning."""

OPTIM = OptimConfig(optimizer="adamw", lr=1e-3, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100))
"""Optimiser and schedule for small encoders from scratch."""

TRAIN = TrainConfig(
    run_dir=Path("quickstart/run"),
    epochs=14,
    global_batch=64,
    precision="bf16",
    channels_last=True,
    validate_every=250,
    checkpoint_every=250,
    best_metric="zero_shot/auroc_macro_competition",
    best_mode="max",
)
"""About a thousand steps, minutes on two CPU cores; `best` has the highest zero-shot AUROC."""
