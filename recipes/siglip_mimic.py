"""SigLIP's sigmoid loss on MIMIC-CXR (Zhai et al., arXiv 2303.15343, ICCV 2023).

    torchrun --nproc-per-node 8 recipes/siglip_mimic.py --data.train DIR/train --data.valid DIR/validate
    torchrun recipes/siglip_mimic.py tiny             # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/siglip_mimic.py tiny --help      # every setting
    torchrun recipes/siglip_mimic.py --init-from runs/siglip-mimic/best --data.train OURS/train ...    # continue

Preset `paper`: CheXzero's encoders (OpenAI's CLIP ViT-B/32, from the hub on first use), images and impressions, so that
the two recipes compare the losses. The paper trained on web images. From the paper: the loss, the initial scale and
bias, Adam's second beta of 0.95, and no weight decay on pretrained encoders. Chosen here: rate, batch and length; no
result of this setting was published. The authors' own model, with the weights and the tokenizer of its repository, is

    ... --model.image-encoder open_clip:ViT-B-16-SigLIP --model.text-encoder open_clip:ViT-B-16-SigLIP
        --model.weights OWNER/NAME@COMMIT --data.tokenizer FOLDER --model.max-tokens 64

Preset `continued`: SigLIP B/16 of 512 pixels with its own weights, continued on several corpora, as MedSigLIP and
XraySigLIP are; their training code and settings were not released. Give its weights and tokenizer, and each corpus a
share; half of the samples from the images that it knows keep it from forgetting them:

    ... continued --model.weights OWNER/NAME@COMMIT --data.tokenizer FOLDER --data.extra-train shards/roco/train
        --data.weights 0.5 0.5
    medvl interpolate checkpoints/siglip runs/siglip-continued/best --share 0.5 --out runs/siglip-between

Equal texts are positives: with the nine class names of a tissue data set as captions, 11 % of the negatives of the
usual loss are true pairs, and 4,096 pairs are compared at once, encoded 512 at a time, where accumulated batches are
not compared with each other. Samples with labels alone have sentences of them. Goals on MIMIC-CXR: AUROC of CheXpert's
five 0.90, of ChestX-ray14 0.80.

Preset `tiny`: as in `recipes/chexzero_mimic.py`, for the same reasons.
"""

import dataclasses
from pathlib import Path

from medvl.data import EvalTransform, RandomSection, TextOrLabels, WholeText
from medvl.eval import ZeroShotEval
from medvl.models import CheXzeroConfig, SigLIPConfig
from medvl.train import Cosine, DataConfig, OptimConfig, TrainConfig, ZeroShotRecipe, launch, quickstart, zero_shot_run

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
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=WholeText(sections=("impression",), missing="literal"),
        image=EvalTransform(size=224, fit="pad", stored_size=320),
    ),
    optim=OptimConfig(optimizer="adamw", lr=1e-5, betas=(0.9, 0.95), schedule=Cosine(warmup_steps=500)),
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
# The bias reflects how rare pairs are: -10 is about log(1 / 32,768), the paper's batch, and -4 about log(1 / 64).
tiny = quickstart.zero_shot_recipe(
    "siglip",
    SigLIPConfig(
        image_encoder="resnet_tiny",
        text_encoder="open_clip:custom",
        text_arguments={"num_hidden_layers": 3, "width": 192, "heads": 3, "context_length": 48, "embed_dim": 128},
        image_size=112,
        bias=-4.0,
        max_tokens=48,
    ),
    dataclasses.replace(quickstart.DATA, text=WholeText(sections=("impression",), missing="literal")),
)

continued = dataclasses.replace(
    paper,
    model=SigLIPConfig(
        image_encoder="open_clip:ViT-B-16-SigLIP-512",
        text_encoder="open_clip:ViT-B-16-SigLIP-512",
        image_size=512,
        fit="pad",
        max_tokens=64,
        positives="text",
    ),
    data=dataclasses.replace(
        paper.data, text=TextOrLabels(text=RandomSection()), image=EvalTransform(size=512, fit="pad")
    ),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/siglip-continued"), global_batch=4096, grad_cache=512),
    prompts="chexpert_ensemble",
)

PRESETS = {"paper": paper, "continued": continued, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --out shards/mimic-cxr --short-side 320"
prepare = zero_shot_run("siglip_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "SigLIP on MIMIC-CXR.")
