"""Exporters to Hugging Face, ONNX and open_clip."""
