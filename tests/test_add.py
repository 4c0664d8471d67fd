"""Tokens plus a table: their dtype, rounded once, and nothing broadcast that was not meant to be."""

import math

import pytest
import torch

import ndpos
from ndpos import SinusoidalEmbedding


def test_tokens_are_scaled_by_the_root_of_their_width_when_asked(rng):
    x, table = torch.randn(2, 6, 8, generator=rng), SinusoidalEmbedding(ndpos.split(8, 2)).on_grid((2, 3))
    assert torch.equal(ndpos.add(x, table), x + table)
    assert torch.equal(ndpos.add(x, table.expand(2, 6, 8)), x + table)
    torch.testing.assert_close(ndpos.add(x, table, scale="sqrt_dim"), x * 8**0.5 + table, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", ["none", "sqrt_dim"])
def test_a_sum_has_the_dtype_of_its_tokens_and_is_rounded_once(dtype, scale, rng):
    x = torch.randn(300, 8, generator=rng).to(dtype)
    table = SinusoidalEmbedding(ndpos.split(8, 1)).on_grid((300,))
    exact = x.double() * (8**0.5 if scale == "sqrt_dim" else 1) + table.double()
    total = ndpos.add(x, table, scale=scale)
    assert total.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(total, exact, rtol=0, atol=1e-12)
    else:
        wide = x.float() * (math.sqrt(8) if scale == "sqrt_dim" else 1) + table
        assert torch.equal(total, wide.to(dtype))


def test_channels_first_features_are_refused_and_channels_last_are_read_as_they_stand():
    table = SinusoidalEmbedding(ndpos.split(8, 2)).on_grid((2, 3))
    first, last = torch.zeros(5, 8, 2, 3), torch.zeros(5, 2, 3, 8)
    tokens = ndpos.add(first.flatten(2).mT, table)  # the cure that the message names
    assert torch.equal(ndpos.add(last, table.reshape(2, 3, 8)).flatten(1, 2), tokens)
    with pytest.raises(ValueError, match=r"(?s)x +\(5, 8, 2, 3\).*Channels first\? x\.flatten\(2\)\.mT\."):
        ndpos.add(first, table)
    with pytest.raises(ValueError, match=r"x +\(5, 2, 3, 8\)"):  # images and a table of tokens
        ndpos.add(last, table)


def test_a_table_of_other_channels_is_refused_and_never_cut_to_fit():
    for dim in (4, 8, 12):
        with pytest.raises(ValueError, match=rf"(?s)x +\(1, 12, 10\).*table +\(12, {dim}\)"):
            ndpos.add(torch.zeros(1, 12, 10), SinusoidalEmbedding(ndpos.split(dim, 2)).on_grid((6, 2)))


def test_dropout_falls_on_the_sum_of_token_and_position_in_training_alone(rng):
    x, table = torch.rand(400, 8, generator=rng) + 1, SinusoidalEmbedding(ndpos.split(8, 1)).on_grid((400,))
    total = x + table
    assert torch.equal(ndpos.add(x, table, dropout=0.5), total)
    torch.manual_seed(0)
    dropped = ndpos.add(x, table, dropout=0.25, training=True)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], (total / 0.75)[kept])  # token and position leave together
    assert 0.22 < 1 - kept.float().mean() < 0.28
    torch.manual_seed(0)
    assert torch.equal(dropped, ndpos.add(x, table, dropout=0.25, training=True))


def test_adding_mixes_content_with_position_where_concatenating_keeps_them_apart(rng):
    x = torch.randn(2, 8, generator=rng, dtype=torch.float64)
    table = SinusoidalEmbedding(ndpos.split(8, 1)).on_grid((2,), dtype=torch.float64)
    one, two = ndpos.add(x, table)
    content, position, crossed = x[0] @ x[1], table[0] @ table[1], x[0] @ table[1] + table[0] @ x[1]
    torch.testing.assert_close(one @ two, content + position + crossed)
    one, two = torch.cat((x, table), dim=-1)  # twice the width for no cross terms
    torch.testing.assert_close(one @ two, content + position)
    wide = torch.randn(3, 16, generator=rng, dtype=torch.float64)  # a layer over both adds what it makes of each
    torch.testing.assert_close(torch.cat((x, table), -1) @ wide.mT, x @ wide[:, :8].mT + table @ wide[:, 8:].mT)


X, TABLE = torch.zeros(2, 6, 8), torch.zeros(6, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ndpos.add(X.long(), TABLE), TypeError, "ndpos.add: x is a floating tensor, got torch.int64."),
        (lambda: ndpos.add(X, 1.0), TypeError, "ndpos.add: table is a floating tensor, got float."),
        (lambda: ndpos.add(X, TABLE, scale="sqrt"), ValueError, "scale is 'none' or 'sqrt_dim', got 'sqrt'."),
        (lambda: ndpos.add(X, TABLE, dropout=1.5), ValueError, "dropout is a share between 0 and 1, got 1.5."),
        (
            lambda: ndpos.add(X, TABLE[:5]),
            ValueError,
            "x      (2, 6, 8)  (..., tokens, dim)\n  table  (5, 8)  (..., tokens",
        ),
        (
            lambda: ndpos.add(X, TABLE[:1]),
            ValueError,
            "Class or register tokens? Add to x[..., num_prefix:, :], or give a L",
        ),
        (lambda: ndpos.add(X, TABLE[:, :5]), ValueError, "table  (6, 5)"),
        (
            lambda: ndpos.add(X, TABLE[:, :1]),
            ValueError,
            "the table has a row for every token and as many channels as x.\n",
        ),
        (lambda: ndpos.add(X, TABLE.expand(3, 6, 8)), ValueError, "table  (3, 6, 8)"),
        (lambda: ndpos.add(X[0], TABLE[None]), ValueError, "table  (1, 6, 8)"),
        (lambda: ndpos.add(torch.zeros(2, 8, 2, 3), TABLE), ValueError, "Channels first? x.flatten(2).mT."),
        (lambda: ndpos.add(torch.zeros(2, 2, 3, 8), TABLE), ValueError, "x      (2, 2, 3, 8)  (..., tokens, dim)"),
    ],
)
def test_an_error_names_the_rule_and_what_was_seen(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)
