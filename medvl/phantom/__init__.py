"""The phantom chest world: synthetic radiographs with known findings, their reports, and corpora
made of them.

    from medvl.phantom import World, draw, write_mimic_cxr
    patient = World(seed=0).patient(7)
    image_HW = draw(patient.studies[0].views[0], size=512)
    write_mimic_cxr("phantom-mimic", patients=400)

Nothing in it is a real patient or derived from one. Use it to run every part of the library on any
machine and to check that a model learns; scores on it do not predict scores on real radiographs.
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.phantom.example import (
        draw_example as draw_example,
        write_example as write_example,
    )
    from medvl.phantom.language.reports import (
        Report as Report,
        compose_ct_report as compose_ct_report,
        compose_report as compose_report,
    )
    from medvl.phantom.language.vqa import vqa_images as vqa_images
    from medvl.phantom.layouts.boxes import (
        write_chestxdet as write_chestxdet,
        write_chestxdet10 as write_chestxdet10,
        write_ms_cxr as write_ms_cxr,
        write_object_cxr as write_object_cxr,
        write_vindr_cxr as write_vindr_cxr,
        write_vindr_pcxr as write_vindr_pcxr,
    )
    from medvl.phantom.layouts.choices import (
        write_pmc_vqa as write_pmc_vqa,
        write_rexvqa as write_rexvqa,
    )
    from medvl.phantom.layouts.dicom_writer import dicom_bytes as dicom_bytes
    from medvl.phantom.layouts.figures import (
        write_medicat as write_medicat,
        write_roco as write_roco,
    )
    from medvl.phantom.layouts.grounded_reports import (
        write_chest_imagenome as write_chest_imagenome,
        write_padchest_gr as write_padchest_gr,
    )
    from medvl.phantom.layouts.kaggle import (
        write_qata as write_qata,
        write_rsna as write_rsna,
        write_siim as write_siim,
    )
    from medvl.phantom.layouts.mammography import (
        write_embed_mammo as write_embed_mammo,
        write_vindr_mammo as write_vindr_mammo,
    )
    from medvl.phantom.layouts.questions import (
        write_cxr_qba as write_cxr_qba,
        write_diff_vqa as write_diff_vqa,
        write_gemex as write_gemex,
        write_mimic_cxr_vqa as write_mimic_cxr_vqa,
        write_slake as write_slake,
        write_vqa_rad as write_vqa_rad,
    )
    from medvl.phantom.layouts.reports import (
        write_mimic_cxr as write_mimic_cxr,
        write_mimic_cxr_jpg as write_mimic_cxr_jpg,
        write_openi as write_openi,
        write_padchest as write_padchest,
    )
    from medvl.phantom.layouts.tables import (
        write_bimcv_covid19 as write_bimcv_covid19,
        write_brax as write_brax,
        write_candid_ptx as write_candid_ptx,
        write_chexpert as write_chexpert,
        write_chexpert_plus as write_chexpert_plus,
        write_ms_cxr_t as write_ms_cxr_t,
        write_rexgradient as write_rexgradient,
    )
    from medvl.phantom.layouts.umls import write_umls as write_umls
    from medvl.phantom.layouts.volumes import (
        write_ct_rate as write_ct_rate,
        write_inspect as write_inspect,
        write_merlin as write_merlin,
        write_rad_chestct as write_rad_chestct,
        write_volumes as write_volumes,
    )
    from medvl.phantom.layouts.writer import read_truth as read_truth, split_of as split_of
    from medvl.phantom.population.findings import Finding as Finding, Part as Part
    from medvl.phantom.population.volumes import (
        ChestCT as ChestCT,
        CTFinding as CTFinding,
        Slice as Slice,
        sample_chest_ct as sample_chest_ct,
        sample_slice as sample_slice,
    )
    from medvl.phantom.population.world import (
        Patient as Patient,
        Study as Study,
        View as View,
        World as World,
    )
    from medvl.phantom.rendering.draw import (
        contact_sheet as contact_sheet,
        draw as draw,
        draw_slice as draw_slice,
    )
    from medvl.phantom.rendering.findings import Box as Box, boxes as boxes, masks as masks
    from medvl.phantom.rendering.scene import encode_jpeg as encode_jpeg
    from medvl.phantom.rendering.volumes import (
        draw_volume as draw_volume,
        finding_masks as finding_masks,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
