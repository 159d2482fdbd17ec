"""Losses: pure, differentiable functions of tensors, computed in float32 whatever the inputs'
precision.
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.losses.diffusion import (
        denoising as denoising,
        edge_l1 as edge_l1,
        gaussian_kl as gaussian_kl,
        reconstruction as reconstruction,
    )
    from medvl.losses.local.gloria import gloria_local as gloria_local
    from medvl.losses.local.within_sample import (
        grid_positives as grid_positives,
        label_entropy as label_entropy,
        local_alignment as local_alignment,
        local_uniformity as local_uniformity,
        patch_cosine as patch_cosine,
        place_divergence as place_divergence,
        place_entropy as place_entropy,
        statement_contrast as statement_contrast,
        within_sample_nce as within_sample_nce,
        word_patch_alignment as word_patch_alignment,
    )
    from medvl.losses.masked import (
        mim as mim,
        mlm as mlm,
        mlm_by_text as mlm_by_text,
        mlm_distilled as mlm_distilled,
        region_kl as region_kl,
        region_labels as region_labels,
        region_regression as region_regression,
        symmetric_kl as symmetric_kl,
    )
    from medvl.losses.pairs.contrastive import (
        altered_texts as altered_texts,
        clip as clip,
        convirt as convirt,
        denial_holds as denial_holds,
        label_similarity as label_similarity,
        multi_hot as multi_hot,
        multi_positive as multi_positive,
        organ_contrast as organ_contrast,
        siglip as siglip,
        soft_targets as soft_targets,
    )
    from medvl.losses.pairs.image_text import itc as itc, itm as itm, unimodal_itc as unimodal_itc
    from medvl.losses.pairs.mutual_information import (
        SeparableCritic as SeparableCritic,
        dv_bound as dv_bound,
        info_nce_bound as info_nce_bound,
        information_bound as information_bound,
    )
    from medvl.losses.pairs.prototypes import (
        modality_confusion as modality_confusion,
        prototype_swap as prototype_swap,
        reverse_gradient as reverse_gradient,
        sinkhorn as sinkhorn,
    )
    from medvl.losses.policy import (
        group_advantages as group_advantages,
        grpo as grpo,
        self_critical as self_critical,
    )
    from medvl.losses.supervised import (
        answer_words as answer_words,
        bce_dice as bce_dice,
        contrastive_mask as contrastive_mask,
        detection as detection,
        known_labels as known_labels,
        lvit as lvit,
        multilabel_bce as multilabel_bce,
        option_choice as option_choice,
        vqa_bce as vqa_bce,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
