"""Names and shapes of published checkpoints (`state_dicts/*.txt`), and files that hold tensors of
those names.

Each line has a name and a shape; `{a,b}` and `{0-11}` stand for several names, `-` for the shape of
a scalar.
"""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "state_dicts"
LISTS = {
    "arl": "arl_encoders",
    "arl arl_align_head": "arl",
    "biomedclip_open_clip": "biomedclip",
    "biovil_image": "biovil_image",
    "biovil_image cxrbert_text": "biovil",
    "biovil_t_image": "biovil_t_image",
    "biovil_t_image cxrbert_text": "biovil_t",
    "carzero": "carzero",
    "chexzero": "chexzero",
    "colipri": "colipri",
    "convirt_pytorch": "convirt_pytorch",
    "ct_clip": "ct_clip",
    "cxrbert_text": "cxrbert",
    "cxrclip_resnet50": "cxrclip",
    "cxrclip_swin_tiny": "cxrclip",
    "gloria_resnet18": "gloria_encoders",
    "gloria_resnet50": "gloria",
    "hlip": "hlip",
    "kad": "kad",
    "lvit bioclinicalbert": "lvit",
    "lovt": "lovt",
    "lovt_convirt": "convirt_lovt",
    "m3ae": "m3ae",
    "mavl bioclinicalbert": "mavl",
    "medclip_resnet50": "medclip",
    "medclip_swin_tiny": "medclip",
    "medklip": "medklip_image",
    "medklip bioclinicalbert": "medklip",
    "medvill": "medvill",
    "mflag_benchx": "mflag",
    "mgca_resnet50": "mgca",
    "mgca_vit_base": "mgca",
    "mrm_benchx": "mrm",
    "prior": "prior",
    "ptunifier": "ptunifier",
    "r2gen_iu_xray": "r2gen",
    "r2gen_mimic_cxr": "r2gen_mimic",
    "radzero": "radzero",
}
"""List, or those of several files -> importer."""


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Return key -> shape of one list, or of several, as an import joins them, with spaces
    between their names.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for each in name.split():
        lines = (FOLDER / f"{each}.txt").read_text().splitlines()
        listed = {
            key: shape for line in lines if not line.startswith("#") for key, shape in _expand(line)
        }
        prefix = (
            "module." if " " in name and all(key.startswith("module.") for key in listed) else ""
        )
        shapes |= {key.removeprefix(prefix): shape for key, shape in listed.items()}
    return shapes


def meta_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return tensors on the meta device."""
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Return random weights of moderate scale; variances are positive, counters are 7, computed
    tensors as published.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            value = value / value[0].numel() ** 0.5
        if key.endswith("running_var"):
            value = value.abs() + 0.5
        tensors[key] = torch.tensor(7) if key.endswith("num_batches_tracked") else value
        if key.endswith("position_ids"):
            tensors[key] = torch.arange(shape[-1])[None]
        elif key.endswith("relative_position_index"):
            tensors[key] = _window_index(shape[0])
        elif key.endswith("tgt_embed.1.pe"):
            tensors[key] = _sines(*shape[1:])[None]
    return tensors


def _window_index(cells: int) -> Tensor:
    """Swin's table as its authors wrote it: pairs of coordinates, numbered row by row."""
    side = round(cells**0.5)
    places = [(row, column) for row in range(side) for column in range(side)]
    width = 2 * side - 1
    return torch.tensor(
        [[(a - c + side - 1) * width + b - d + side - 1 for c, d in places] for a, b in places]
    )


def _sines(length: int, width: int) -> Tensor:
    """Positions of the Annotated Transformer, whose class R2Gen has: sines and cosines in turns."""
    place = torch.arange(length, dtype=torch.float64)[:, None]
    rate = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    table = torch.zeros(length, width, dtype=torch.float64)
    table[:, 0::2], table[:, 1::2] = (place * rate).sin(), (place * rate).cos()
    return table.float()


def _expand(line: str) -> list[tuple[str, tuple[int, ...]]]:
    name, size = line.rsplit(" ", 1)
    shape = () if size == "-" else tuple(map(int, size.split("x")))
    choices = [
        [part] if index % 2 == 0 else [one for piece in part.split(",") for one in _numbers(piece)]
        for index, part in enumerate(re.split(r"\{([^}]*)\}", name))
    ]
    return [("".join(chosen), shape) for chosen in itertools.product(*choices)]


def _numbers(piece: str) -> list[str]:
    first_last = re.fullmatch(r"(\d+)-(\d+)", piece)
    return (
        [str(n) for n in range(int(first_last[1]), int(first_last[2]) + 1)]
        if first_last
        else [piece]
    )
