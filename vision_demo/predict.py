"""``python -m vision_demo predict RUN IMAGE...``: what a trained model sees in image files."""

from __future__ import annotations

import argparse

import torch

from vision_demo import runs
from vision_demo.devices import precision
from vision_demo.images import read
from vision_demo.problems import Problem, one_line, say


def run(options: argparse.Namespace) -> int:
    """Print path, class and probability of every image, tabs between; returns 1 if one could not be read."""
    found = runs.find(options.run)
    config, model = found.config, found.model().to(options.device)
    if options.ink is not None and config.channels == 3:
        raise Problem("--ink is for models of the digits; this one was trained on a folder of images", status=2)
    status = 0
    for path in options.images:
        try:
            image = read(path, config.image_size, config.channels)
        except (Problem, OSError) as problem:
            say(problem)
            status = 1
            continue
        if options.ink == "dark":
            image = -image
        with torch.no_grad(), precision(options.device):
            logits = model(image[None].to(options.device))
        probability, label = logits[0].float().softmax(dim=-1).max(dim=-1)
        print(one_line(path), one_line(config.classes[int(label)]), f"{probability.item():.4f}", sep="\t", flush=True)
    return status
