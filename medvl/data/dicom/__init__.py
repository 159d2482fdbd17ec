"""DICOM files to 8-bit or 16-bit grey images."""
