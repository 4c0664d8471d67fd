"""What torch does to functions and modules: compile, export, vmap, grad, copies, checkpointing, threads, averages."""

import copy
import dataclasses
import io
import pickle
import threading
import warnings

import pytest
import torch
import torch.utils._pytree as pytree
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, export
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import ndpos
from ndpos.kernels import PAIRINGS

SPLIT = ndpos.AxisSplit((4, 6))
SIZES = (3, 4)
FIVE_SIZES = [(14, 14), (16, 12), (10, 20), (6, 8), (4, 4)]
learned_or_not = pytest.mark.parametrize("learnable", [False, True], ids=["fixed", "learnable"])


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def seeded(number=0):
    return torch.Generator().manual_seed(number)


def ropes():
    mixed = ndpos.mixed(2, 5, heads=3, generator=seeded())
    layers = ndpos.mixed(2, 5, heads=3, layers=2, generator=seeded())
    turns = ndpos.interleave_axes(ndpos.geometric(SPLIT))
    return {
        **{pairing: ndpos.RotaryEmbedding(SPLIT, pairing=pairing) for pairing in PAIRINGS},
        "partial": ndpos.RotaryEmbedding(ndpos.AxisSplit((4, 4), dim=10)),
        "axes in turns": ndpos.RotaryEmbedding(SPLIT, frequencies=turns),
        "learnable": ndpos.RotaryEmbedding(SPLIT, learnable=True),
        "mixed and learnable": ndpos.RotaryEmbedding(SPLIT, frequencies=mixed, learnable=True),
        "layers": ndpos.RotaryEmbedding(SPLIT, frequencies=layers),
    }


def attend(rope, q, height, width):
    turn = rope.on_grid((height, width), num_prefix=1)
    turn = turn.layer(1) if turn.num_layers else turn
    return turn(q), turn.keys(q)


@pytest.mark.parametrize("name", ropes())
def test_five_sizes_take_two_graphs_at_most_and_no_break(name):
    rope, counter = ropes()[name], CompileCounter()
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    for height, width in FIVE_SIZES:
        q = torch.randn(2, 3, 1 + height * width, 10, generator=seeded())
        for got, expected in zip(compiled(rope, q, height, width), attend(rope, q, height, width), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert counter.frame_count <= 2


def test_a_strength_per_axis_may_be_symbolic():
    rope, counter = ropes()["half"], CompileCounter()
    compiled = torch.compile(
        lambda by: rope.on_grid((3, 4), strength=(by, 2.0)).cos * 1, backend=counter, fullgraph=True, dynamic=True
    )
    for by in (0.5, 0.7, 0.9):
        torch.testing.assert_close(compiled(by), rope.on_grid((3, 4), strength=(by, 2.0)).cos)
    assert counter.frame_count <= 2


def test_a_rotation_made_outside_enters_one_graph_for_all_sizes():
    rope, counter = ropes()["half_per_axis"], CompileCounter()
    compiled = torch.compile(
        lambda turn, q: turn(q) + turn[2:](q[:, 2:]).sum(), backend=counter, fullgraph=True, dynamic=True
    )
    for height, width in FIVE_SIZES:
        turn, q = rope.on_grid((height, width)), torch.randn(2, height * width, 10, generator=seeded())
        torch.testing.assert_close(compiled(turn, q), turn(q) + turn[2:](q[:, 2:]).sum())
    assert counter.frame_count <= 2


@pytest.mark.parametrize("kind", ["joint", "axial", "sum"])
def test_a_learned_table_takes_two_graphs_at_most(kind):
    emb, counter = ndpos.LearnedEmbedding((14, 12), 10, kind=kind, num_prefix=1), CompileCounter()  # an axis may stay
    compiled = torch.compile(lambda height, width: emb((height, width)), backend=counter, fullgraph=True, dynamic=True)
    for sizes in FIVE_SIZES:
        torch.testing.assert_close(compiled(*sizes), emb(sizes))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("kind", ["joint", "axial", "sum"])
@pytest.mark.parametrize("kernel", ["exact", "linear"])
def test_a_compiled_lookup_finds_the_same_rows_and_still_refuses_what_lies_outside(kind, kernel):
    emb, counter = ndpos.LearnedEmbedding((3, 4), 10, kind=kind), CompileCounter()
    compiled = torch.compile(lambda coords: emb.lookup(coords, kernel=kernel), backend=counter, fullgraph=True)
    inside = ndpos.grid((3, 4)).flatten(0, -2) * (1 if kernel == "exact" else 0.75)
    assert torch.equal(compiled(inside), emb.lookup(inside, kernel=kernel))
    for outside in ((-1, 0), (3, 0), (0, 4)):
        with pytest.raises(RuntimeError, match="rows, coordinates 0 to"):
            compiled(torch.tensor([outside] * 12).to(inside.dtype))
    assert counter.frame_count == 1


def test_a_compiled_take_picks_the_same_tokens_and_still_refuses_what_lies_outside():
    turn, keep = ropes()["half"].on_grid(SIZES), torch.tensor([[5, 0], [11, 11]])
    compiled = torch.compile(lambda turn, keep: turn.take(keep).cos, backend=CompileCounter(), fullgraph=True)
    assert torch.equal(compiled(turn, keep), turn.take(keep).cos)
    for outside in (-1, 12):
        with pytest.raises(RuntimeError, match="indices are at least 0 and below the number of rotated tokens"):
            compiled(turn, keep.where(keep != 5, outside))


@pytest.mark.slow
def test_inductor_turns_as_eager_does():
    for rope in ropes().values():
        q = torch.randn(2, 3, 13, 10, generator=seeded())
        for got, expected in zip(torch.compile(attend)(rope, q, 3, 4), attend(rope, q, 3, 4), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


class Clip(torch.nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.rope = rope

    def forward(self, x):
        turn = self.rope.on_grid(x.shape[1:4])
        return turn(x.flatten(1, 3)) - turn.keys(x.flatten(1, 3))[:, :1]


class Turned(torch.nn.Module):
    def forward(self, q, turn):
        return turn(q), turn.keys(q)


def assert_clean(exported):
    """No complex number and no empty piece in a concatenation."""
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        assert not (isinstance(value, torch.Tensor) and value.dtype.is_complex), node
        if "cat" in str(node.target):
            assert all(0 not in part.meta["val"].shape for part in node.args[0]), node


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_clip_exported_at_one_size_runs_at_another(pairing):
    clip = Clip(ndpos.RotaryEmbedding(ndpos.AxisSplit((44, 42, 42)), pairing=pairing))
    x = torch.randn(1, 4, 8, 8, 128, generator=seeded())
    exported = export(clip, (x,), dynamic_shapes=({1: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC},))
    assert_clean(exported)
    for sizes in ((3, 5, 6), (4, 8, 8), (2, 9, 2)):
        x = torch.randn(1, *sizes, 128, generator=seeded())
        torch.testing.assert_close(exported.module()(x), clip(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["half_per_axis", "partial", "mixed and learnable"])
def test_a_rotation_is_an_input_of_an_exported_graph_that_survives_a_file(name):
    turn = ropes()[name].on_grid(SIZES, num_prefix=1)
    turn = pytree.tree_map(torch.Tensor.detach, turn)
    q = torch.randn(2, 3, 13, 10, generator=seeded())
    exported = export(Turned(), (q, turn))
    assert_clean(exported)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for graph in (exported, torch.export.load(file)):
        for got, expected in zip(graph.module()(q, turn), Turned()(q, turn), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)  # eager mode may round a last bit otherwise


class Table(torch.nn.Module):
    def __init__(self, sizes=None):
        super().__init__()
        self.emb, self.sizes = ndpos.LearnedEmbedding((6, 8), 10, num_prefix=1), sizes

    def forward(self, x):
        return self.emb(self.sizes or x.shape[1:3]) + x.flatten(1, 2).sum(1, keepdim=True)


def test_a_learned_table_is_resampled_in_an_exported_graph_only_where_sizes_are_open():
    x = torch.randn(1, 3, 5, 10, generator=seeded())
    fixed = export(Table((6, 8)), (x,))
    assert not any("bmm" in str(node.target) for node in fixed.graph.nodes)
    table = Table()
    opened = export(table, (x,), dynamic_shapes=({1: Dim.DYNAMIC, 2: Dim.DYNAMIC},))
    assert any("bmm" in str(node.target) for node in opened.graph.nodes)  # the twin: a resize is seen
    for sizes in ((3, 5), (6, 8), (9, 2), (14, 14)):
        x = torch.randn(1, *sizes, 10, generator=seeded())
        torch.testing.assert_close(opened.module()(x), table(x), rtol=0, atol=1e-5)


def test_a_trace_is_refused_in_words_before_it_freezes_a_size():
    emb, x = ndpos.LearnedEmbedding((3, 4), 10), torch.zeros(1, 2, 2, 2, 10)
    turn = ndpos.RotaryEmbedding(SPLIT).on_grid((2, 2))
    for traced in (
        Clip(ndpos.RotaryEmbedding(ndpos.split(10, 3))).forward,
        lambda x: turn(x[0, 0].flatten(0, 1)),
        lambda x: emb(x.shape[1:3]) * x.sum(),
        lambda x: emb.lookup(x[0, 0, 0, :, :2]),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch itself calls the trace deprecated
            warnings.simplefilter("error", torch.jit.TracerWarning)
            with pytest.raises(NotImplementedError, match=r"torch.jit.trace is not supported.*torch.export.export"):
                torch.jit.trace(traced, (x,), check_trace=False)


def with_parts(turn):
    return dataclasses.replace(turn, amplitude=torch.linspace(0.5, 2, 5), basis=torch.eye(10).flip(0))


@pytest.mark.parametrize("parts", [lambda turn: turn, with_parts], ids=["plain", "all parts"])
def test_vmap_goes_through_a_rotation_made_outside_or_inside(parts):
    rope = ndpos.RotaryEmbedding(SPLIT)
    q, coords = torch.randn(5, 3, 7, 10, generator=seeded()), torch.randint(0, 9, (5, 7, 2), generator=seeded())
    outside = parts(rope.on_grid((7, 1)))
    torch.testing.assert_close(torch.vmap(outside)(q), outside(q), rtol=1e-6, atol=1e-6)
    expected = parts(rope(coords))(q)
    mapped = torch.vmap(lambda coords, q: parts(rope(coords))(q))(coords, q)
    torch.testing.assert_close(mapped, expected, rtol=1e-6, atol=1e-6)
    turns = torch.vmap(rope)(coords)  # a batch of rotations out, and in again
    assert turns.cos.shape == (5, 1, 7, 5)
    torch.testing.assert_close(torch.vmap(lambda turn, q: parts(turn)(q))(turns, q), mapped, rtol=0, atol=0)
    keep = torch.stack([torch.randperm(7, generator=seeded(each))[:3] for each in range(5)])
    taken = torch.vmap(lambda keep: rope.on_grid((7, 1)).take(keep))(keep)
    assert torch.equal(taken.cos, rope.on_grid((7, 1)).take(keep).cos)
    with pytest.raises(ValueError, match="indices are at least 0"):
        torch.vmap(lambda keep: rope.on_grid((7, 1)).take(keep))(keep - 1)


def test_vmap_goes_through_a_lookup():
    emb, coords = ndpos.LearnedEmbedding((3, 4), 10), ndpos.grid((3, 4))
    assert torch.equal(torch.vmap(emb.lookup)(coords), emb.lookup(coords))
    linear = torch.vmap(lambda coords: emb.lookup(coords, kernel="linear"))
    assert torch.equal(linear(coords * 0.5), emb.lookup(coords * 0.5, kernel="linear"))
    with pytest.raises(ValueError, match="axis 0 has 3 rows"):
        torch.vmap(emb.lookup)(coords + 1)


def test_functional_gradients_are_those_of_backward():
    rope = ndpos.RotaryEmbedding(SPLIT, learnable=True)
    q, weight = torch.randn(2, 12, 10, generator=seeded())

    def loss(frequencies):
        turn = torch.func.functional_call(rope, {"frequencies": frequencies}, (ndpos.grid(SIZES).flatten(0, -2),))
        return (turn(q) * weight).sum()

    turn = rope.on_grid(SIZES)
    (turn(q) * weight).sum().backward()
    torch.testing.assert_close(torch.func.grad(loss)(rope.frequencies.detach()), rope.frequencies.grad)
    per_pair = torch.func.jacrev(lambda q: turn(q).detach() * 0 + turn(q))(q)
    assert per_pair.shape == (12, 10, 12, 10)


def test_an_average_follows_what_is_learned_and_nothing_else():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fixed, self.learned = ndpos.RotaryEmbedding(SPLIT), ndpos.RotaryEmbedding(SPLIT, learnable=True)
            self.table = ndpos.LearnedEmbedding(SIZES, 10)

    model = Model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(model)  # the first one copies
    start = [parameter.clone() for parameter in model.parameters()]
    learned_before = average.module.learned.on_grid(SIZES).cos
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.update_parameters(model)
    for parameter, before in zip(average.module.parameters(), start, strict=True):
        torch.testing.assert_close(parameter, before + 0.5)
    assert torch.equal(average.module.fixed.on_grid(SIZES).cos, model.fixed.on_grid(SIZES).cos)
    assert not torch.equal(average.module.learned.on_grid(SIZES).cos, model.learned.on_grid(SIZES).cos)
    assert not torch.equal(average.module.learned.on_grid(SIZES).cos, learned_before)


@learned_or_not
def test_copies_and_pickles_do_not_grow_with_the_lengths_seen(learnable):
    rope = ndpos.RotaryEmbedding(SPLIT, learnable=learnable)
    size = len(pickle.dumps(rope))
    for length in (5, 3, 5, 3, *range(1, 60)):
        turn = rope.on_grid((length, 2))
        assert turn.cos.shape[-2] == 2 * length
    assert len(pickle.dumps(rope)) == size
    file = io.BytesIO()
    torch.save(rope, file)
    file.seek(0)
    for again in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope)), torch.load(file, weights_only=False)):
        assert torch.equal(again.on_grid(SIZES).cos, rope.on_grid(SIZES).cos)
        assert repr(again) == repr(rope)


def test_threads_do_not_hear_each_other():
    ropes = [ndpos.RotaryEmbedding(SPLIT, base=base) for base in (10.0, 1e4)]
    cells = ndpos.grid((16, 16)).flatten(0, -2)
    expected = [ndpos.angles(cells, ndpos.geometric(SPLIT, base=base)).cos().float()[None] for base in (10.0, 1e4)]
    wrong = []

    def work(which):
        for length in range(1, 40):
            ropes[which].on_grid((length, 3))
            if not torch.equal(ropes[which].on_grid((16, 16)).cos, expected[which]):
                wrong.append((which, length))

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_checkpointing_survives_tables_that_a_hook_cast_in_the_first_pass_alone(use_reentrant, dtype):
    turn = ndpos.RotaryEmbedding(SPLIT).on_grid(SIZES)
    passes = []

    def block(x, turn, hooked):
        passes.append(1)
        if hooked and len(passes) == 1:
            turn = pytree.tree_map(torch.Tensor.bfloat16, turn)
        return turn(x.sin()).exp()

    def gradient(hooked):
        passes.clear()
        x = torch.randn(2, 12, 10, generator=seeded()).to(dtype).requires_grad_()
        checkpoint(block, x, turn, hooked, use_reentrant=use_reentrant).sum().backward()
        assert len(passes) == 2
        return x.grad

    plain = torch.randn(2, 12, 10, generator=seeded()).to(dtype).requires_grad_()
    turn(plain.sin()).exp().sum().backward()
    assert torch.equal(gradient(False), plain.grad)
    assert gradient(True).dtype == dtype


def test_hooks_and_functional_calls_see_a_grid_as_they_see_coordinates():
    """FSDP gathers parameters in a hook before ``forward``; a method that went around it would find shards."""
    rope, calls = ndpos.RotaryEmbedding(SPLIT, learnable=True), []
    rope.register_forward_hook(lambda module, args, out: calls.append(type(out)))
    rope.on_grid(SIZES)
    rope(ndpos.grid(SIZES).flatten(0, -2))
    assert calls == [ndpos.Rotation, ndpos.Rotation]
