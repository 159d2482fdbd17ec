"""Tables of positions of published files, which their code computes: kept where medvl computes other ones."""

import dataclasses
from typing import Any

from torch import Tensor

from medvl.export.importers.key_map import MappedTensors, is_close
from medvl.models.fusion_encoders.parts.heads import sinusoids

DECODER_POSITIONS = "mim_head.positions_ND"


def keep_decoder_positions(config: Any, mapped: MappedTensors) -> tuple[Any, MappedTensors]:
    """Return the config and the tensors with the file's positions of the pixel decoder, unless they are MAE's.

    MRM's released code takes frequencies from 1 down to 0.1 only, M3AE's those of MAE, down to 1 / 10,000.
    """
    table_ND = mapped.tensors.get(DECODER_POSITIONS)
    if table_ND is None or not _is_mae(table_ND):
        return dataclasses.replace(config, stored_positions=table_ND is not None), mapped
    tensors = {name: tensor for name, tensor in mapped.tensors.items() if name != DECODER_POSITIONS}
    why = "equal to MAE's sines and cosines, which medvl computes"
    left_out = {**mapped.left_out, **dict.fromkeys(mapped.sources[DECODER_POSITIONS], why)}
    sources = {name: keys for name, keys in mapped.sources.items() if name != DECODER_POSITIONS}
    return config, dataclasses.replace(mapped, tensors=tensors, sources=sources, left_out=left_out)


def _is_mae(table_ND: Tensor) -> bool:
    if table_ND.ndim != 2 or table_ND.shape[1] % 4:
        return False
    side = round((len(table_ND) - 1) ** 0.5)
    return is_close(table_ND, sinusoids((side, side), table_ND.shape[1]))
