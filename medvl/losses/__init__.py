"""Losses: pure, differentiable functions of tensors, computed in float32 whatever the inputs'
precision.
"""

from medvl.losses.diffusion import denoising, edge_l1, gaussian_kl, reconstruction
from medvl.losses.local.gloria import gloria_local
from medvl.losses.local.statements import patch_cosine, statement_contrast
from medvl.losses.local.within_sample import (
    grid_positives,
    local_alignment,
    local_uniformity,
    within_sample_nce,
    word_patch_alignment,
)
from medvl.losses.masked import (
    mim,
    mlm,
    mlm_by_text,
    mlm_distilled,
    region_kl,
    region_labels,
    region_regression,
    symmetric_kl,
)
from medvl.losses.pairs.contrastive import (
    clip,
    convirt,
    label_similarity,
    multi_hot,
    multi_positive,
    siglip,
    soft_targets,
)
from medvl.losses.pairs.itc import itc, unimodal_itc
from medvl.losses.pairs.itm import itm
from medvl.losses.pairs.mutual_information import (
    SeparableCritic,
    dv_bound,
    info_nce_bound,
    information_bound,
)
from medvl.losses.pairs.prototypes import (
    modality_confusion,
    prototype_swap,
    reverse_gradient,
    sinkhorn,
)
from medvl.losses.supervised import (
    answer_words,
    bce_dice,
    contrastive_mask,
    detection,
    known_labels,
    lvit,
    multilabel_bce,
    vqa_bce,
)

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
