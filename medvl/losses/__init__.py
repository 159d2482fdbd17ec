"""Losses: pure, differentiable functions of tensors, computed in float32 whatever the inputs' precision."""

from medvl.losses.classification import labels
from medvl.losses.contrastive import clip, convirt, siglip
from medvl.losses.dense import boxes, masks
from medvl.losses.gloria import gloria_local
from medvl.losses.itc import itc
from medvl.losses.itm import itm
from medvl.losses.mim import mim
from medvl.losses.mlm import mlm, mlm_distilled
from medvl.losses.vqa import answer_words, answers

__all__ = [
    "answer_words",
    "answers",
    "boxes",
    "clip",
    "convirt",
    "gloria_local",
    "itc",
    "itm",
    "labels",
    "masks",
    "mim",
    "mlm",
    "mlm_distilled",
    "siglip",
]
