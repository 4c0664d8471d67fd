"""What every parity test here asks: do coordinates, one frequency matrix and a pairing turn queries as the peer does?

The oracle is always the peer's own code, run live on random queries and keys; no formula of a peer is typed again.
Peers form angles in float32, so agreement is asked to 1e-6 times the largest angle (or 1e-6 where that is below one).
"""

import pytest
import torch

import ndpos


@pytest.fixture(params=[(6, 6), (4, 10), (7, 5)], ids=["square", "wide", "odd"])
def sizes(request):
    """Grids (height, width) in patches: a square hides swapped axes, so two are not."""
    return request.param


@pytest.fixture
def agree():
    """Assert that ndpos turns queries and keys as the peer does, prefix and suffix tokens included.

    `theirs` is the peer: `(q, k) -> (q, k)`, each `(1, heads, tokens, head_dim)`. `ladder` is the frequency of every
    pair in channel order, as the peer stores it; each column of the matrix has one non-zero row, so columns sum to it.
    """

    def check(split, frequencies, coords, *, pairing, theirs, ladder, num_prefix=0, num_suffix=0):
        torch.testing.assert_close(frequencies.sum(0), ladder.double(), rtol=1e-6, atol=0.0)

        angles = ndpos.angles(coords, frequencies)
        tolerance = 1e-6 * max(1.0, angles.abs().max().item())
        tokens = num_prefix + len(coords) + num_suffix
        q, k = 2 * torch.rand(2, 1, 2, tokens, split.dim, generator=torch.Generator().manual_seed(0)) - 1
        their_q, their_k = theirs(q, k)

        rope = ndpos.RotaryEmbedding(split, pairing=pairing, frequencies=frequencies)
        turn = rope(coords, num_prefix=num_prefix, num_suffix=num_suffix)
        torch.testing.assert_close(turn(q), their_q, rtol=0.0, atol=tolerance)
        torch.testing.assert_close(turn.keys(k), their_k, rtol=0.0, atol=tolerance)

        standing = torch.arange(num_prefix, tokens - num_suffix)

        def rotated(coords, pairing):
            angles = ndpos.angles(coords, frequencies)
            blocks = split.blocks if pairing == "half_per_axis" else None
            return ndpos.rotate(q[..., standing, :], angles, pairing=pairing, blocks=blocks)

        torch.testing.assert_close(rotated(coords, pairing), their_q[..., standing, :], rtol=0.0, atol=tolerance)

        outside = [*range(num_prefix), *range(tokens - num_suffix, tokens)]
        for ours, before in ((turn(q), q), (turn.keys(k), k)):
            assert torch.equal(ours[..., outside, :], before[..., outside, :])

        # The twin: the same numbers under another pairing, or with the axes in another order, are not the peer's.
        other = "interleaved" if pairing != "interleaved" else "half"
        assert (rotated(coords, other) - their_q[..., standing, :]).abs().max() > 0.1
        if split.axes > 1:
            assert (rotated(coords.flip(-1), pairing) - their_q[..., standing, :]).abs().max() > 0.1

    return check


@pytest.fixture
def model():
    """A transformers model's configuration and modelling files by name, or a skip where there is no such model."""

    def files(name):
        parts = [f"transformers.models.{name}.{kind}_{name}" for kind in ("configuration", "modeling")]
        return [pytest.importorskip(part, reason=f"{part} is not installed") for part in parts]

    return files
