"""Uploaded volumes: a NIfTI file, the files of a DICOM series, or a zip archive of either; and
their slices and maps as JSON values.

Files are read from memory, under the limits of the server. Their names are not used.
"""

import base64
import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np

from medvl.common.untrusted import ZIP_ERRORS
from medvl.data.dicom.parser import starts_like_dicom
from medvl.data.volumes.dicom_series import decode_dicom_series
from medvl.data.volumes.nifti import decode_nifti
from medvl.data.volumes.volume import Volume, VolumeLimits, check_hounsfield
from medvl.errors import VolumeError
from medvl.inference.models import Expected, describe_doubt, header_of
from medvl.inference.volumes import peak_of, volume_heatmap
from medvl.models.base import System
from medvl.serve.config import ServeConfig
from medvl.serve.requests import ImageRequest

MOST_FILES = 4000
"""Files of one upload, or of one archive."""
_UNPACKED = 4
"""Bytes of an unpacked archive, as a multiple of the largest upload."""
_VIEW_SIDE = 256
_VIEW_SLICES = 160
_MAP_SIDE = 64
_ENTRY = b"PK\x01\x02"
"""Start of an archive's entry for each file."""
_PLACES = (
    ("lower third", "middle", "upper third"),
    ("front", "middle", "back"),
    ("right side", "middle", "left side"),
)
"""Thirds along (z, y, x), of the patient."""


def decode_volume(request: ImageRequest, config: ServeConfig, modality: str) -> Volume:
    """Read the volume of a request by its content. `modality` is that of files that state none.

    Raises VolumeError or DicomError as the readers; "too_large" beyond the limits of the server,
    "not_hu" for a CT whose values are no Hounsfield units.
    """
    limits = _limits(config)
    return _volume_of(_contents(request, limits), limits, modality)


def _limits(config: ServeConfig) -> VolumeLimits:
    return VolumeLimits(
        file_bytes=_UNPACKED * config.max_bytes, files=MOST_FILES, voxels=config.max_voxels
    )


def _contents(request: ImageRequest, limits: VolumeLimits) -> Sequence[bytes]:
    """Return the content of the files of a request, unpacked."""
    files: Sequence[bytes] = request.files
    if len(files) == 1 and files[0][:4] == b"PK\x03\x04":
        return _unpack(files[0], limits)
    return files


def _volume_of(files: Sequence[bytes], limits: VolumeLimits, modality: str) -> Volume:
    if len(files) > 1 or starts_like_dicom(files[0][:132]):
        volume = decode_dicom_series(files, limits=limits)
    else:
        volume = decode_nifti(io.BytesIO(files[0]), modality=modality, limits=limits)
    if (volume.modality or modality) == "CT":
        check_hounsfield(volume)
    return volume


def _unpack(data: bytes, limits: VolumeLimits) -> list[bytes]:
    """Return the content of the files of an archive. Raises VolumeError."""
    if data.count(_ENTRY) > limits.files:
        raise VolumeError(
            f"the archive has more than {limits.files} files", "too_large", field="files"
        )
    left = limits.file_bytes
    files = []
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                if member.is_dir() or not member.file_size:
                    continue
                with archive.open(member) as file:
                    content = file.read(left + 1)
                left -= len(content)
                if left < 0:
                    raise VolumeError(
                        f"the archive has over {limits.file_bytes} bytes when unpacked",
                        "too_large",
                        field="file_bytes",
                    )
                files.append(content)
    except ZIP_ERRORS:
        raise VolumeError(
            "the archive is damaged, encrypted, or of an unknown compression; pack it again",
            "malformed",
        ) from None
    if not files:
        raise VolumeError("the archive has no files", "empty")
    return files


def view_volume(
    request: ImageRequest,
    config: ServeConfig,
    window: tuple[float, float],
    models: Mapping[str, Expected],
    modality: str,
) -> dict[str, Any]:
    """Return the slices that the page shows, as JSON values.

    `values` are int16 in little endian and base64, in the order z, y, x, with square pixels;
    `window` is where the page begins, from the low and high end of the model's. `modality` as in
    `decode_volume`.
    """
    limits = _limits(config)
    files = _contents(request, limits)
    volume = _volume_of(files, limits, modality)
    is_dicom = starts_like_dicom(files[0][:132])
    header = next(filter(None, map(header_of, files)), None)
    shown_DHW = _shown(volume)
    depth, height, width = shown_DHW.shape
    slices, rows, columns = volume.hu_DHW.shape
    return {
        "depth": depth,
        "height": height,
        "width": width,
        "slices": slices,
        "rows": rows,
        "columns": columns,
        "spacing": [round(step, 3) for step in volume.spacing],
        "format": "DICOM" if len(files) > 1 or is_dicom else "NIfTI",
        "header": {"modality": volume.modality if is_dicom or len(files) > 1 else None},
        "dropped": dict(volume.dropped),
        "warning": describe_doubt(header, models),
        "values": base64.b64encode(shown_DHW.astype("<i2").tobytes()).decode(),
        "window": {
            "low": float(shown_DHW.min()),
            "high": float(shown_DHW.max()),
            "center": (window[0] + window[1]) / 2,
            "width": window[1] - window[0],
            "hounsfield": volume.modality in (None, "CT"),
        },
    }


def _shown(volume: Volume) -> np.ndarray:
    """Return at most `_VIEW_SLICES` slices, of at most `_VIEW_SIDE` square pixels."""
    depth, rows, columns = volume.hu_DHW.shape
    height, width = rows * volume.spacing[1], columns * volume.spacing[2]
    step = max(max(height, width) / _VIEW_SIDE, min(volume.spacing[1:]))
    size = (max(1, round(width / step)), max(1, round(height / step)))
    count = min(depth, _VIEW_SLICES)
    places = ((np.arange(count) + 0.5) * depth / count).astype(int)
    return np.stack(
        [cv2.resize(volume.hu_DHW[z], size, interpolation=cv2.INTER_AREA) for z in places]
    )


def volume_map(model: System, volume: Volume, text: str) -> dict[str, Any]:
    """Return the map of a text over a volume: uint8 in base64, in the order z, y, x, 0 outside of
    the model's cut, 1 low to 255 high.

    Color begins at the mean of the map. `peak` is the highest place, as shares along x, y, z.
    """
    shape = [min(_MAP_SIDE, side) for side in volume.hu_DHW.shape]
    map_DHW = volume_heatmap(model, volume, text, shape)
    peak = peak_of(map_DHW)
    seen_DHW = np.isfinite(map_DHW)
    low, high, mean = (float(function(map_DHW[seen_DHW])) for function in (np.min, np.max, np.mean))
    heat_DHW = np.where(seen_DHW, np.clip((map_DHW - mean) / max(high - mean, 1e-12), 0, 1), 0)
    codes_DHW = np.where(seen_DHW, 1 + np.rint(254 * heat_DHW), 0).astype(np.uint8)
    shares = [(place + 0.5) / side for place, side in zip(peak, shape, strict=True)]
    places = [names[min(2, int(3 * share))] for names, share in zip(_PLACES, shares, strict=True)]
    return {
        "depth": shape[0],
        "height": shape[1],
        "width": shape[2],
        "map": base64.b64encode(codes_DHW.tobytes()).decode(),
        "low": low,
        "mean": mean,
        "high": high,
        "peak": shares[::-1],
        "place": ", ".join(name for name in places if name != "middle") or "middle",
    }
