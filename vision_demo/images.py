"""One image file turned into numbers: any size, any mode that Pillow knows, or one line saying why not."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vision_demo.devices import first_line
from vision_demo.problems import Problem

WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


def read(path: Path, size: tuple[int, int], channels: int) -> Tensor:
    """The image of ``path``, as a whole, at another size; the aspect ratio is not kept and nothing is cropped.

    Turned upright by its EXIF orientation; of an animation, the first frame. What is transparent shows white. Sixteen
    bits are divided by 65535, not cut off at 255. Where the image shrinks, pixels are averaged over the area; where it
    grows, they are repeated: no detail is invented.

    Args:
        path: A file that Pillow can read.
        size: (height, width) in pixels.
        channels: 3 for RGB, 1 for grey (ITU-R 601 luma, as Pillow has it).

    Returns:
        (channels, height, width) float32 from -1, black, to 1, white.

    Raises:
        Problem: The file is missing, unreadable, no image, broken, or too large; the text names it.
    """
    if not path.is_file():  # opening a pipe would wait for ever
        raise Problem(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slightly odd files: they would tear the progress bar
            # A decompression bomb is known by the size in its header, before anything is decompressed.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.load()  # of a truncated file, this fails
                upright = ImageOps.exif_transpose(image)
                planes = [drawn(plane, size) for plane in opaque(upright, channels)]
    except Problem as problem:
        raise Problem(f"{path}: {problem}") from problem
    except UnidentifiedImageError as error:
        raise Problem(f"{path}: not an image that Pillow can read") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError) as error:
        raise Problem(f"{path}: too large: more than {Image.MAX_IMAGE_PIXELS:,} pixels are refused") from error
    except Exception as error:  # a decoder given a broken file may raise anything: struct.error, SyntaxError, KeyError
        raise Problem(f"{path}: cannot be read as an image: {first_line(error)}") from error
    return torch.from_numpy(numpy.stack(planes)) / 127.5 - 1


def drawn(plane: Image.Image, size: tuple[int, int]) -> numpy.ndarray:
    """One plane at another size, (height, width) float32; as floating point, so that averages are not rounded."""
    return numpy.asarray(plane.convert("F").resize((size[1], size[0]), Image.Resampling.BOX))


def opaque(image: Image.Image, channels: int) -> list[Image.Image]:
    """The image as ``channels`` planes from 0 to 255, with white wherever it is transparent."""
    if image.mode == "I" or image.mode.startswith("I;16") or image.mode == "F":
        return [Image.fromarray(deep(image))] * channels  # grey: the same in all channels
    if image.mode in WITH_ALPHA or "transparency" in image.info:
        whole = {"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)  # premultiplied by alpha: first undone
        image = image.convert(whole).convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return list(image.convert("RGB" if channels == 3 else "L").split())


def deep(image: Image.Image) -> numpy.ndarray:
    """A grey image of more than 8 bits as (height, width) float32 from 0 to 255."""
    values = numpy.asarray(image)
    if image.mode == "F":
        if not (values.min() >= 0 and values.max() <= 1):  # written so that NaN fails
            raise Problem("holds floating-point values outside 0 to 1, whose white is unknown")
        return values.astype(numpy.float32) * 255
    if values.min() < 0 or values.max() > 65535:
        raise Problem("holds integers of more than 16 bits, whose white is unknown")
    shown = values.astype(numpy.float32) / 257  # 65535 is 255 * 257
    if isinstance(image.info.get("transparency"), int):  # a PNG may name one grey that is transparent
        shown[values == image.info["transparency"]] = 255
    return shown
