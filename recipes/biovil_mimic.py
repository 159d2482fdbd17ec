"""BioViL and BioViL-L on MIMIC-CXR (Boecking et al., ECCV 2022).

    torchrun --nproc-per-node 8 recipes/biovil_mimic.py --data.train DIR/train --data.valid DIR/validate
    torchrun --nproc-per-node 8 recipes/biovil_mimic.py local ...       # BioViL-L: with the local loss
    torchrun recipes/biovil_mimic.py tiny             # phantom corpus of scripts/quickstart.sh, two CPU cores
    torchrun recipes/biovil_mimic.py tiny --help      # every setting

Presets `paper` and `local`: the released model's sizes, the impression as the text and the findings as the second text
(the impression's place is taken by the findings where it is missing; such samples take no part in section matching).
The training code was not released: optimiser, augmentation, batch, epochs and the weights of the losses are not
confirmed. Differences from the paper: bf16 autocast; ImageNet's ResNet-50 in place of one pretrained with SimCLR on
MIMIC-CXR's images, which was not released; CXR-BERT as released, after the joint training.

Preset `tiny`: a ResNet-10 and a three-layer BERT from scratch, as `recipes/convirt_mimic.py tiny`, with a temperature
of 0.1, which a thousand steps need. Preset `tiny-local` adds the local loss.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import ConVIRTAugmentation, TextPair, WholeText
from medvl.models import BioViLConfig
from medvl.train import Cosine, DataConfig, OptimConfig, TrainConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: BioViLConfig
    pretrained: bool
    """Start both encoders from their published weights."""
    init_from: Path | None = None
    """Checkpoint to start from, also an imported one: all weights of a BioViL, or the encoders of another system."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for a corpus without labels."""


SECTIONS = TextPair(
    first=WholeText(sections=("impression",)), second=WholeText(sections=("findings",), missing="no_text")
)

paper = Recipe(
    model=BioViLConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=SECTIONS,
        image=ConVIRTAugmentation.weak(480),
    ),
    optim=OptimConfig(optimizer="adamw", lr=2e-5, weight_decay=0.01, schedule=Cosine(warmup_steps=1000)),
    train=TrainConfig(
        run_dir=Path("runs/biovil-mimic"),
        epochs=50,
        global_batch=512,
        precision="bf16",
        channels_last=True,
        packed_text=True,
    ),
)
local = dataclasses.replace(
    paper,
    model=BioViLConfig(local_weight=1.0),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/biovil-l-mimic")),
)
tiny = Recipe(
    model=BioViLConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        margin=0,
        fit="squash",
        temperature=0.1,
        mlm_weight=0.1,
        attention_dropout=0.0,
        max_tokens=64,
    ),
    pretrained=False,
    data=DataConfig(
        train="quickstart/shards/train",
        valid=Path("quickstart/shards/validate"),
        tokenizer=Path("quickstart/vocab"),
        text=SECTIONS,
        image=ConVIRTAugmentation.weak(112),
        workers=1,
    ),
    optim=OptimConfig(optimizer="adamw", lr=1e-3, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100)),
    train=TrainConfig(
        run_dir=Path("quickstart/biovil"),
        epochs=14,
        global_batch=64,
        precision="bf16",
        channels_last=True,
        packed_text=True,
        validate_every=250,
        checkpoint_every=250,
        best_metric="zero_shot/auroc_macro_competition",
        best_mode="max",
    ),
)
tiny_local = dataclasses.replace(
    tiny,
    model=dataclasses.replace(tiny.model, local_weight=0.5),
    train=dataclasses.replace(tiny.train, run_dir=Path("quickstart/biovil-l")),
)

PRESETS = {"paper": paper, "local": local, "tiny": tiny, "tiny-local": tiny_local}

MAKE_DATA = """Make the shards first. From MIMIC-CXR on disk:
    medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr --short-side 512
and then
    torchrun recipes/biovil_mimic.py --data.train shards/mimic-cxr/train --data.valid shards/mimic-cxr/validate
Without any data, on the phantom corpus:
    bash scripts/quickstart.sh"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import ZeroShotEval
    from medvl.train import pretraining

    run = pretraining("biovil_mimic", recipe, recipe.init_from)
    prompts = recipe.prompts
    return run if prompts is None else run.with_evaluator(lambda images: ZeroShotEval(images, prompts))


if __name__ == "__main__":
    launch(prepare, PRESETS, "BioViL on MIMIC-CXR.")
