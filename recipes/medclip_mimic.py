"""MedCLIP on MIMIC-CXR, or on images and texts that are not pairs (Wang et al., EMNLP 2022).

    torchrun --nproc-per-node 4 recipes/medclip_mimic.py --data.train DIR/train --data.valid DIR/validate
    torchrun recipes/medclip_mimic.py --model.image-encoder swin_tiny --data.train ...
    torchrun recipes/medclip_mimic.py tiny            # phantom corpus of scripts/quickstart.sh, two CPU cores
    torchrun recipes/medclip_mimic.py tiny --help     # every setting

Images and texts are matched by their labels. So labelled images without a text (CheXpert) and labelled texts without an
image (`medvl shards table` without `--image-column`) train together with the pairs:

    torchrun recipes/medclip_mimic.py --data.extra-train shards/chexpert/train shards/sentences/train ...

To see what unpaired data are worth, with a tenth of the patients' pairs and the images and texts of all others apart:

    torchrun recipes/medclip_mimic.py tiny --data.paired-fraction 0.1
    torchrun recipes/medclip_mimic.py tiny --data.paired-fraction 0.1 --data.others drop    # the tenth alone

Preset `paper`: the settings of the released code. ImageNet's ResNet-50 and Bio_ClinicalBERT come from the hub on first
use. Differences: bf16 autocast; images and texts of all ranks are compared; a text has the labels of its report, where
the authors labelled a bank of sentences, which they did not release; the second text is another sentence of the report
instead of the same one with words exchanged; padding is left out of a text's mean. The warm-up is a tenth of
the steps of 370,000 images; the decay after it is a cosine. The paper trains on MIMIC-CXR and
CheXpert; give the second as `--data.extra-train`.

Preset `tiny`: the encoders, texts and augmentation of `recipes/convirt_mimic.py tiny`, from scratch. Whole impressions
are not drawn at random, so each is embedded once.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import ConVIRTAugmentation, RandomSentence, WholeText
from medvl.models import MedCLIPConfig
from medvl.train import Cosine, DataConfig, OptimConfig, TrainConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: MedCLIPConfig
    pretrained: bool
    """Start both encoders from their published weights."""
    init_from: Path | None = None
    """Checkpoint to start from, also an imported one: all weights of a MedCLIP, or the encoders of another system."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for none."""


paper = Recipe(
    model=MedCLIPConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=RandomSentence(min_tokens=5),
        image=ConVIRTAugmentation(
            size=224,
            flip="plain",
            area=(0.7656, 0.7656),  # 224 of 256 pixels
            rotation=10,
            translation=0.0625,
            scale=(0.8, 1.1),
            brightness=0.2,
            contrast=0.2,
            blur_sigma=(0.1, 0.1),
        ),
    ),
    optim=OptimConfig(
        optimizer="adamw", lr=2e-5, weight_decay=1e-4, clip_norm=1.0, schedule=Cosine(warmup_steps=3_700)
    ),
    train=TrainConfig(
        run_dir=Path("runs/medclip-mimic"), epochs=10, global_batch=100, precision="bf16", channels_last=True
    ),
)
tiny = Recipe(
    model=MedCLIPConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        fit="squash",
        projection_dim=128,
        attention_dropout=0.0,
        two_texts=False,
        max_tokens=48,
    ),
    pretrained=False,
    data=DataConfig(
        train="quickstart/shards/train",
        valid=Path("quickstart/shards/validate"),
        tokenizer=Path("quickstart/vocab"),
        text=WholeText(sections=("impression",)),
        image=ConVIRTAugmentation.weak(112),
        workers=1,
    ),
    optim=OptimConfig(optimizer="adamw", lr=1e-3, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100)),
    train=TrainConfig(
        run_dir=Path("quickstart/medclip"),
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

PRESETS = {"paper": paper, "tiny": tiny}

MAKE_DATA = """Make the shards first. From MIMIC-CXR on disk:
    medvl shards mimic-cxr --root MIMIC-CXR --out shards/mimic-cxr
and then
    torchrun recipes/medclip_mimic.py --data.train shards/mimic-cxr/train --data.valid shards/mimic-cxr/validate
Without any data, on the phantom corpus:
    bash scripts/quickstart.sh"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import ZeroShotEval
    from medvl.train import pretraining

    run = pretraining("medclip_mimic", recipe, recipe.init_from)
    prompts = recipe.prompts
    return run if prompts is None else run.with_evaluator(lambda images: ZeroShotEval(images, prompts))


if __name__ == "__main__":
    launch(prepare, PRESETS, "MedCLIP on MIMIC-CXR.")
