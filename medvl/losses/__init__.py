"""Losses: pure, differentiable functions of tensors, computed in float32 whatever the inputs' precision."""

from medvl.losses.diffusion import denoising, edge_l1, gaussian_kl, reconstruction
from medvl.losses.local.gloria import gloria_local
from medvl.losses.local.statements import patch_cosine, statement_contrast
from medvl.losses.local.transport import word_patch_alignment
from medvl.losses.local.within_sample import grid_positives, local_alignment, local_uniformity, within_sample_nce
from medvl.losses.masked.mim import mim
from medvl.losses.masked.mlm import mlm, mlm_by_text, mlm_distilled, symmetric_kl
from medvl.losses.masked.regions import region_kl, region_labels, region_regression
from medvl.losses.pairs.contrastive import clip, convirt, siglip
from medvl.losses.pairs.itc import itc, unimodal_itc
from medvl.losses.pairs.itm import itm
from medvl.losses.pairs.mutual_information import SeparableCritic, dv_bound, info_nce_bound, information_bound
from medvl.losses.pairs.prototypes import prototype_swap, sinkhorn
from medvl.losses.pairs.reverse_gradient import modality_confusion, reverse_gradient
from medvl.losses.pairs.soft_targets import label_similarity, multi_hot, multi_positive, soft_targets
from medvl.losses.supervised.classification import known_labels, multilabel_bce
from medvl.losses.supervised.dense import bce_dice, contrastive_mask, detection, lvit
from medvl.losses.supervised.vqa import answer_words, vqa_bce

__all__ = [
    "SeparableCritic",
    "answer_words",
    "bce_dice",
    "clip",
    "contrastive_mask",
    "convirt",
    "denoising",
    "detection",
    "dv_bound",
    "edge_l1",
    "gaussian_kl",
    "gloria_local",
    "grid_positives",
    "info_nce_bound",
    "information_bound",
    "itc",
    "itm",
    "known_labels",
    "label_similarity",
    "local_alignment",
    "local_uniformity",
    "lvit",
    "mim",
    "mlm",
    "mlm_by_text",
    "mlm_distilled",
    "modality_confusion",
    "multi_hot",
    "multi_positive",
    "multilabel_bce",
    "patch_cosine",
    "prototype_swap",
    "reconstruction",
    "region_kl",
    "region_labels",
    "region_regression",
    "reverse_gradient",
    "siglip",
    "sinkhorn",
    "soft_targets",
    "statement_contrast",
    "symmetric_kl",
    "unimodal_itc",
    "vqa_bce",
    "within_sample_nce",
    "word_patch_alignment",
]
