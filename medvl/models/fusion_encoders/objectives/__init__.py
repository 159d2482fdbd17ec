"""Pretraining objectives of fusion-encoders, one file for each kind; read `base` first."""
