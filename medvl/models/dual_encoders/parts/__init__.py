"""Layers and functions of tensors that several dual-encoders use."""
