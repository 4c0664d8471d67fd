"""A folder of images of any size and mode is learned from; what cannot be used ends in one line that names it."""

import os
import struct
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from vision_demo.__main__ import NEEDED, main

ABSENT = [package for module, package in NEEDED.items() if find_spec(module) is None]
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"the demo's optional packages are absent: {ABSENT}")
if not ABSENT:
    import numpy
    from PIL import Image

    from vision_demo.folder import load
    from vision_demo.images import read


def photos(folder, classes=("cat", "dog"), count=4):
    """A class is one colour, whatever the size of its images."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for image in range(count):
            colour = (40 + 60 * number, 200 - 80 * number, 10 * image)
            Image.new("RGB", (10 + 7 * image, 50 - 5 * image), colour).save(folder / name / f"{image}.png")
    return folder


def png(width, height):
    """The bytes of a tiny PNG file that says it is width x height."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 99)) + chunk(b"IEND", b"")
    )


def cut(path, kind):
    """A file of this kind that ends in the middle."""
    Image.effect_noise((64, 64), 99).convert("RGB").save(path, kind)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    """A PNG whose pixels are damaged in the middle."""
    Image.effect_noise((64, 64), 99).save(path, "PNG")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


BAD = {  # what is done to a good folder, and what the line says
    "an empty file": (lambda f: (f / "cat/1.png").write_bytes(b""), "cat/1.png: not an image"),
    "a text": (lambda f: (f / "cat/notes.txt").write_text("hello"), "cat/notes.txt: not an image"),
    "a text called png": (lambda f: (f / "cat/x.png").write_text("hello"), "cat/x.png: not an image"),
    "a truncated PNG": (lambda f: cut(f / "dog/x.png", "PNG"), "dog/x.png: cannot be read as an image"),
    "a truncated JPEG": (lambda f: cut(f / "dog/x.jpg", "JPEG"), "dog/x.jpg: cannot be read as an image"),
    "a truncated GIF": (lambda f: cut(f / "dog/x.gif", "GIF"), "dog/x.gif: cannot be read as an image"),
    "a truncated TIFF": (lambda f: cut(f / "dog/x.tif", "TIFF"), "dog/x.tif: "),
    "a damaged PNG": (lambda f: flip(f / "dog/x.png"), "dog/x.png: cannot be read as an image"),
    "a bomb": (lambda f: (f / "dog/x.png").write_bytes(png(60000, 60000)), "dog/x.png: too large"),
    "a small bomb": (lambda f: (f / "dog/x.png").write_bytes(png(10000, 10000)), "dog/x.png: too large"),
    "a PNG without pixels": (lambda f: (f / "dog/x.png").write_bytes(png(0, 5)), "dog/x.png: "),
    "floats past 1": (lambda f: Image.new("F", (4, 4), 3.0).save(f / "dog/x.tif"), "dog/x.tif: holds floating-point"),
    "floats that are none": (
        lambda f: Image.new("F", (4, 4), float("nan")).save(f / "dog/x.tif"),
        "dog/x.tif: holds floating-point",
    ),
    "wide integers": (lambda f: Image.new("I", (4, 4), 70000).save(f / "dog/x.tif"), "dog/x.tif: holds integers"),
    "a broken link": (lambda f: (f / "dog/x.png").symlink_to(f / "gone"), "dog/x.png: no such file"),
    "a pipe": (lambda f: os.mkfifo(f / "dog/x.png"), "dog/x.png: not a file"),
    "a folder in a class": (lambda f: (f / "dog/more").mkdir(), "dog/more: is a folder inside a class folder"),
    "a file beside the classes": (lambda f: (f / "x.png").write_bytes(b""), "x.png: lies beside the class folders"),
    "a class with one image": (
        lambda f: [(f / f"cat/{i}.png").unlink() for i in range(3)],
        "cat: holds a single image; a class needs two",
    ),
    "a class without images": (lambda f: (f / "bird").mkdir(), "bird: holds no image"),
    "a class with litter alone": (
        lambda f: ((f / "bird").mkdir(), (f / "bird/.DS_Store").write_bytes(b"")),
        "bird: holds no image",
    ),
    "one class": (lambda f: (empty(f / "dog"), (f / "dog").rmdir()), "cat: is the only class"),
    "no class": (lambda f: [(empty(f / n), (f / n).rmdir()) for n in ("cat", "dog")], "photos: is empty"),
    "a name with a line break": (lambda f: (f / "dog/a\nb.png").write_text("x"), r"dog/a\nb.png: not an image"),
    "a name that is no text": (
        lambda f: Path(os.fsdecode(os.fsencode(f) + b"/dog/\xff.png")).write_text("x"),
        ".png: not an image",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_used_ends_in_one_line_that_names_it_and_leaves_no_run(kind, tmp_path, capsys):
    spoil, told = BAD[kind]
    folder = photos(tmp_path / "photos")
    spoil(folder)
    ended = main(["--data", str(folder), "--run", str(tmp_path / "run"), "--epochs", "1", "--device", "cpu"])
    assert_one_line(ended, told, capsys)
    assert not (tmp_path / "run").exists()


def assert_one_line(ended, told, capsys, status=1):
    err = capsys.readouterr().err.rpartition("\r")[2].lstrip(" ")  # the bar of the reading goes when it ends
    assert ended == status
    assert err.startswith("vision_demo: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert told in err
    assert "Traceback" not in err


def test_a_folder_that_is_none_ends_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert_one_line(main(["--data", str(tmp_path / "gone")]), "gone: no such folder", capsys)
    assert_one_line(main(["--data", str(tmp_path / "file")]), "file: not a folder", capsys)


def test_a_file_that_may_not_be_read_ends_in_one_line(tmp_path, capsys, monkeypatch):
    folder = photos(tmp_path / "photos")
    really = Image.open

    def refuse(path, *arguments, **options):
        if Path(path).name == "2.png":  # a test that runs as root is refused nothing
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *arguments, **options)

    monkeypatch.setattr(Image, "open", refuse)
    assert_one_line(main(["--data", str(folder), "--run", str(tmp_path / "run")]), "2.png: cannot be read", capsys)


def test_more_images_than_memory_are_refused_before_they_are_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vision_demo.folder.LARGEST", 6 * 3 * 32 * 32 * 4 - 1)
    folder = photos(tmp_path / "photos")
    assert_one_line(main(["--data", str(folder), "--run", str(tmp_path / "run")]), "6 images of 32 x 32", capsys)


def test_more_training_images_than_there_are_are_refused(tmp_path, capsys):
    ended = main(["--data", str(photos(tmp_path / "photos")), "--train-images", "7"])
    assert_one_line(ended, "has 6 images to train on", capsys, status=2)


def test_a_folder_is_learned_from_at_a_size_that_is_not_square(tmp_path, capsys):
    folder = photos(tmp_path / "photos", ("cat", "dog", "eel"), count=8)
    for name in (".DS_Store", "Thumbs.db", ".hidden"):
        (folder / name).write_text("litter")
        (folder / "cat" / name).write_text("litter")
    run = tmp_path / "run"
    arguments = ["--data", str(folder), "--image-size", "16x24", "--epochs", "1", "--run", str(run), "--device", "cpu"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "18 images at 16 x 24" in out
    for size in ("16 x 24", "12 x 16", "24 x 36", "32 x 48", "16 x 36"):
        assert out.count(size) >= 2, size  # its pictures and its accuracy
    assert main(["predict", str(run), str(folder / "cat" / "1.png"), "--device", "cpu"]) == 0
    path, name, probability = capsys.readouterr().out.rstrip("\n").split("\t")
    assert path == str(folder / "cat" / "1.png")
    assert name in ("cat", "dog", "eel")
    assert 1 / 3 <= float(probability) <= 1


def test_a_quarter_of_every_class_is_held_out_and_always_the_same(tmp_path):
    folder = photos(tmp_path / "photos", ("a", "b", "c"), count=9)
    for image in range(7):
        (folder / "a" / f"{image}.png").unlink()
    first, again = load(folder), load(folder)
    assert first.source == again.source
    assert first.train.paths == again.train.paths
    assert first.held_out.labels.bincount().tolist() == [1, 2, 2]
    assert first.train.labels.bincount().tolist() == [1, 7, 7]
    assert not set(first.train.paths) & set(first.held_out.paths)
    assert first.classes == ("a", "b", "c")
    for part in (first.train, first.held_out):
        assert [first.classes[label] for label in part.labels] == [path.parent.name for path in part.paths]
    assert len(set(first.train.labels[:6].tolist())) > 1  # mixed, so that the first so many are a fair sample
    (folder / "b" / "new.png").write_bytes(b"")
    assert load(folder).source != first.source


def gradient(mode):
    """(4, 6) values that reach from the smallest to the largest of the mode."""
    largest = {"1": 1, "L": 255, "I;16": 65535, "I;16B": 65535, "I": 65535, "F": 1}[mode]
    return numpy.linspace(0, largest, 24).reshape(4, 6)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("mode", "kind", "dtype", "white"),
    [
        ("L", "png", "uint8", 255),
        ("I;16", "png", "uint16", 65535),
        ("I;16", "tiff", "<u2", 65535),
        ("I;16B", "tiff", ">u2", 65535),
        ("I", "tiff", "int32", 65535),
        ("F", "tiff", "float32", 1),
    ],
)
def test_grey_of_any_depth_reaches_from_black_to_white(mode, kind, dtype, white, channels, tmp_path):
    values = gradient(mode).astype(dtype)
    path = tmp_path / f"image.{kind}"
    Image.frombytes(mode, (6, 4), values.tobytes()).save(path)
    assert Image.open(path).mode.startswith(mode[:2])
    expected = torch.from_numpy(values.astype("float64")) / white * 2 - 1
    found = read(path, (4, 6), channels)
    assert found.shape == (channels, 4, 6)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.expand(channels, 4, 6), atol=1e-6, rtol=0)


def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path):
    Image.fromarray(numpy.array([[0, 255, 256, 32896, 65535]], dtype="uint16")).save(tmp_path / "image.png")
    found = (read(tmp_path / "image.png", (1, 5), 1).flatten() + 1) / 2
    torch.testing.assert_close(found, torch.tensor([0, 255, 256, 32896, 65535]) / 65535, atol=1e-6, rtol=0)


RED, CLEAR = (255, 0, 0, 255), (10, 20, 30, 0)


def picture(mode):
    """One pixel of colour and one that is transparent where the mode has that, else a second colour."""
    image = Image.new("RGBA", (2, 1))
    image.putdata([RED, CLEAR if mode in ("RGBA", "LA", "PA", "P") else (10, 20, 30, 255)])
    if mode == "P":
        image = Image.new("P", (2, 1))
        image.putpalette([255, 0, 0, 10, 20, 30])
        image.putdata([0, 1])
        image.info["transparency"] = 1
    elif mode == "CMYK":
        image = Image.new("CMYK", (2, 1))
        image.putdata([(0, 255, 255, 0), (0, 0, 0, 128)])
    else:
        image = image.convert(mode)
    return image


@pytest.mark.parametrize(
    ("mode", "kind", "expected"),
    [
        ("RGB", "png", [(255, 0, 0), (10, 20, 30)]),
        ("RGBA", "png", [(255, 0, 0), (255, 255, 255)]),
        ("LA", "png", [(76, 76, 76), (255, 255, 255)]),
        ("P", "png", [(255, 0, 0), (255, 255, 255)]),
        ("P", "gif", [(255, 0, 0), (255, 255, 255)]),
        ("CMYK", "tiff", [(255, 0, 0), (127, 127, 127)]),
    ],
)
def test_every_mode_becomes_rgb_with_white_where_it_is_transparent(mode, kind, expected, tmp_path):
    picture(mode).save(tmp_path / f"image.{kind}")
    found = (read(tmp_path / f"image.{kind}", (1, 2), 3) + 1) * 127.5
    torch.testing.assert_close(found[:, 0].T, torch.tensor(expected).float(), atol=1e-4, rtol=0)


def test_half_transparent_pixels_mix_with_white(tmp_path):
    Image.new("RGBA", (3, 3), (0, 100, 200, 128)).save(tmp_path / "image.png")
    found = (read(tmp_path / "image.png", (3, 3), 3) + 1) * 127.5
    expected = torch.tensor([value * 128 / 255 + 255 * 127 / 255 for value in (0, 100, 200)])
    torch.testing.assert_close(found[:, 1, 1], expected, atol=1, rtol=0)


def test_a_grey_png_with_one_transparent_grey_shows_it_white(tmp_path):
    Image.fromarray(numpy.array([[0, 20000, 65535]], dtype="uint16")).save(tmp_path / "deep.png", transparency=0)
    Image.fromarray(numpy.array([[0, 100, 255]], dtype="uint8")).save(tmp_path / "flat.png", transparency=0)
    assert read(tmp_path / "deep.png", (1, 3), 1).flatten()[[0, 2]].tolist() == [1, 1]
    assert read(tmp_path / "flat.png", (1, 3), 1).flatten()[[0, 2]].tolist() == [1, 1]


def test_one_bit_is_black_and_white(tmp_path):
    Image.fromarray(numpy.eye(4, dtype=bool)).save(tmp_path / "image.png")
    assert Image.open(tmp_path / "image.png").mode == "1"
    assert torch.equal(read(tmp_path / "image.png", (4, 4), 3), (torch.eye(4) * 2 - 1).expand(3, 4, 4))


def test_grey_of_a_colour_is_its_luma(tmp_path):
    Image.new("RGB", (2, 2), (200, 100, 50)).save(tmp_path / "image.png")
    luma = 0.299 * 200 + 0.587 * 100 + 0.114 * 50
    assert ((read(tmp_path / "image.png", (2, 2), 1) + 1) * 127.5).sub(luma).abs().max() < 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright(orientation, tmp_path):
    upright = torch.zeros(4, 6)
    upright[0, 0], upright[0, 5] = 1.0, 0.5  # no two of the eight ways to hold a camera show it alike
    stored = {
        1: upright,
        2: upright.flip(1),
        3: upright.flip(0, 1),
        4: upright.flip(0),
        5: upright.T,
        6: upright.T.flip(0),
        7: upright.T.flip(0, 1),
        8: upright.T.flip(1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    values = (stored * 255).round().to(torch.uint8)
    Image.fromarray(values.numpy()).save(tmp_path / "image.png", exif=exif)
    found = (read(tmp_path / "image.png", (4, 6), 1)[0] + 1) / 2
    torch.testing.assert_close(found, upright, atol=1 / 255, rtol=0)


@pytest.mark.parametrize("kind", ["gif", "png", "webp", "tiff"])
def test_of_an_animation_the_first_frame_is_taken(kind, tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(tmp_path / f"image.{kind}", save_all=True, append_images=frames[1:])
    assert Image.open(tmp_path / f"image.{kind}").n_frames == 3
    found = read(tmp_path / f"image.{kind}", (8, 8), 3)
    torch.testing.assert_close(found[:, 4, 4], torch.tensor([1.0, -1.0, -1.0]), atol=0.03, rtol=0)


def test_an_image_is_resized_as_a_whole_by_areas(tmp_path):
    values = torch.arange(8 * 12).reshape(8, 12)
    Image.fromarray(values.to(torch.uint8).numpy()).save(tmp_path / "image.png")
    means = values.double().reshape(2, 4, 4, 3).mean((1, 3))  # nothing cropped, the aspect ratio not kept
    found = (read(tmp_path / "image.png", (2, 4), 1)[0].double() + 1) * 127.5
    torch.testing.assert_close(found, means, atol=1e-4, rtol=0)
    grown = (read(tmp_path / "image.png", (16, 36), 1)[0].double() + 1) * 127.5
    expected = values.double().repeat_interleave(2, 0).repeat_interleave(3, 1)
    torch.testing.assert_close(grown, expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(sys.platform == "win32", reason="names there are text")
def test_names_of_any_kind_are_told_on_one_line(tmp_path, capsys):
    from vision_demo.problems import Problem, say

    say(Problem("a\nb\r\x1b[31m\u2028\udcff"))
    assert capsys.readouterr().err == "vision_demo: a\\nb\\r\\x1b[31m\\u2028\\udcff\n"
