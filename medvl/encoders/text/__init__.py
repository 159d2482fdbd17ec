"""Text encoders from transformers and open_clip."""
