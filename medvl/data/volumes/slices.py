"""Slices of a volume as RGB images, for encoders of images."""

from collections.abc import Sequence

import numpy as np

from medvl.data.volumes.resampling import apply_window
from medvl.data.volumes.volume import Volume
from medvl.errors import ConfigError

Window = tuple[float, float]
CHEST_WINDOWS: tuple[Window, Window, Window] = ((-1150, 350), (-160, 240), (-200, 1200))
"""Lung, soft tissue and bone in Hounsfield units, as red, green and blue."""


def rgb_slices(
    volume: Volume,
    places: Sequence[int] | None = None,
    *,
    windows: tuple[Window, Window, Window] = CHEST_WINDOWS,
) -> np.ndarray:
    """Return axial slices as uint8 RGB (N, H, W, 3), a window for each channel, front upwards.

    Args:
        volume: source.
        places: indices along z; None: the middle one.
        windows: values that become 0 and 255 in each channel.

    Raises:
        ConfigError: "out_of_range" for a place outside of the volume, or for a window.
    """
    depth = len(volume.hu_DHW)
    chosen = [depth // 2] if places is None else list(places)
    if not all(0 <= place < depth for place in chosen):
        raise ConfigError(
            f"expected places from 0 to {depth - 1}, got {chosen}", "out_of_range", field="places"
        )
    slices_NHW = volume.hu_DHW[chosen]
    channels = [apply_window(slices_NHW, low, high) for low, high in windows]
    return np.rint(np.stack(channels, axis=-1) * 255).astype(np.uint8)
