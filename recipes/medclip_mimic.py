"""MedCLIP on MIMIC-CXR, or on images and texts that are not pairs (Wang et al., EMNLP 2022).

    torchrun --nproc-per-node 4 recipes/medclip_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/medclip_mimic.py --model.image-encoder swin_tiny --data.train ...
    torchrun recipes/medclip_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/medclip_mimic.py tiny --help-all     # every setting

Images and texts are matched by their labels. So labelled images without a text (CheXpert) and
labelled texts without an image (`medvl shards table` without `--image-column`) train together with
the pairs:

    torchrun recipes/medclip_mimic.py \\
        --data.extra-train shards/chexpert/train shards/sentences/train ...

To see what unpaired data are worth, with a tenth of the patients' pairs and the images and texts of
all others apart:

    torchrun recipes/medclip_mimic.py tiny --data.paired-fraction 0.1
    # the tenth alone
    torchrun recipes/medclip_mimic.py tiny --data.paired-fraction 0.1 --data.others drop

Preset `paper`: the settings of the released code. ImageNet's ResNet-50 and Bio_ClinicalBERT come
from the hub on first
use. Differences: bf16 autocast; images and texts of all ranks are compared; a text has the labels
of its report, where the authors labelled a bank of sentences, which they did not release; the
second text is another sentence of the report instead of the same one with words exchanged; padding
is left out of a text's mean. The warm-up is a tenth of the steps of 370,000 images; the decay after
it is a cosine. The paper trains on MIMIC-CXR and CheXpert; give the second as `--data.extra-train`.

Preset `tiny`: the encoders, texts and augmentation of `recipes/convirt_mimic.py tiny`, from
scratch. Whole impressions are not drawn at random, so each is embedded once.
"""

from pathlib import Path

from medvl.data import ConVIRTAugmentation, RandomSentence
from medvl.eval import ZeroShotEval
from medvl.models import MedCLIPConfig
from medvl.train import (
    Cosine,
    DataConfig,
    OptimConfig,
    TrainConfig,
    ZeroShotRecipe,
    launch,
    quickstart,
    zero_shot_run,
)

paper = ZeroShotRecipe(
    model=MedCLIPConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-all/train",
        valid=Path("shards/mimic-cxr-all/validate"),
        text=RandomSentence(min_tokens=5),
        image=ConVIRTAugmentation(
            size=224,
            flip="plain",
            pad=True,
            area=(0.7656, 0.7656),  # 224 of 256 pixels
            aspect=(1.0, 1.0),
            rotation=10,
            translation=0.0625,
            scale=(0.8, 1.1),
            brightness=0.2,
            contrast=0.2,
            blur_sigma=(0.1, 0.1),
        ),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=2e-5,
        weight_decay=1e-4,
        clip_norm=1.0,
        schedule=Cosine(warmup_steps=3_700),
    ),
    train=TrainConfig(
        run_dir=Path("runs/medclip-mimic"),
        epochs=10,
        global_batch=100,
        precision="bf16",
        channels_last=True,
    ),
)
tiny = quickstart.zero_shot_recipe(
    "medclip",
    MedCLIPConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        fit="squash",
        projection_dim=128,
        attention_dropout=0.0,
        two_texts=False,
        max_tokens=48,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --out shards/mimic-cxr-all"
prepare = zero_shot_run("medclip_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "MedCLIP on MIMIC-CXR.")
