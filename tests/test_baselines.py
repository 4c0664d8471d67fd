"""Integer and binary positions, kept to be compared with sines: unbounded the one, in jumps the other."""

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st

import ndpos
from ndpos import AxisSplit, BinaryEmbedding, IntegerEmbedding

some_channels = st.lists(st.integers(0, 4).map(lambda pairs: 2 * pairs), min_size=1, max_size=3).filter(any)


@given(some_channels, st.randoms())
def test_integer_and_binary_codes_stand_on_the_channels_of_their_axis(channels, random):
    order = list(range(len(channels)))
    random.shuffle(order)
    split = AxisSplit(channels, order=order, dim=sum(channels) + 1)
    coords = [[random.randrange(2**count if count else 9) for count in channels] for _ in range(5)]
    whole, bits = [], []
    for coord in coords:
        whole.append([float(coord[axis]) for axis in order for _ in range(channels[axis])] + [0.0])
        bits.append([bit for axis in order for bit in references.bits(coord[axis], channels[axis])] + [0.0])
    assert IntegerEmbedding(split)(torch.tensor(coords)).tolist() == whole
    assert BinaryEmbedding(split)(torch.tensor(coords)).tolist() == bits
    assert BinaryEmbedding(split)(torch.tensor(coords).double()).tolist() == bits


def test_dot_products_of_integer_positions_grow_with_where_they_stand():
    emb = IntegerEmbedding(ndpos.split(8, 1))
    near, far = (emb(ndpos.grid((2,), start=start)).prod(0).sum().item() for start in (5, 80))
    assert (near, far) == (8 * 5 * 6, 8 * 80 * 81)  # neighbours both times, and two orders of magnitude apart
    sines = ndpos.SinusoidalEmbedding(ndpos.split(8, 1))
    near, far = (sines(ndpos.grid((2,), start=start)).prod(0).sum().item() for start in (5, 80))
    assert near == pytest.approx(far, abs=1e-5)


def test_binary_positions_are_bounded_unique_and_jump_where_a_bit_carries():
    table = BinaryEmbedding(AxisSplit((4,)))(ndpos.grid((16,)))
    assert table[[6, 7, 8]].tolist() == [[0, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    assert set(table.unique().tolist()) == {0.0, 1.0}
    assert len(torch.unique(table, dim=0)) == 16
    assert table.diff(dim=0).abs().sum(1).tolist() == [1, 2, 1, 3, 1, 2, 1, 4, 1, 2, 1, 3, 1, 2, 1]


@pytest.mark.parametrize("bits", [26, 32, 54, 62, 64])
def test_the_largest_number_of_many_bits_is_all_ones_and_the_next_is_refused(bits):
    emb = BinaryEmbedding(AxisSplit((bits,)))
    largest = 2 ** min(bits, 63) - 1
    assert emb(torch.tensor([[largest]])).sum().item() == min(bits, 63)
    if bits < 63:
        with pytest.raises(ValueError, match=f"below 2\\*\\*{bits}"):
            emb(torch.tensor([[largest + 1]]))


@pytest.mark.parametrize("outside", [-1, 16, 2.5, -0.5, float("nan"), float("inf")])
def test_a_coordinate_without_that_many_bits_is_refused_with_axis_value_and_shape(outside):
    coords = torch.tensor([[0, 3], [1, outside]])
    with pytest.raises(ValueError) as raised:
        BinaryEmbedding(AxisSplit((4, 4)))(coords)
    assert str(raised.value) == (
        f"ndpos.BinaryEmbedding: axis 1 has 4 bits, for whole numbers at least 0 and below 2**4. Seen: {outside}. "
        f"Shape (2,)."
    )


def test_an_axis_without_bits_may_hold_anything():
    coords = torch.tensor([[3.0, -0.5], [1.0, 99.0]])
    assert BinaryEmbedding(AxisSplit((2, 0)))(coords).tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("kind", [IntegerEmbedding, BinaryEmbedding])
def test_a_baseline_has_no_state_and_gives_the_dtype_that_is_asked_for(kind):
    emb = kind(ndpos.split(8, 2))
    assert not emb.state_dict()
    assert not list(emb.buffers())
    assert not list(emb.parameters())
    coords = ndpos.grid((2, 3)).flatten(0, -2)
    assert emb(coords).dtype == torch.float32  # integers in, floats out
    assert emb(coords, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(emb.bfloat16()(coords), emb(coords))
    assert emb(coords.to("meta")).device.type == "meta"
    assert emb(coords[:0]).shape == (0, 8)
    assert repr(emb) == f"{kind.__name__}(AxisSplit((4, 4)))"


@pytest.mark.parametrize("kind", [IntegerEmbedding, BinaryEmbedding])
def test_a_batch_is_its_samples_one_by_one_and_vmapped(kind, rng):
    emb = kind(ndpos.split(8, 2))
    coords = torch.randint(0, 16, (3, 5, 2), generator=rng)
    assert torch.equal(emb(coords), torch.stack([emb(sample) for sample in coords]))
    assert torch.equal(emb(coords), torch.vmap(emb)(coords))
    if kind is BinaryEmbedding:
        with pytest.raises(ValueError, match="whole numbers"):
            torch.vmap(emb)(coords + 16)


@pytest.mark.parametrize("kind", [IntegerEmbedding, BinaryEmbedding])
def test_coordinates_of_other_axes_are_refused_with_the_shape_and_its_meaning(kind):
    with pytest.raises(ValueError) as raised:
        kind(ndpos.split(8, 2))(ndpos.grid((4,)))
    assert str(raised.value) == (
        f"ndpos.{kind.__name__}: the encoding has 2 axes, the coordinates have 1: (4, 1), last dimension = axes. One "
        f"axis per token is coords[..., None]."
    )
    with pytest.raises(ValueError, match=r"coordinates are \(\*batch, tokens, axes\), got \(2,\)\.$"):
        kind(ndpos.split(8, 2))(torch.zeros(2))
    with pytest.raises(TypeError, match=r"coordinates are real numbers, got torch\.bool\.$"):
        kind(ndpos.split(8, 2))(torch.zeros(2, 2, dtype=torch.bool))
