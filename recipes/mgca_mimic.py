"""MGCA on MIMIC-CXR (Wang et al., NeurIPS 2022, arXiv 2210.06044).

    torchrun --nproc-per-node 2 recipes/mgca_mimic.py --data.train DIR/train --data.valid DIR/validate
    torchrun recipes/mgca_mimic.py tiny             # phantom corpus of scripts/quickstart.sh, two CPU cores
    torchrun recipes/mgca_mimic.py tiny --help      # every setting
    torchrun recipes/mgca_mimic.py --init-from imported/mgca --data.train OURS/train ...    # continue

Preset `paper`: the settings of the authors' code with a ResNet-50. ImageNet's ResNet-50 and Bio_ClinicalBERT, of which
the lower six layers are used, come from the hub on first use. Frontal images (make the shards with `--views PA AP`),
impression and findings of at least three words, 112 tokens. Differences: bf16 autocast, negatives and prototype codes
from all ranks, punctuation is read, and reports of fewer than three words are
kept. The steps of the warm-up and of the frozen prototypes are those of 187,147 pairs, 1,300 an epoch: for another
number of pairs, set `--optim.schedule.warmup-steps` to 40 % of all steps and `--model.freeze-prototypes-steps` to one
epoch. Published with it: linear classification of CheXpert, AUROC .876, .880 and .882 with 1, 10 and 100 % of the
labels; a figure of ours needs the credentialed data.

Preset `paper-vit`: the same with DeiT-B/16, whose weights are named by `--model.image-weights
timm/deit_base_patch16_224.fb_in1k@COMMIT`, or a file.

Preset `tiny`: 12 epochs from the encoders of `recipes/convirt_mimic.py tiny`, with its text and augmentation; images of
112 pixels resized to 144, 9 x 9 regions; a larger learning rate, as there.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import ConVIRTAugmentation, RandomCrop, WholeText
from medvl.models import MGCAConfig
from medvl.train import Cosine, DataConfig, OptimConfig, TrainConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: MGCAConfig
    pretrained: bool
    """Start both encoders from their published weights."""
    init_from: Path | None = None
    """Checkpoint to start from, also an imported one: all weights of an MGCA, or the encoders of another system."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for a corpus without labels."""


paper = Recipe(
    model=MGCAConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=WholeText(sections=("impression", "findings")),
        image=RandomCrop(size=224, padded_size=256),
    ),
    # 40 % of 50 epochs of 1,300 steps.
    optim=OptimConfig(optimizer="adamw", lr=2e-5, weight_decay=0.05, schedule=Cosine(warmup_steps=26_000)),
    train=TrainConfig(
        run_dir=Path("runs/mgca-mimic"),
        epochs=50,
        global_batch=144,
        precision="bf16",
        channels_last=True,
        early_stop_patience=5,
    ),
)
paper_vit = dataclasses.replace(
    paper,
    model=MGCAConfig(image_encoder="timm:deit_base_patch16_224", encoder_size=None, patch_level=-1),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/mgca-vit-mimic"), channels_last=False),
)
tiny = Recipe(
    model=MGCAConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        text_arguments={},
        image_size=112,
        fit="squash",
        margin=0,
        encoder_size=144,
        max_tokens=48,
        hidden_dim=512,
        num_prototypes=100,
        freeze_prototypes_steps=80,
    ),
    pretrained=False,
    init_from=Path("quickstart/convirt/best"),
    data=DataConfig(
        train="quickstart/shards/train",
        valid=Path("quickstart/shards/validate"),
        tokenizer=Path("quickstart/vocab"),
        text=WholeText(sections=("impression",)),
        image=ConVIRTAugmentation.weak(112),
        workers=1,
    ),
    optim=OptimConfig(optimizer="adamw", lr=6e-4, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100)),
    train=TrainConfig(
        run_dir=Path("quickstart/mgca"),
        epochs=12,
        global_batch=64,
        precision="bf16",
        channels_last=True,
        validate_every=250,
        checkpoint_every=250,
        best_metric="zero_shot/auroc_macro_competition",
        best_mode="max",
    ),
)

PRESETS = {"paper": paper, "paper-vit": paper_vit, "tiny": tiny}

MAKE_DATA = """Make the shards first. From MIMIC-CXR on disk:
    medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr
and then
    torchrun recipes/mgca_mimic.py --data.train shards/mimic-cxr/train --data.valid shards/mimic-cxr/validate
Without any data, on the phantom corpus:
    bash scripts/quickstart.sh"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import ZeroShotEval
    from medvl.train import pretraining

    run = pretraining("mgca_mimic", recipe, recipe.init_from)
    prompts = recipe.prompts
    return run if prompts is None else run.with_evaluator(lambda images: ZeroShotEval(images, prompts))


if __name__ == "__main__":
    launch(prepare, PRESETS, "MGCA on MIMIC-CXR.")
