"""The rotation that a wrapped ViT keeps between forwards: made once, and never used where another is asked for."""

import copy
import pickle

import pytest
import torch

import ndpos

pytest.importorskip("timm", reason="needs timm")

import ndpos.timm
from tests.test_timm import SPLIT, images, vit


def model_of_any_size(**settings):
    return ndpos.timm.add_rope(vit(dynamic_img_size=True), **settings)


@pytest.fixture
def made(monkeypatch):
    """The grids that rotations are made for, in order."""
    seen, on_grid = [], ndpos.RotaryEmbedding.on_grid

    def watched(self, sizes, **settings):
        seen.append(tuple(sizes))
        return on_grid(self, sizes, **settings)

    monkeypatch.setattr(ndpos.RotaryEmbedding, "on_grid", watched)
    return seen


def test_a_rotation_is_made_once_for_forwards_that_are_alike(made):
    model = model_of_any_size()
    untouched = len(pickle.dumps(model))
    with torch.inference_mode():
        first = model(images(2, 3))
        assert torch.equal(model(images(2, 3)), first)
    assert made == [(2, 3)]
    model.train()(images(2, 3)).sum().backward()  # by a rotation that was made in inference
    assert made == [(2, 3)]
    model.zero_grad(set_to_none=True)
    assert len(pickle.dumps(model)) <= untouched + 64  # no tables; flags of training
    copy.deepcopy(model)(images(2, 3))  # makes its own
    assert made == [(2, 3)] * 2


CHANGES = {
    "size": lambda model: images(3, 2),
    "dtype": lambda model: model.double() and images(2, 3).double(),
    "strength": lambda model: setattr(model, "strength", 0.5),
    "reference sizes": lambda model: setattr(model, "reference_sizes", (3, 5)),
    "embedding": lambda model: setattr(model, "rope", ndpos.RotaryEmbedding(SPLIT, base=7.0)),
    "matrix": lambda model: setattr(model.rope, "matrix", ndpos.RotaryEmbedding(SPLIT, base=7.0).matrix),
    "pairing": lambda model: setattr(model.rope, "pairing", "interleaved"),
    "hook": lambda model: model.rope.register_forward_hook(lambda rope, args, turn: turn.inverse()),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_was_kept_is_not_used_where_something_has_changed(change):
    model, fresh = model_of_any_size(), model_of_any_size()
    before = model(images(2, 3))
    for each in (model, fresh):
        given = CHANGES[change](each)
    given = given if isinstance(given, torch.Tensor) else images(2, 3)
    after = model(given)
    assert torch.equal(after, fresh(given))
    assert not torch.equal(after.to(before.dtype), before)


def test_learned_frequencies_are_asked_every_time(made):
    model = model_of_any_size(learnable=True)
    before = model(images(2, 3))
    with torch.no_grad():
        model.rope.frequencies.mul_(2)
    assert not torch.equal(model(images(2, 3)), before)
    assert made == [(2, 3)] * 2


def test_a_graph_makes_its_own(made):
    model = model_of_any_size()
    expected = model(images(2, 3))
    exported = torch.export.export(model, (images(2, 3),)).module()
    torch.testing.assert_close(exported(images(2, 3)), expected)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(images(2, 3)), expected)
    assert len(made) >= 3
