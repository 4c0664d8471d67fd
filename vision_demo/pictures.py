"""What the model sees and how it learned: in the terminal, as a contact sheet, as curves."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from rich.console import Console
from rich.text import Text
from torch import Tensor

from vision_demo.data import Size
from vision_demo.train import Record

COLUMNS = 80  # of the terminal
CELLS = 16  # of the longest side of the largest picture in the terminal
IN_TERMINAL, ON_SHEET = 3, 10  # pictures of each size


def one_of_each(labels: Tensor, count: int) -> list[int]:
    """Where in ``labels`` (images,) up to ``count`` different classes stand first, in the order of the classes."""
    first: dict[int, int] = {}
    for index, label in enumerate(labels.tolist()):
        first.setdefault(label, index)
    return [first[label] for label in sorted(first)][:count]


def name(size: Size) -> str:
    """``(32, 48)`` as "32 x 48"."""
    return f"{size[0]} x {size[1]}"


def show(drawn: Mapping[Size, Tensor]) -> None:
    """Print the first pictures of each size, (images, channels, height, width) from -1 to 1, at one common scale.

    Two pixels stand in one character, one above the other, coloured if the terminal has colours.
    """
    console = Console(file=sys.stdout, highlight=False)
    coloured = console.color_system in ("256", "truecolor")
    blocks = " ▀▄█" if can_write("▀▄█") else " '.:"  # nothing, above, below, both
    scale = max(1, max(max(size) for size in drawn) // CELLS)
    panels = [panel(size, images[:IN_TERMINAL], scale, blocks, coloured) for size, images in drawn.items()]
    for shelf in shelves(panels):
        for line in range(max(len(lines) for lines in shelf)):
            row = [lines[line] if line < len(lines) else Text(" " * lines[0].cell_len) for lines in shelf]
            console.print(Text("   ").join(row), soft_wrap=True)


def can_write(text: str) -> bool:
    """Whether the encoding of stdout has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def panel(size: Size, images: Tensor, scale: int, blocks: str, coloured: bool) -> list[Text]:
    """Lines of equal length: the name of the size, then its pictures beside each other."""
    rows, columns = (max(1, round(side / scale)) for side in size)
    small = F.adaptive_avg_pool2d(images, (rows, columns)) / 2 + 0.5  # (images, channels, rows, columns) from 0 to 1
    # Without colours a cell is bright or not, measured against its own picture: a dark one shows something too.
    bright = small.mean(1, keepdim=True)
    bright = bright > (bright.amax((2, 3), keepdim=True) + bright.amin((2, 3), keepdim=True)) / 2
    small = small if coloured else bright.float()
    small = F.pad(small.expand(-1, 3, -1, -1), (0, 0, 0, rows % 2))  # an even number of rows, the last one dark
    lines = []
    for above, below in zip(small[:, :, ::2].unbind(2), small[:, :, 1::2].unbind(2), strict=True):
        line = Text()
        for image in range(len(images)):
            line.append(" " if image else "")
            for top, bottom in zip(above[image].T, below[image].T, strict=True):
                if coloured:
                    line.append("▀" if "▀" in blocks else " ", f"{rgb(top)} on {rgb(bottom)}")
                else:
                    line.append(blocks[int(top.mean()) + 2 * int(bottom.mean())])
        lines.append(line)
    width = max(lines[0].cell_len, len(name(size)))
    for line in (heading := Text(name(size), "bold"), *lines):
        line.pad_right(width - line.cell_len)
    return [heading, *lines]


def rgb(colour: Tensor) -> str:
    """(3,) from 0 to 1 in the words of rich."""
    red, green, blue = (colour * 255).round().int().tolist()
    return f"rgb({red},{green},{blue})"


def shelves(panels: list[list[Text]]) -> list[list[list[Text]]]:
    """The panels put beside each other where they fit, the tallest first: a terminal has few lines."""
    found: list[list[list[Text]]] = []
    for lines in sorted(panels, key=len, reverse=True):
        needed = lines[0].cell_len + 3
        for shelf in found:
            if needed + sum(other[0].cell_len + 3 for other in shelf) <= COLUMNS + 3:
                shelf.append(lines)
                break
        else:
            found.append([lines])
    return found


def contact_sheet(drawn: Mapping[Size, Tensor], *, gap: int = 6, caption: int = 60) -> bytes:
    """A PNG with a row of pictures for each size, small ones magnified, and the size written before it."""
    magnified = max(1, 128 // max(max(size) for size in drawn))
    heights = [size[0] * magnified for size in drawn]
    width = caption + max(len(images) * (size[1] * magnified + gap) for size, images in drawn.items())
    sheet = Image.new("RGB", (width + gap, sum(heights) + gap * (len(heights) + 1)), (64, 64, 96))
    draw, top = ImageDraw.Draw(sheet), gap
    for (size, images), height in zip(drawn.items(), heights, strict=True):
        draw.text((gap, top), name(size), fill="white")
        for place, image in enumerate(images):
            pixels = ((image.expand(3, -1, -1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
            large = Image.fromarray(pixels).resize((size[1] * magnified, height), Image.Resampling.NEAREST)
            sheet.paste(large, (caption + place * (size[1] * magnified + gap), top))
        top += height + gap
    content = io.BytesIO()
    sheet.save(content, "PNG")
    return content.getvalue()


def curves(records: Sequence[Record], title: str) -> bytes:
    """A PNG of loss and accuracy over the epochs."""
    # matplotlib is slow to import, and only a training draws. Without pyplot there is no window and no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4))  # no automatic layout: it takes longer than an epoch of the digits
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    epochs = [record["epoch"] for record in records]
    left.plot(epochs, [record["loss"] for record in records], marker=".", clip_on=False)
    left.set(xlabel="epoch", ylabel="cross-entropy", title="loss")
    left.set_ylim(bottom=0)
    for key, label in (("train_accuracy", "trained on"), ("held_out_accuracy", "held out")):
        if records and key in records[0]:
            right.plot(epochs, [record[key] for record in records], marker=".", label=label)
    right.set(xlabel="epoch", title="accuracy", ylim=(0, 1.02))
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    if records:
        right.legend()
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.13, top=0.84)
    figure.suptitle(title.replace("$", r"\$"))  # a dollar would begin a formula
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()
