"""A fixed encoding is settings, not state: no cast, move, copy, optimiser or earlier call moves a bit of its table."""

import copy
import pickle

import pytest
import torch

import ndpos
from ndpos import AxisSplit, SinusoidalEmbedding

COORDS = ndpos.grid((5, 3), start=(65536, -7)).flatten(0, -2)
SPLIT = AxisSplit((8, 12), order=(1, 0), dim=22)


def on_meta(emb):
    with torch.device("meta"):
        built = SinusoidalEmbedding(SPLIT)
    return built.to_empty(device="cpu")


def after_inference(emb):
    with torch.inference_mode():
        emb(COORDS)
        emb.on_grid((2, 2))
    tokens = torch.zeros(15, 22, requires_grad=True)
    ndpos.add(tokens, emb.train()(COORDS)).sum().backward()
    return emb


@pytest.mark.parametrize(
    "harm",
    [
        lambda emb: emb.half(),
        lambda emb: emb.bfloat16().float(),
        lambda emb: torch.nn.Sequential(emb).to(torch.bfloat16)[0],
        lambda emb: emb.to("meta"),
        on_meta,
        after_inference,
        copy.deepcopy,
        lambda emb: pickle.loads(pickle.dumps(emb)),
        lambda emb: emb.requires_grad_(True),
    ],
)
def test_nothing_done_to_the_module_moves_a_bit_of_its_table(harm):
    emb = SinusoidalEmbedding(SPLIT)
    table = emb(COORDS)
    harmed = harm(emb)
    assert torch.equal(harmed(COORDS), table)
    assert harmed(COORDS).dtype == torch.float32
    assert not harmed(COORDS).is_inference()


def test_autocast_moves_no_bit_either():
    emb = SinusoidalEmbedding(SPLIT)
    table = emb(COORDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(emb(COORDS), table)
        assert torch.equal(emb.on_grid((5, 3), start=(65536, -7)), table)


def test_a_fixed_table_is_no_state_and_no_optimiser_can_train_it():
    emb = SinusoidalEmbedding(SPLIT)
    model = torch.nn.Sequential(emb, torch.nn.Linear(22, 2)).requires_grad_(True)
    assert set(model.state_dict()) == {"1.weight", "1.bias"}
    assert not list(emb.buffers())
    assert not list(emb.parameters())
    before = emb(COORDS)
    assert not before.requires_grad
    optimiser = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    model(COORDS).sum().backward()
    optimiser.step()
    assert torch.equal(emb(COORDS), before)
    assert not emb.load_state_dict({}, strict=True).missing_keys


def test_no_call_leaves_anything_behind_for_the_next():
    emb, other = SinusoidalEmbedding(SPLIT), SinusoidalEmbedding(SPLIT, base=100.0)
    first = emb.on_grid((4, 6)).clone()
    emb.on_grid((4, 6)).zero_()  # nor is a table handed out by reference
    emb.on_grid((6, 4)), emb.on_grid((4, 6), dtype=torch.bfloat16), other.on_grid((4, 6))
    cells = ndpos.grid((4, 6)).flatten(0, -2)
    emb(cells + 1), emb(cells).zero_()
    assert torch.equal(emb(cells), first)
    assert torch.equal(emb.on_grid((4, 6)), first)
    assert not torch.equal(other.on_grid((4, 6)), first)
