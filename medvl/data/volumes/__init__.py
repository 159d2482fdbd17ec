"""Volumes (CT, MR): reading of NIfTI files and DICOM series."""
