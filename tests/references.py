"""Slow references: loops over plain Python numbers, each citing its equation; nothing of ndpos is called."""

import math
from decimal import Decimal, localcontext

# Coordinates, frequencies, angles and sinusoids.

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")


def cells(sizes, start=0, step=1):
    """Coordinates of a grid as an odometer counts them, the last axis fastest.

    "Patches in the raster order": Dosovitskiy et al. 2020, arXiv:2010.11929, appendix D.4.
    """
    rows, counter = [], [0] * len(sizes)
    if 0 in sizes:
        return rows
    while True:
        rows.append([start + step * count for count in counter])
        axis = len(sizes) - 1
        while axis >= 0 and counter[axis] == sizes[axis] - 1:
            counter[axis] = 0
            axis -= 1
        if axis < 0:
            return rows
        counter[axis] += 1


def windows(size, patch, stride, padding, remainder):
    """Patches along one axis, laid down one after the other; None where the rule is broken.

    Sliding window of ``torch.nn.Conv2d`` ("drop"); with ``remainder="pad"`` until every pixel is covered.
    """
    length, count, end = size + 2 * padding, 0, patch
    while end <= length:
        count, end = count + 1, end + stride
    uncovered = length - (end - stride) if count else length
    if remainder == "pad":
        return max(count + (uncovered > 0), 1)
    return None if count == 0 or (remainder == "raise" and uncovered) else count


def ladder(pairs, base, closed=False):
    """``base ** (-2i / d)`` for a width of d = 2 * pairs: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    Closed, the last is ``1 / base``: ``sinusoids`` of Whisper, arXiv:2212.04356.
    """
    speeds = []
    for pair in range(pairs):
        exponent = 2 * pair / (2 * pairs) if not closed else (pair / (pairs - 1) if pairs > 1 else 0.0)
        speeds.append(1.0 / base**exponent)
    return speeds


def angles(coords, frequencies):
    """The sum over the axes of coordinate times frequency, row by row and pair by pair.

    Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 15; several axes: Heo et al. 2024, arXiv:2403.13298, section 3.
    """
    table = []
    for coord in coords:
        row = []
        for pair in range(len(frequencies[0])):
            total = 0.0
            for axis, position in enumerate(coord):
                total += position * frequencies[axis][pair]
            row.append(total)
        table.append(row)
    return table


def sinusoid(position, dim, base=1e4):
    """P[p, 2i] = sin(p / base^(2i/d)), P[p, 2i+1] = cos(same): Vaswani et al. 2017, arXiv:1706.03762, section 3.5."""
    row = []
    for channel in range(dim):
        angle = position / base ** (2 * (channel // 2) / dim)
        row.append(math.sin(angle) if channel % 2 == 0 else math.cos(angle))
    return row


def sinusoids(coords, channels, base=1e4, order=None, layout="interleaved", dim=None):
    """One :func:`sinusoid` per axis on channels of its own, block after block; the rest is zero.

    "axis_sin_cos": sines before cosines inside each block, as in ``build_2d_sinusoidal_position_embedding`` of MAE
    (He et al. 2021, arXiv:2111.06377); "sin_cos": all sines before all cosines, ``build_sincos2d_pos_embed`` of timm.
    """
    table = []
    for coord in coords:
        blocks = [sinusoid(coord[axis], channels[axis], base) for axis in order or range(len(channels))]
        if layout == "axis_sin_cos":
            blocks = [block[0::2] + block[1::2] for block in blocks]
        row = [value for block in blocks for value in block]
        if layout == "sin_cos":
            row = row[0::2] + row[1::2]
        table.append(row + [0.0] * ((dim or len(row)) - len(row)))
    return table


def exact_turn(position, exponent, base=10000):
    """cos and sin of ``position * base ** -exponent`` with 60 digits, reduced modulo 2 pi before they are rounded."""
    with localcontext() as context:
        context.prec = 60
        angle = Decimal(position) * Decimal(base) ** -(Decimal(exponent.numerator) / Decimal(exponent.denominator))
        angle = float(angle % (2 * PI))
    return math.cos(angle), math.sin(angle)
