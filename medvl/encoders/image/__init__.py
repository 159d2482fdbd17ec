"""Image encoders from timm, torchvision and open_clip."""
