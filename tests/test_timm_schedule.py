"""Strength raised and tables faded on a schedule."""

import copy
import math

import pytest
import torch

pytest.importorskip("timm", reason="needs timm")
import timm

import ndpos.timm


def wrapped(**settings):
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=2)
    return ndpos.timm.add_rope(vit, **{"strength": 0.0, **settings})


def run(schedule, model, steps):
    seen = [model.strength]
    for _ in range(steps):
        schedule.step()
        seen.append(model.strength)
    return seen


def test_strength_rises_after_the_warmup_and_stays():
    model = wrapped()
    schedule = ndpos.timm.Schedule(model, steps=4, warmup=2, curve="linear")
    assert run(schedule, model, 8) == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    model = wrapped()
    seen = run(ndpos.timm.Schedule(model, steps=4), model, 5)
    assert seen == pytest.approx([(1 - math.cos(math.pi * step / 4)) / 2 for step in range(5)] + [1])
    assert seen[-1] == 1


def test_each_axis_has_its_own_end_and_every_model_follows():
    model = wrapped()
    average = copy.deepcopy(model)
    holder = torch.nn.ModuleDict({"net": model})
    schedule = ndpos.timm.Schedule([holder, average], steps=2, to=(1.0, 0.5), curve="linear")
    assert run(schedule, model, 2) == [0, (0.5, 0.25), (1.0, 0.5)]
    assert average.strength == (1.0, 0.5)


def test_the_table_fades_on_its_own_schedule():
    model = wrapped(absolute="fade")
    schedule = ndpos.timm.Schedule(model, steps=2, curve="linear", fade_warmup=1, fade_steps=4)
    seen = [(model.strength, model.fade)]
    for _ in range(5):
        schedule.step()
        seen.append((model.strength, model.fade))
    assert seen == [(0, 0), (0.5, 0), (1, 0.25), (1, 0.5), (1, 0.75), (1, 1)]


def test_a_resumed_schedule_goes_on_where_it_stood():
    model = wrapped(strength=0.2)
    schedule = ndpos.timm.Schedule(model, steps=4, curve="linear")
    run(schedule, model, 3)
    again = wrapped(strength=1.0)
    resumed = ndpos.timm.Schedule(again, steps=4, curve="linear")
    resumed.load_state_dict(schedule.state_dict())
    assert again.strength == model.strength == pytest.approx(0.8)
    resumed.step()
    assert again.strength == 1


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ndpos.timm.Schedule(torch.nn.Linear(1, 1), steps=1), TypeError, "Linear holds 0"),
        (lambda: ndpos.timm.Schedule([], steps=1), ValueError, "at least one model"),
        (lambda: ndpos.timm.Schedule(wrapped(), steps=0), ValueError, "steps"),
        (lambda: ndpos.timm.Schedule(wrapped(), steps=2.5), TypeError, "steps"),
        (lambda: ndpos.timm.Schedule(wrapped(), steps=2, curve="step"), ValueError, "curve is 'cosine' or 'linear'"),
        (lambda: ndpos.timm.Schedule(wrapped(), steps=2, to=1.5), ValueError, "strength is from 0"),
        (lambda: ndpos.timm.Schedule(wrapped(), steps=2, fade_steps=2), ValueError, "absolute='fade'"),
        (lambda: ndpos.timm.Schedule(wrapped(), steps=2, fade_warmup=2), ValueError, "needs fade_steps"),
    ],
)
def test_a_wrong_schedule_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()
