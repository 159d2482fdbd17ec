"""Losses: pure, differentiable functions of tensors, computed in float32 whatever the inputs' precision."""

from medvl.losses.contrastive import clip, convirt, siglip

__all__ = ["clip", "convirt", "siglip"]
