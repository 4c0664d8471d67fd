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


# A table moved to another grid: one matrix per axis, entry by entry.


def keys_cubic(s, a):
    """Weight at distance s in cubic convolution: Keys 1981, doi:10.1109/TASSP.1981.1163711, eq. 4, 15 for a = -1/2."""
    s = abs(s)
    if s <= 1:
        return (a + 2) * s**3 - (a + 3) * s**2 + 1
    if s < 2:
        return a * s**3 - 5 * a * s**2 + 8 * a * s - 4 * a
    return 0.0


def triangle(s):
    return max(0.0, 1 - abs(s))


def resample_matrix(old, new, kernel, antialias, align, shift=0.0):
    """Rows of weights (new, old) of one axis, by the rules of torch.nn.functional.interpolate (ATen UpSample.h).

    nearest: the last column that starts no later than the new one; nearest-exact: the column that holds its middle.
    Without antialias the taps around the centre are clamped to the border; with it (ATen UpSampleKernel.cpp, after
    Pillow) the kernel is as wide as the spacing of the new rows, taps outside are left out, and rows sum to one.
    Corner alignment with antialias is not ATen's: the centres are where corners meet, i * (old - 1) / (new - 1).
    ``shift``: places as if ``new + shift`` rows were wanted, which is what a scale factor of that does.
    """
    matrix = [[0.0] * old for _ in range(new)]
    a = -0.75 if kernel == "cubic" and not antialias else -0.5
    for i in range(new):
        if kernel in ("nearest", "nearest-exact"):
            at, steps = (i, new) if kernel == "nearest" else (2 * i + 1, 2 * new)
            matrix[i][max(j for j in range(old) if j * steps <= at * old)] = 1.0
            continue
        if align == "centre":
            spacing = old / (new + shift)
            centre = spacing * (i + 0.5) - 0.5
        else:
            spacing = (old - 1) / (new - 1) if new > 1 else 0.0
            centre = spacing * i
        width = max(spacing, 1.0) if antialias else 1.0
        reach = (1 if kernel == "linear" else 2) * width
        for tap in range(math.floor(centre - reach), math.ceil(centre + reach) + 1):
            s = (tap - centre) / width
            weight = triangle(s) if kernel == "linear" else keys_cubic(s, a)
            if not antialias:
                matrix[i][min(max(tap, 0), old - 1)] += weight
            elif 0 <= tap < old:
                matrix[i][tap] += weight
        if antialias:
            total = sum(matrix[i])
            matrix[i] = [weight / total for weight in matrix[i]]
    return matrix


def rows_taken(old, rows):
    """The matrix that copies the rows of an axis with these numbers; None copies nothing."""
    return [[1.0 if column == row else 0.0 for column in range(old)] for row in rows]


def convention_matrices(like, old, new):
    """For each axis the matrices that a library applies in turn, as its source says.

    timm ``resample_abs_pos_embed``; transformers ``interpolate_pos_encoding`` of ViT, CLIP, DINOv2 (registers),
    ``vision_utils.get_vision_interpolation_indices_and_weights`` (Qwen3-VL, GLM-4V, Kimi),
    ``get_vision_nearest_position_ids`` (MiniCPM-V), ``Siglip2VisionEmbeddings``, ``TimesformerEmbeddings``; DINOv2's
    ``interpolate_pos_encoding`` with ``interpolate_offset`` 0.1; torchvision ``interpolate_embeddings``; torchtune
    ``TilePositionalEmbedding``; big_vision ``vit.resample_posemb`` and ``flexi.vit``; V-JEPA
    ``VisionTransformer.interpolate_pos_encoding``; timm ``NaFlexEmbeds``; AST ``ASTModel.__init__``; PaSST ``forward``.
    """
    cubic = {  # antialias, align, shift
        "timm": (True, "centre", 0.0),
        "naflex": (True, "centre", 0.0),
        "transformers-vit": (False, "centre", 0.0),
        "transformers-clip": (False, "centre", 0.0),
        "transformers-dinov2": (False, "centre", 0.0),
        "transformers-dinov2-registers": (True, "centre", 0.0),
        "dinov2": (False, "centre", 0.1),
        "dinov2-registers": (True, "centre", 0.0),
        "torchvision": (False, "corner", 0.0),
        "glm-4v": (False, "centre", 0.0),
        "kimi-vl": (False, "centre", 0.0),
    }
    linear = {
        "torchtune": (False, "corner"),
        "big_vision": (False, "corner"),
        "qwen3-vl": (False, "corner"),
        "flexivit": (True, "centre"),
        "siglip2": (True, "centre"),
        "naflex-factorised": (False, "centre"),
        "v-jepa": (False, "centre"),
    }
    pairs = list(zip(old, new, strict=True))
    stay = like != "dinov2" or tuple(old) == tuple(new)  # its offset moves an axis whose size stays, if another changes
    same = [[rows_taken(o, range(o))] if stay and o == n else None for o, n in pairs]
    if like in cubic:
        moved = [[resample_matrix(o, n, "cubic", *cubic[like])] for o, n in pairs]
    elif like == "v-jepa" and new[0] < old[0] and old[1:] == new[1:]:
        moved = [[rows_taken(old[0], range(new[0]))], *same[1:]]
    elif like in linear:
        moved = [[resample_matrix(o, n, "linear", *linear[like])] for o, n in pairs]
    elif like in ("minicpm-v", "timesformer"):
        moved = [[rows_taken(o, [i * o // n for i in range(n)])] for o, n in pairs]
    elif like == "naflex-aspect":
        if tuple(old) == tuple(new):
            return same
        longest = max(new)
        return [[resample_matrix(o, longest, "cubic", True, "centre"), rows_taken(longest, range(n))] for o, n in pairs]
    elif like == "ast":
        moved = [
            [rows_taken(o, range(o // 2 - n // 2, o // 2 - n // 2 + n))]
            if n <= o
            else [resample_matrix(o, n, "linear", False, "centre")]
            for o, n in pairs
        ]
    else:
        assert like == "passt"
        moved = [[rows_taken(o, range(n))] for o, n in pairs]
    return [found or way for found, way in zip(same, moved, strict=True)]


# Pairs turned, attention, and rows looked up.


def pair_places(pairing, pairs, blocks=None):
    """The two channels of every pair, counted out.

    "interleaved": Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 34. "half": ``rotate_half`` of GPT-NeoX,
    arXiv:2204.06745. "half_per_axis": the same inside each axis block, ``RoPE2D`` of CroCo v2, arXiv:2211.10408.
    """
    places = []
    if pairing == "interleaved":
        for pair in range(pairs):
            places.append((2 * pair, 2 * pair + 1))
        return places
    first = 0
    for count in blocks if pairing == "half_per_axis" else [pairs]:
        for pair in range(count):
            places.append((first + pair, first + count + pair))
        first += 2 * count
    return places


def rotation(x, angles, pairing, blocks=None):
    """a' = a cos - b sin, b' = a sin + b cos for every pair of every token; other channels copied.

    Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 34. ``x`` (tokens, channels), ``angles`` (tokens, pairs), as lists.
    """
    turned = []
    for row, turns in zip(x, angles, strict=True):
        out = list(row)
        for (one, two), turn in zip(pair_places(pairing, len(turns), blocks), turns, strict=True):
            out[one] = row[one] * math.cos(turn) - row[two] * math.sin(turn)
            out[two] = row[one] * math.sin(turn) + row[two] * math.cos(turn)
        turned.append(out)
    return turned


def rotation_gradients(x, angles, above, pairing, blocks=None):
    """Gradients of ``sum(above * rotation(x, angles))`` in x and in the angles: derivatives of RoFormer's eq. 34.

    In x: ``above`` turned back, a rotation's transpose being its inverse. In an angle: the derivatives of a' and b'
    by it are -b' and a'.
    """
    in_x = rotation(above, [[-turn for turn in turns] for turns in angles], pairing, blocks)
    turned = rotation(x, angles, pairing, blocks)
    in_angles = []
    for gradient, row, turns in zip(above, turned, angles, strict=True):
        places = pair_places(pairing, len(turns), blocks)
        in_angles.append([gradient[two] * row[one] - gradient[one] * row[two] for one, two in places])
    return in_x, in_angles


def dot(one, two):
    total = 0.0
    for a, b in zip(one, two, strict=True):
        total += a * b
    return total


def attention(q, k, v, causal=False):
    """softmax(q k^T / sqrt(d)) v: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; causal: section 3.2.3."""
    out = []
    for place, query in enumerate(q):
        seen = place + 1 if causal else len(k)
        scores = [dot(query, key) / math.sqrt(len(query)) for key in k[:seen]]
        weights = [math.exp(score - max(scores)) for score in scores]
        out.append(
            [
                sum(weight * value[channel] for weight, value in zip(weights, v[:seen], strict=True)) / sum(weights)
                for channel in range(len(v[0]))
            ]
        )
    return out


def rows_between(table, sizes, coord, wrap=False):
    """Multilinear interpolation between the corners around ``coord``, written out corner by corner.

    ``table`` (prod(sizes), channels) in row-major order, as lists. "Bilinear": Press et al., Numerical Recipes, eq.
    3.6.5, for any number of axes; for ``wrap`` the grid is a torus, else the last row stands for what lies past it.
    """
    total = [0.0] * len(table[0])
    for corner in range(2 ** len(sizes)):
        weight, row = 1.0, 0
        for axis, (at, size) in enumerate(zip(coord, sizes, strict=True)):
            low = math.floor(at)
            above = corner >> axis & 1
            weight *= at - low if above else 1 - (at - low)
            place = (low + above) % size if wrap else min(low + above, size - 1)
            row = row * size + place
        for channel, value in enumerate(table[row]):
            total[channel] += weight * value
    return total


def bits(number, count):
    """The ``count`` lowest binary digits, lowest first, by repeated halving."""
    digits = []
    for _ in range(count):
        digits.append(float(number % 2))
        number //= 2
    return digits
