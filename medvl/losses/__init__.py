"""Losses: pure, differentiable functions of tensors, computed in float32 whatever the inputs' precision."""

from medvl.losses.answers import answers
from medvl.losses.contrastive import clip, convirt, siglip
from medvl.losses.itc import itc
from medvl.losses.itm import itm
from medvl.losses.mim import mim
from medvl.losses.mlm import mlm, mlm_distilled

__all__ = ["answers", "clip", "convirt", "itc", "itm", "mim", "mlm", "mlm_distilled", "siglip"]
