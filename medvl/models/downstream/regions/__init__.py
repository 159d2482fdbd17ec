"""Frozen detectors that write region features (`medvl regions`)."""
