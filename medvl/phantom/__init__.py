"""The phantom chest world: synthetic radiographs with known findings, their reports, and corpora made of them.

    from medvl.phantom import World, draw, write_mimic_cxr
    patient = World(seed=0).patient(7)
    image_HW = draw(patient.studies[0].views[0], size=512)
    write_mimic_cxr("phantom-mimic", patients=400)

Nothing in it is, or is derived from, a real patient. It is good for running every path of the library on any machine
and for checking that a model learns; a score on it says nothing about real radiographs.
"""

import importlib
from typing import Any

_LAZY = {
    "Box": "truth",
    "Finding": "findings",
    "Part": "sites",
    "Patient": "world",
    "Question": "quiz",
    "Report": "reports",
    "Study": "world",
    "View": "world",
    "World": "world",
    "boxes": "truth",
    "compose_report": "reports",
    "contact_sheet": "sheet",
    "draw": "drawing",
    "masks": "truth",
    "questions": "quiz",
    "split_of": "release",
    "take_slice": "slices",
    "vqa_images": "vqa",
    "write_chexpert": "chexpert",
    "write_medicat": "medicat",
    "write_mimic_cxr": "mimic",
    "write_mimic_cxr_jpg": "mimic",
    "write_ms_cxr": "ms_cxr",
    "write_roco": "roco",
    "write_rsna": "rsna",
    "write_siim": "siim",
    "write_slake": "vqa_layouts",
    "write_vqa_rad": "vqa_layouts",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"medvl.phantom.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'medvl.phantom' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
