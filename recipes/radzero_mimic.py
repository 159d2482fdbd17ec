"""RadZero on MIMIC-CXR: statements against the patches of a frozen encoder (Park et al., arXiv
2504.07416).

    torchrun --nproc-per-node 4 recipes/radzero_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    # about a fifth of the work
    torchrun recipes/radzero_mimic.py --model.image-size 224 --data.image.size 224 ...
    torchrun recipes/radzero_mimic.py --data.text.source file --data.text.file STATEMENTS.jsonl ...
    medvl regions --data DIR/train --detector grid:rad_dino --weights published \\
        --image-size 518 --fit crop --all-tokens --name rad-dino
    # without running the frozen encoder
    torchrun recipes/radzero_mimic.py --data.image-features rad-dino ...
    torchrun recipes/radzero_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/radzero_mimic.py tiny --help-all     # every setting

Preset `paper`: the settings of the authors' configuration, with RAD-DINO as the frozen encoder, the
best of the paper's table. RAD-DINO and MPNet come from the hub on first use. Differences: the
labeler writes the statements, where the authors had a language model of 70 billion parameters (such
statements are taken from a file, whose studies `medvl knowledge statements` names as the shards
do); the temperature and the LayerScale of the trained layers do not decay, as they do in the
released code; images are those of all views, without the other images of MS-CXR's patients if they
are held out. Published with 518 pixels and four H100s: 52 GPU hours.

Goals of one GPU and one day on MIMIC-CXR, zero-shot with prompts `statements`: mean AUROC of
CheXpert's five at least 0.90, of ChestX-ray14 0.80, of PadChest's 192 labels 0.84 (`medvl shards
padchest --annotators physician --splits test=1`), of SIIM 0.92, and pointing game of MS-CXR 0.84.
The published means are of findings: name them with `medvl eval zero-shot --labels` where the data
have No Finding too. A run of ours needs the credentialed data.

Preset `tiny`: the encoders, augmentation and schedule of `recipes/convirt_mimic.py tiny` from
scratch, so that the image encoder is not frozen, and statements of the labeler.

Boxes of sentences (`--model.box-weight 1`) make its maps point, on the phantom's PadChest-GR:

    medvl phantom padchest-gr --out pgr --patients 4000 --size 160
    medvl shards padchest-gr --root pgr --out shards/pgr --short-side 160
    torchrun recipes/radzero_mimic.py tiny --model.box-weight 1 --data.train shards/pgr/train \\
        --data.valid shards/pgr/validate --data.tokenizer medvl/models/demo/tokenizer \\
        --init-from demo --model.text-arguments hidden_size 128 intermediate_size 512 \\
        max_position_embeddings 64 num_attention_heads 2 num_hidden_layers 2 --train.steps 200
    medvl eval grounding --checkpoint quickstart/radzero/last --data shards/pgr/test \\
        --valid shards/pgr/validate
    # pointing game, 1,121 phrases, one seed: 0.761 [0.734, 0.786], weight 0 0.467 [0.435, 0.496],
    # paired difference 0.294 [0.265, 0.327]; mean place of other patients' boxes 0.619
    # --protocol generalized: F1 at IoU 0.5 0.286 [0.262, 0.311], weight 0 0.034 [0.024,
    # 0.044], ConVIRT (`demo`) 0.002 [0.000, 0.005]; phrases without a box 0.987 right, weight 0
    # 0.971, ConVIRT 0.982

Real images do not suffice: 329 of NIH that RSNA's radiologists looked at, 96 with boxes of lung
opacity, five folds by patient, linear maps on EfficientNet-Lite0 as it is (`python
scripts/boxes_nih.py`). Boxes bring the IoU of all boxes from 0.049 to 0.136, paired 0.087 [0.061,
0.115], and the AUROC of presence from 0.611 to 0.692, 0.082 [0.017, 0.146]; images without a box
are right in 0.687 (0.742). But recall at IoU 0.5 is 0.010 [0.000, 0.027], precision 0.034 and AP
0.000, below the mean place of the training boxes: 0.198 [0.137, 0.267], 0.146 and 0.009.
"""

import dataclasses
from pathlib import Path

from medvl.data import EvalTransform, Statements
from medvl.eval import ZeroShotEval
from medvl.models import RadZeroConfig
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
    model=RadZeroConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-all/train",
        valid=Path("shards/mimic-cxr-all/validate"),
        text=Statements(),
        image=EvalTransform(size=518),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.05,
        clip_norm=1.0,
        schedule=Cosine(warmup_steps=50),
    ),
    train=TrainConfig(
        run_dir=Path("runs/radzero-mimic"),
        epochs=20,
        global_batch=256,
        precision="bf16",
        early_stop_patience=5,
    ),
    prompts="statements",
)
tiny = quickstart.zero_shot_recipe(
    "radzero",
    RadZeroConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        fit="squash",
        frozen_image=False,
        attention_dropout=0.0,
        max_tokens=48,
    ),
    dataclasses.replace(quickstart.DATA, text=Statements()),
    prompts="statements",
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --out shards/mimic-cxr-all"
prepare = zero_shot_run("radzero_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "RadZero on MIMIC-CXR.")
