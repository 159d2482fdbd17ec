"""SigLIP's sigmoid loss on MIMIC-CXR (Zhai et al., arXiv 2303.15343, ICCV 2023).

    torchrun --nproc-per-node 8 recipes/siglip_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/siglip_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/siglip_mimic.py tiny --help-all      # every setting
    # continue
    torchrun recipes/siglip_mimic.py --init-from runs/siglip-mimic/best --data.train OURS/train ...

Preset `paper`: CheXzero's encoders (OpenAI's CLIP ViT-B/32, from the hub on first use), images and
impressions, so that the two recipes compare the losses. The paper trained on web images. From the
paper: the loss, the initial scale and bias, Adam's second beta of 0.95, and no weight decay on
pretrained encoders. Chosen here: rate, batch and length; no result of this setting was published.
The authors' own model, with the weights and the tokenizer of its repository, is

    ... --model.image-encoder open_clip:ViT-B-16-SigLIP \\
        --model.text-encoder open_clip:ViT-B-16-SigLIP
        --model.weights OWNER/NAME@COMMIT --data.tokenizer FOLDER --model.max-tokens 64

Preset `continued`: SigLIP B/16 of 512 pixels with its own weights, continued on several corpora, as
MedSigLIP and XraySigLIP are; their training code and settings were not released, and those here are
ours. Give its weights and
tokenizer, and the corpora shares: the square roots of their sizes, so that small ones count, with
about a quarter for images other than radiographs, which keep it from forgetting what it knows.

    ... continued --model.weights OWNER/NAME@COMMIT --data.tokenizer FOLDER \\
        --data.extra-train shards/roco/train
        --data.weights 0.75 0.25
    medvl interpolate checkpoints/siglip runs/siglip-continued/best --share 0.5 \\
        --out runs/siglip-between

The text is findings, impression or one statement of the labeler, with weights of 0.4, 0.3 and 0.3;
samples with labels alone have sentences of them. Scale and bias start at those of the weights, with
ten times the rate of the encoders. Texts that are equal, or of the same study, are positives: with
the nine class names of a tissue data set as captions, 11 % of the negatives of the usual loss are
true pairs. 4,096 pairs are compared at once, encoded 512 at a time, where accumulated batches are
not compared with each other. MIMIC-CXR alone makes 900 steps, of which 3 % are the warm-up; an
early checkpoint can be better than the last on another domain, so one is written every hundred
steps (all are kept with `--train.keep-last 9`). Goals on MIMIC-CXR: AUROC of CheXpert's five 0.90,
of ChestX-ray14 0.80.

Preset `continued-clip`: the same with CLIP's softmax loss, as XrayCLIP is, on open_clip's ViT-B/16
of 224 pixels.

    ... continued-clip --model.weights OWNER/NAME@COMMIT --data.extra-train shards/roco/train \\
        --data.weights 0.75 0.25

Preset `tiny`: as in `recipes/chexzero_mimic.py`, for the same reasons.
"""

import dataclasses
from pathlib import Path

from medvl.data import EvalTransform, SectionOrStatement, TextOrLabels, WholeText
from medvl.eval import ZeroShotEval
from medvl.models import CheXzeroConfig, CLIPConfig, SigLIPConfig
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

_CHEXZERO = CheXzeroConfig()
paper = ZeroShotRecipe(
    model=SigLIPConfig(
        image_encoder=_CHEXZERO.image_encoder,
        text_encoder=_CHEXZERO.text_encoder,
        fit=_CHEXZERO.fit,
        stored_size=_CHEXZERO.stored_size,
        image_mean=_CHEXZERO.image_mean,
        image_std=_CHEXZERO.image_std,
        max_tokens=_CHEXZERO.max_tokens,
    ),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-320/train",
        valid=Path("shards/mimic-cxr-320/validate"),
        text=WholeText(sections=("impression",), missing="literal"),
        image=EvalTransform(size=224, fit="pad", stored_size=320),
    ),
    optim=OptimConfig(
        optimizer="adamw", lr=1e-5, betas=(0.9, 0.95), schedule=Cosine(warmup_steps=500)
    ),
    train=TrainConfig(
        run_dir=Path("runs/siglip-mimic"),
        epochs=10,
        global_batch=256,
        precision="bf16",
        validate_every=1000,
        checkpoint_every=1000,
        best_metric="zero_shot/auroc_macro_competition",
        best_mode="max",
    ),
    prompts="chexzero_template",
)
# The bias reflects how rare pairs are: -10 is about log(1 / 32,768), the paper's batch, and -4
# about log(1 / 64).
tiny = quickstart.zero_shot_recipe(
    "siglip",
    SigLIPConfig(
        image_encoder="resnet_tiny",
        text_encoder="open_clip:custom",
        text_arguments={
            "num_hidden_layers": 3,
            "width": 192,
            "heads": 3,
            "context_length": 48,
            "embed_dim": 128,
        },
        image_size=112,
        bias=-4.0,
        max_tokens=48,
    ),
    dataclasses.replace(
        quickstart.DATA, text=WholeText(sections=("impression",), missing="literal")
    ),
    packed_text=False,
)

continued = dataclasses.replace(
    paper,
    model=SigLIPConfig(
        image_encoder="open_clip:ViT-B-16-SigLIP-512",
        text_encoder="open_clip:ViT-B-16-SigLIP-512",
        image_size=512,
        fit="pad",
        max_tokens=64,
        scalar_lr_mult=10.0,
        positives="either",
    ),
    data=dataclasses.replace(
        paper.data,
        train="shards/mimic-cxr-all/train",
        valid=Path("shards/mimic-cxr-all/validate"),
        text=TextOrLabels(text=SectionOrStatement()),
        image=EvalTransform(size=512, fit="pad"),
    ),
    optim=dataclasses.replace(paper.optim, weight_decay=1e-4, schedule=Cosine(warmup_steps=27)),
    train=dataclasses.replace(
        paper.train,
        run_dir=Path("runs/siglip-continued"),
        global_batch=4096,
        grad_cache=512,
        validate_every=100,
        checkpoint_every=100,
    ),
    prompts="chexpert_ensemble",
)

continued_clip = dataclasses.replace(
    continued,
    model=CLIPConfig(
        image_encoder="open_clip:ViT-B-16",
        text_encoder="open_clip:ViT-B-16",
        fit="pad",
        positives="either",
    ),
    data=dataclasses.replace(continued.data, image=EvalTransform(size=224, fit="pad")),
    train=dataclasses.replace(continued.train, run_dir=Path("runs/clip-continued")),
)

PRESETS = {"paper": paper, "continued": continued, "continued-clip": continued_clip, "tiny": tiny}
MAKE_DATA = """medvl shards mimic-cxr --root MIMIC-CXR --out shards/mimic-cxr-320 --short-side 320
    medvl shards mimic-cxr --root MIMIC-CXR --out shards/mimic-cxr-all          # presets continued, continued-clip"""
prepare = zero_shot_run("siglip_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "SigLIP on MIMIC-CXR.")
