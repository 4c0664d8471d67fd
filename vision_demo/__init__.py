"""A small Vision Transformer trained on real images, with and without positions: ``python -m vision_demo``."""
