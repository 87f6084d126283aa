"""DeepCache's feature continued by a line: cached passes around the forecast feature of each prompt."""
from __future__ import annotations

import pytest
import torch
from builders import SMALL, SMALL_XL, relative_error
from deepcache_builders import STEPS, Rig, call_of, evenly_spaced, few_steps_suffice, passes  # noqa: F401
from torch import Tensor

from lib_onediff.model.deepcache.buffers import DAMPING, Record

WHOLE = [0, 3, 6, 9, 10]


def on_the_line(computed: list[tuple[int, Tensor]], step: int) -> Tensor:
    """The feature of a step after these computed ones: the last one where there is no line yet."""
    if len(computed) < 2:
        return computed[-1][1]
    (step_before, before), (step_last, last) = computed[-2:]
    return last + DAMPING * (step - step_last) / (step_last - step_before) * (last - before)


@pytest.mark.parametrize("config", [SMALL, SMALL_XL], ids=["SD1", "SDXL"])
def test_cached_passes_read_the_forecast_of_their_own_prompt(config: dict) -> None:
    rig = Rig.of(config)
    rig.begin(STEPS[:11], why_no_forecast=lambda: "")
    computed: dict[str, list[tuple[int, Tensor]]] = {"cat": [], "ugly": []}
    for step, half in enumerate(passes(WHOLE, 11)):
        for name in computed:
            call = call_of(rig.unet, STEPS[step], [name])
            output = rig.run(call)
            assert rig.log[-1] == half
            if half == "full":
                whole, feature = rig.oracle.whole(call)
                computed[name].append((step, feature))
                assert relative_error(output, whole) < 1e-5
            else:
                assert relative_error(output, rig.oracle.shallow(call, on_the_line(computed[name], step))) < 1e-5
                reused = rig.oracle.shallow(call, computed[name][-1][1])
                assert (relative_error(output, reused) > 1e-4) is (len(computed[name]) > 1)


def test_one_prompt_alone_and_two_samplings_in_turn() -> None:
    rig = Rig.of()
    for _ in range(2):
        rig.begin(STEPS[:11], why_no_forecast=lambda: "")
        computed: list[tuple[int, Tensor]] = []
        for step, half in enumerate(passes(WHOLE, 11)):
            call = call_of(rig.unet, STEPS[step])
            output = rig.run(call)
            if half == "full":
                computed.append((step, rig.oracle.whole(call)[1]))
            else:
                assert relative_error(output, rig.oracle.shallow(call, on_the_line(computed, step))) < 1e-5, step


def test_of_two_features_at_one_step_the_later_counts_and_other_weights_begin_anew() -> None:
    record = Record()
    for step, value in ((0, 1.0), (2, 5.0), (2, 3.0)):
        record.note(step, "weights", torch.full((2,), value))
    expected = 3 + DAMPING * 2 * 1 / 2
    assert torch.equal(record.forecast(3), torch.full((2,), expected))
    record.note(4, "other weights", torch.full((2,), 9.0))
    assert record.forecast(5) is None


def test_a_long_way_on_from_two_adjacent_steps_it_goes_no_farther() -> None:
    record = Record()
    for step, value in ((10, 1.0), (11, 2.0)):
        record.note(step, "weights", torch.full((2,), value))
    assert torch.equal(record.forecast(12), torch.full((2,), 2.5))
    for step in (13, 19):
        assert torch.equal(record.forecast(step), torch.full((2,), 2.75))


def test_its_memory_is_told_and_given_back() -> None:
    sizes = {}
    for feature, why_not in (("reused", "it adds noise"), ("forecast", "")):
        rig = Rig.of()
        rig.begin(why_no_forecast=lambda why_not=why_not: why_not)
        rig.sample(STEPS)
        run = rig.runtime.managed_unet(rig.unet).cache_run
        sizes[feature] = run._features.bytes()
        run.forget()
        assert run.bytes() == 0
    assert sizes["forecast"] == 3 * sizes["reused"] > 0


def test_with_samplers_that_no_line_follows_the_last_feature_is_reused() -> None:
    rig = Rig.of()
    rig.begin(STEPS[:11], why_no_forecast=lambda: "it adds noise")
    for step, half in enumerate(passes(WHOLE, 11)):
        rig.check(call_of(rig.unet, STEPS[step]), "a", half)


def test_the_status_says_why_deep_layers_are_reused() -> None:
    rig = Rig.of()
    for why in ("", "it adds noise"):
        rig.begin(STEPS[:11], why_no_forecast=lambda why=why: why)
        for step in range(4):
            rig.run(call_of(rig.unet, STEPS[step]))
            assert rig.runtime.status()["deepcache"]["reused"] == why
