"""Losses: pure, differentiable functions of tensors, computed in float32 whatever the inputs' precision."""

from medvl.losses.classification import multilabel_bce
from medvl.losses.contrastive import clip, convirt, siglip
from medvl.losses.dense import bce_dice, contrastive_mask, detection, lvit
from medvl.losses.gloria import gloria_local
from medvl.losses.itc import itc, unimodal_itc
from medvl.losses.itm import itm
from medvl.losses.mim import mim
from medvl.losses.mlm import mlm, mlm_by_text, mlm_distilled
from medvl.losses.mutual_information import SeparableCritic, dv_bound, info_nce_bound, information_bound
from medvl.losses.prototypes import prototype_swap, sinkhorn
from medvl.losses.regions import region_kl, region_labels, region_regression
from medvl.losses.reverse_gradient import modality_confusion, reverse_gradient
from medvl.losses.soft_targets import label_similarity, soft_targets
from medvl.losses.transport import word_patch_alignment
from medvl.losses.vqa import answer_words, vqa_bce
from medvl.losses.within_sample import grid_positives, local_alignment, local_uniformity, within_sample_nce

__all__ = [
    "SeparableCritic",
    "answer_words",
    "bce_dice",
    "clip",
    "contrastive_mask",
    "convirt",
    "detection",
    "dv_bound",
    "gloria_local",
    "grid_positives",
    "info_nce_bound",
    "information_bound",
    "itc",
    "itm",
    "label_similarity",
    "local_alignment",
    "local_uniformity",
    "lvit",
    "mim",
    "mlm",
    "mlm_by_text",
    "mlm_distilled",
    "modality_confusion",
    "multilabel_bce",
    "prototype_swap",
    "region_kl",
    "region_labels",
    "region_regression",
    "reverse_gradient",
    "siglip",
    "sinkhorn",
    "soft_targets",
    "unimodal_itc",
    "vqa_bce",
    "within_sample_nce",
    "word_patch_alignment",
]
