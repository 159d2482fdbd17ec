"""Encoding of 12-bit images as 8-bit files."""

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray


def encode_jpeg(image_HW: NDArray[np.uint16]) -> bytes:
    """Return a 12-bit image as an 8-bit grey JPEG of quality 95."""
    grey_HW1 = np.ascontiguousarray((image_HW >> 4).astype(np.uint8)[..., None])
    return simplejpeg.encode_jpeg(grey_HW1, quality=95, colorspace="GRAY")


def encode_png(image_HW: NDArray[np.uint16]) -> bytes:
    """Return a 12-bit image as an 8-bit grey PNG."""
    return cv2.imencode(".png", (image_HW >> 4).astype(np.uint8))[1].tobytes()
