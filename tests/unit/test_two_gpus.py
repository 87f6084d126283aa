"""Calls on two cards: how rows are split and joined, what the copy of the weights follows, and when one card computes.

Both cards are this CPU: the second has tensors of its own, which is all that tells devices apart here.
"""
from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from builders import SMALL, SMALL_XL, diffusers_output, diffusers_unet, randomise
from deepcache_builders import EVERY_THIRD, STEPS, WEBUI, call_of, few_steps_suffice  # noqa: F401
from torch import Tensor, nn

from lib_onediff.model.additions import ImagePrompt, PerturbedAttention
from lib_onediff.model.call import Control, UNetCall
from lib_onediff.model.deepcache.sampling import Sampling
from lib_onediff.model.forward import transformer_blocks
from lib_onediff.model.mirror import empty_copy
from lib_onediff.model.patch_points import PatchPoints
from lib_onediff.model.patches import HostTraits
from lib_onediff.model.rows import PromptRows, half_of, take_rows
from lib_onediff.options.effects import Machine, why_no_effect
from lib_onediff.options.settings import Settings
from lib_onediff.runtime import two_gpus
from lib_onediff.runtime.cards import NO_SECOND, Cards, second_card, second_share
from lib_onediff.runtime.runtime import Runtime
from lib_onediff.shapes.table import Entry
from lib_onediff.ui.status import gpus_sentence

FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 1)
ROOMY = 2**40
NAMES = "cat", "ugly"


@dataclass
class TwoCpus(Cards):
    """The CPU twice. launched: on which card, in order. full: whether the second runs out of memory when it is used."""

    cards: list[torch.device] = field(default_factory=lambda: [FIRST, SECOND])
    free: int = ROOMY
    equal: bool = True
    full: bool = False
    launched: list[torch.device] = field(default_factory=list)

    def all(self) -> list[torch.device]:
        return self.cards

    def room(self, device: torch.device) -> int:
        return self.free

    def are_equal(self, first: torch.device, second: torch.device) -> bool:
        return self.equal

    @contextlib.contextmanager
    def using(self, device: torch.device) -> Iterator[None]:
        self.launched.append(device)
        yield
        if self.full and device == SECOND:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")


@dataclass
class Image:
    """Samplings of a UNet on two cards, in a runtime of their own."""

    runtime: Runtime
    unet: Any
    cards: TwoCpus

    @classmethod
    def of(
        cls, config: dict[str, Any] = SMALL, traits: HostTraits = WEBUI, cards: TwoCpus | None = None, **options: Any
    ) -> Image:
        runtime, unet, cards = Runtime(), diffusers_unet(**config), cards or TwoCpus()
        runtime.two_gpus.cards = cards
        runtime.configure(Settings(**{"second_gpu": "auto", **options}))
        runtime.adopt(unet, host_traits=traits)
        return cls(runtime, unet, cards)

    def begin(self, **known: Any) -> None:
        self.runtime.begin_sampling(self.unet, Sampling(times=lambda: STEPS, **known))

    def call(self, time: float = 501.0, names: Any = NAMES, **more: Any) -> UNetCall:
        return call_of(self.unet, time, names, **more)

    @torch.no_grad()
    def run(self, call: UNetCall, host: Callable[[], Tensor] | None = None, **more: Any) -> Tensor:
        return self.runtime.run(self.unet, call, host or (lambda: diffusers_output(self.unet, call)), **more)

    @property
    def second(self) -> dict[str, Any]:
        return self.runtime.status()["second_gpu"]

    @property
    def copies(self) -> list[nn.Module]:
        return [unet for unet in self.runtime._managed if unet is not self.unet]


def near(output: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(output, expected, atol=1e-5, rtol=1e-4))


@torch.no_grad()
def exact(image: Image, call: UNetCall) -> Tensor:
    return diffusers_output(image.unet, call)


@pytest.mark.parametrize("config", [SMALL, SMALL_XL], ids=["SD1", "SDXL"])
@pytest.mark.parametrize("traits", [WEBUI, HostTraits()], ids=["new tensors at every call", "the same prompt"])
@pytest.mark.parametrize(("names", "rows"), [
    (("cat", "ugly"), "1+1"), (("cat", "dog", "ugly"), "2+1"), (("a", "b", "c", "d", "e", "f"), "3+3"),
])
def test_each_card_computes_its_rows_and_they_come_back_in_their_places(
    config: dict[str, Any], traits: HostTraits, names: Any, rows: str
) -> None:
    image = Image.of(config, traits)
    image.begin()
    first = image.call(names=names)
    for time in (901.0, 501.0, 101.0):
        call = replace(image.call(time, names), context=first.context, y=first.y)
        output = image.run(call)
        assert output.shape == call.latent.shape and near(output, exact(image, call))
        assert image.second["split"] == f"cpu + cpu:1, {rows} rows"
    assert image.second["calls"] == 3 and image.second["reason"] == ""
    assert SECOND in image.cards.launched and len(image.copies) == 1
    assert image.runtime.call_stats.total == 3 and image.runtime.guard.faults == []


def test_the_copy_of_the_weights_is_made_once_and_counted() -> None:
    image = Image.of()
    weights = sum(parameter.nbytes for parameter in image.unet.parameters())
    for _ in range(3):
        image.begin()
        image.run(image.call())
    (copy,) = image.copies
    assert image.second["bytes"] == weights
    assert image.runtime._managed[copy].bound.copied_bytes == weights
    theirs = {tensor.untyped_storage().data_ptr() for tensor in image.unet.parameters()}
    assert all(tensor.untyped_storage().data_ptr() not in theirs for tensor in copy.parameters())


def change_in_place(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.mul_(1.05)


def change_one_layer(unet: nn.Module) -> None:
    unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_k.weight.mul_(3)


def change_by_data(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.data = parameter.data * 1.05


def change_by_loading(unet: nn.Module) -> None:
    unet.load_state_dict(randomise(diffusers_unet(), 7).state_dict())


def change_by_parameter(unet: nn.Module) -> None:
    layer = unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    layer.weight = nn.Parameter(layer.weight.detach() * 3, requires_grad=False)


@pytest.mark.parametrize("begins", [True, False], ids=["between samplings", "within a sampling"])
@pytest.mark.parametrize("traits", [WEBUI, HostTraits()], ids=["new tensors at every call", "the same prompt"])
@pytest.mark.parametrize(
    "change", [change_in_place, change_one_layer, change_by_data, change_by_loading, change_by_parameter]
)
def test_the_copy_follows_every_change_of_the_weights(
    change: Callable[[nn.Module], None], traits: HostTraits, begins: bool
) -> None:
    if change is change_by_parameter and not begins:
        pytest.skip("within a sampling, hosts exchange no single parameter")
    image = Image.of(traits=traits)
    image.begin()
    call = image.call()
    before = image.run(call)
    with torch.no_grad():
        change(image.unet)
    if begins:
        image.begin()
    output = image.run(call)
    assert image.second["split"] and near(output, exact(image, call))
    assert not near(output[1:], before[1:])


def test_after_a_change_of_one_layer_that_layer_alone_is_copied() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    (copy,) = image.copies
    bound = image.runtime._managed[copy].bound
    before = bound.copied_bytes
    with torch.no_grad():
        change_one_layer(image.unet)
    image.begin()
    image.run(image.call())
    layer = image.unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_k.weight
    assert bound.copied_bytes - before == layer.nbytes


def test_another_checkpoint_has_a_copy_of_its_own_and_a_gone_one_leaves_none() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    other = diffusers_unet(seed=3)
    image.runtime.adopt(other, host_traits=WEBUI)
    second = replace(image, unet=other)
    second.begin()
    assert near(second.run(call := second.call()), exact(second, call))
    assert image.runtime.two_gpus.bytes() == 2 * sum(parameter.nbytes for parameter in other.parameters())
    del image
    second.runtime.release(other)
    assert second.runtime.two_gpus.bytes() == 0 or len(second.runtime.two_gpus._pairs) == 0


def test_where_there_is_room_for_one_copy_the_other_checkpoint_s_goes() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    other = diffusers_unet(seed=3)
    image.runtime.adopt(other, host_traits=WEBUI)
    second = replace(image, unet=other)
    second.begin()

    def room(device: torch.device) -> int:
        return 0 if image.runtime.two_gpus.bytes() else ROOMY

    image.cards.room = room  # type: ignore[method-assign]
    second.run(second.call())
    assert second.second["split"] and len(image.runtime.two_gpus._pairs) == 1
    assert image.runtime.two_gpus._pairs.get(other) is not None


def test_out_of_memory_on_the_second_card_leaves_one_until_something_changes() -> None:
    image = Image.of()
    image.cards.full = True
    image.begin()
    call = image.call()
    assert near(image.run(call), exact(image, call))
    assert "out of memory on cpu:1" in image.second["reason"] and image.second["split"] == ""
    assert image.second["bytes"] == 0 and not image.copies
    image.cards.full = False
    for _ in range(2):
        image.begin()
        image.run(call)
        assert "out of memory on cpu:1" in image.second["reason"]
    with torch.no_grad():
        change_in_place(image.unet)
    image.begin()
    image.run(call)
    # The call that finds the change out is computed by one.
    image.run(call)
    assert image.second["split"] == "cpu + cpu:1, 1+1 rows"


def test_another_option_tries_again_after_out_of_memory() -> None:
    image = Image.of()
    image.cards.full = True
    image.begin()
    image.run(image.call())
    image.cards.full = False
    image.runtime.configure(Settings(second_gpu="1"))
    image.run(image.call())
    assert image.second["split"] == "cpu + cpu:1, 1+1 rows"


def test_switched_off_between_two_calls_the_second_card_is_given_back() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    image.runtime.configure(Settings())
    assert not image.copies and image.second == {"calls": 1, "split": "", "reason": "", "bytes": 0}
    image.cards.launched.clear()
    call = image.call()
    assert near(image.run(call), exact(image, call))
    assert image.cards.launched == [] and image.second["calls"] == 1
    image.runtime.configure(Settings(second_gpu="auto"))
    assert near(image.run(call), exact(image, call)) and image.second["calls"] == 2


def test_one_generation_without_onediff_keeps_the_copy() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    with image.runtime.settings_for_run(Settings(enabled=False, second_gpu="auto"), "off"):
        image.run(image.call())
    assert len(image.copies) == 1


def test_a_unet_that_is_given_back_takes_its_copy_along() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    image.runtime.release(image.unet)
    assert list(image.runtime._managed) == [] and image.runtime.two_gpus.bytes() == 0


def control_of(unet: Any, call: UNetCall, rows: int) -> Control:
    shapes: list[torch.Size] = []
    hooks = [unet.conv_in.register_forward_hook(lambda module, args, out: shapes.append(out.shape))]
    for block in unet.down_blocks:
        hooks.append(block.register_forward_hook(lambda module, args, out: shapes.extend(o.shape for o in out[1])))
    hooks.append(unet.mid_block.register_forward_hook(lambda module, args, out: shapes.append(out.shape)))
    with torch.no_grad():
        diffusers_output(unet, call)
    for hook in hooks:
        hook.remove()
    residuals = [torch.randn(rows, *shape[1:]) for shape in shapes]
    return Control(middle=(residuals[-1],), output=tuple(reversed(residuals[:-1])))


@pytest.mark.parametrize("rows", [1, 2])
def test_residuals_of_a_controlnet_are_cut(rows: int) -> None:
    one, two = Image.of(second_gpu="off", verify=False), Image.of(verify=False)
    call = two.call()
    controlled = replace(call, control=control_of(two.unet, call, rows))
    for image in (one, two):
        image.begin()
    output = two.run(controlled)
    assert two.second["split"] and near(output, one.run(controlled))
    assert not near(output, exact(two, call))


def test_an_image_prompt_is_cut() -> None:
    one, two = Image.of(second_gpu="off", verify=False), Image.of(verify=False)
    call, parts, column = two.call(), {}, 0
    for block, _ in transformer_blocks(two.runtime.layout_of(two.unet), 8, 8):
        query = block.cross_attention.query
        parts[query.path], column = (column, 2 * query.out_features), column + 2 * query.out_features
    prompted = replace(call, image_prompts=(ImagePrompt(torch.randn(2, 4, column), parts),))
    for image in (one, two):
        image.begin()
    output = two.run(prompted)
    assert two.second["split"] and near(output, one.run(prompted))
    assert not near(output, exact(two, call))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_first_use_is_checked_in_every_row(row: int) -> None:
    """A host that answers otherwise in one row is what an error of ours there looks like."""
    image = Image.of()
    image.begin()
    call = image.call(names=("cat", "dog", "ugly"))
    wrong = exact(image, call)
    wrong[row] += 1
    image.run(call, lambda: wrong)
    assert "differs from the model's own forward" in image.second["reason"] and image.second["calls"] == 0


def test_deepcache_keeps_a_feature_on_each_card() -> None:
    one, two = Image.of(second_gpu="off", **EVERY_THIRD), Image.of(**EVERY_THIRD)
    for image in (one, two):
        image.begin()
    for time in STEPS[:9]:
        call = two.call(time)
        assert near(two.run(call), one.run(call))
        assert two.second["split"]
    passes = [image.runtime.status()["deepcache"] for image in (one, two)]
    assert passes[0] == passes[1] and passes[0]["cached"] > 3
    assert two.runtime.call_stats.calls == one.runtime.call_stats.calls


def test_where_the_guidance_ends_one_card_computes_the_prompt_s_row() -> None:
    image = Image.of(guidance_end=0.5)
    image.begin()
    splits = []
    for time in STEPS:
        call = image.call(time)
        half = PromptRows(half_of(2, True), lambda call=call: exact(image, take_rows(call, half_of(2, True))))
        call = replace(call, latent=call.latent[:1].repeat(2, 1, 1, 1))
        image.run(call, guidance=lambda half=half: half)
        splits.append(bool(image.second["split"]))
    assert splits == [True] * 10 + [False] * 10 and image.second["reason"] == two_gpus.ONE_ROW


def test_a_forecast_runs_no_card() -> None:
    image = Image.of(forecast_interval=3)
    image.begin(why_no_forecast=lambda: "")
    for time in STEPS:
        image.run(image.call(time))
    assert image.second["calls"] == 9 and image.runtime.status()["forecast"]["calls"] == 11


@pytest.mark.parametrize(("more", "reason"), [
    ({"perturbed": PerturbedAttention(frozenset(), 1)}, "perturbed attention"),
    ({"patches": PatchPoints()}, "other extensions compute within the UNet"),
])
def test_what_tells_rows_apart_or_is_foreign_has_one_card(more: dict[str, Any], reason: str) -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    assert image.second["calls"] == 1
    call = replace(image.call(), **more)
    image.run(call)
    assert image.second["calls"] == 1 and reason in image.second["reason"]


@pytest.mark.parametrize("backend", ["inductor", "oneflow"])
def test_engines_of_one_device_have_one_card(backend: str) -> None:
    image = Image.of(backend=backend)
    image.begin()
    image.run(image.call())
    assert image.second["reason"] == f"the backend {backend} computes on one GPU"


def test_a_call_of_one_row_has_one_card_and_says_so() -> None:
    image = Image.of()
    image.begin()
    call = image.call(names=("cat",))
    assert near(image.run(call), exact(image, call))
    assert image.second["reason"] == two_gpus.ONE_ROW and image.cards.launched == []


def test_a_fault_on_the_second_card_is_told_once_and_the_first_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("peer access is broken")

    image = Image.of()
    image.begin()
    image.run(image.call())
    monkeypatch.setattr(two_gpus.Pair, "rows", fails)
    for _ in range(3):
        image.begin()
        call = image.call()
        assert near(image.run(call), exact(image, call))
        assert "peer access is broken" in image.second["reason"] and image.second["bytes"] == 0
    assert len(image.runtime.guard.faults) == 1 and not image.runtime.guard.suspended


def test_what_the_host_raises_in_a_check_is_the_host_s() -> None:
    class Interrupted(Exception):
        pass

    def interrupted() -> Tensor:
        raise Interrupted

    image = Image.of()
    image.begin()
    with pytest.raises(Interrupted):
        image.run(image.call(), interrupted)
    assert image.runtime.guard.faults == []
    call = image.call()
    assert near(image.run(call), exact(image, call)) and image.second["split"]


def test_without_the_option_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*given: Any) -> None:
        raise AssertionError

    image = Image.of(second_gpu="off")
    monkeypatch.setattr(two_gpus.TwoGpusRoute, "run", asked)
    image.begin()
    call = image.call()
    assert near(image.run(call), exact(image, call)) and image.runtime.guard.faults == []
    assert image.second == {"calls": 0, "split": "", "reason": "", "bytes": 0}


def test_a_refused_card_costs_no_second_computation() -> None:
    image = Image.of(cards=TwoCpus([FIRST]))
    image.begin()
    for time in STEPS[:4]:
        image.run(image.call(time))
    assert image.second["reason"] == NO_SECOND
    (entry,) = image.runtime.table.entries()
    assert entry.key.batch == 2 and entry.uses == 4


def test_the_first_cards_rows_that_cannot_be_computed_leave_the_whole_to_the_host() -> None:
    image = Image.of(traits=HostTraits())
    with torch.no_grad():
        image.unet.mid_block.attentions[0].proj_in.forward = lambda x: x
    call = image.call()
    output = image.run(call, lambda: torch.zeros_like(call.latent))
    assert image.runtime.status()["route"] == "host" and image.second["split"] == "" and not output.any()


def test_the_log_says_once_which_cards_compute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onediff")
    image = Image.of()
    for _ in range(2):
        image.begin()
        image.run(image.call())
    assert caplog.messages.count("two GPUs: cpu + cpu:1, 1+1 rows") == 1


def test_two_different_cards_share_by_what_was_measured() -> None:
    image = Image.of(cards=TwoCpus(equal=False))
    names = ("a", "b", "c", "d")
    image.begin()
    for _ in range(2):
        image.run(image.call(names=names))
    assert image.second["split"].endswith("2+2 rows")
    (pair,) = image.runtime.two_gpus._pairs.values()
    ((shape, entries),) = pair.entries.items()
    first, second = (Entry(entry.key) for entry in entries)
    first.own.remember(20.0)
    second.own.remember(60.0)
    pair.entries[shape] = first, second
    image.begin()
    call = image.call(names=names)
    # The call that begins a sampling is still shared as before.
    image.run(call)
    pair.entries[shape] = first, second
    assert near(image.run(call), exact(image, call))
    assert image.second["split"].endswith("3+1 rows")


@pytest.mark.parametrize(("batch", "times", "share"), [
    (2, (), 1), (3, (), 1), (5, (), 2), (8, (10.0, 10.0), 4), (2, (10.0, 15.0), 1), (2, (10.0, 25.0), 0),
    (8, (10.0, 30.0), 2), (8, (30.0, 10.0), 6), (2, (25.0, 10.0), 1), (8, (10.0, 10.2), 4), (8, (10.0, 1000.0), 0),
])
def test_shares_are_whole_rows_that_end_together(batch: int, times: tuple[float, ...], share: int) -> None:
    assert second_share(batch, *times) == share


THREE = [torch.device("cuda", index) for index in range(3)]


@pytest.mark.parametrize(("option", "first", "rooms", "expected"), [
    ("auto", 0, (9, 9, 9), 1), ("auto", 1, (9, 9, 9), 0), ("auto", 0, (9, 1, 9), 2), ("2", 0, (9, 9, 9), 2),
    ("0", 0, (9, 9, 9), "GPU 0 is the one that computes already"),
    ("5", 0, (9, 9, 9), "there is no GPU 5: PyTorch sees 3, 0 to 2"),
    ("2", 0, (9, 9, 1), "the weights take 4.0 GiB, cuda:2 has room for 1.0 GiB"),
    ("auto", 0, (9, 1, -2), "the weights take 4.0 GiB, cuda:1 has room for 1.0 GiB, cuda:2 has room for 0.0 GiB"),
])
def test_the_second_card_is_the_one_named_or_the_next_with_room(
    option: str, first: int, rooms: tuple[int, ...], expected: int | str
) -> None:
    class Machine(TwoCpus):
        def room(self, device: torch.device) -> int:
            return rooms[device.index] << 30

    found = second_card(option, THREE[first], 4 << 30, Machine(THREE))
    assert found == (THREE[expected] if isinstance(expected, int) else expected)


def test_on_a_machine_without_gpus_the_option_says_so() -> None:
    image = Image.of()
    image.runtime.two_gpus.cards = Cards()
    image.begin()
    call = image.call()
    assert near(image.run(call), exact(image, call))
    assert image.second["reason"] == "this UNet is on the CPU"


def test_a_copy_has_the_structure_of_the_original_without_its_values() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    binding = image.runtime._managed[image.unet].bound.binding
    copy = empty_copy(binding, torch.device("meta"))
    ours = dict(copy.named_parameters())
    theirs = {
        f"{path}.{name}": parameter for path, layer in zip(binding.paths(), binding.layers(), strict=True)
        for name, parameter in layer._parameters.items() if parameter is not None
    }
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert (parameter.shape, parameter.dtype) == (theirs[name].shape, theirs[name].dtype)
        assert parameter.is_meta and not parameter.requires_grad


def test_two_threads_get_their_own_rows() -> None:
    image = Image.of()
    image.begin()
    calls = [image.call(time) for time in STEPS]
    expected = [exact(image, call) for call in calls]
    found: list[Tensor | None] = [None] * len(calls)

    def work(start: int) -> None:
        for place in range(start, len(calls), 2):
            found[place] = image.run(calls[place])

    threads = [threading.Thread(target=work, args=(start,)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(output is not None and near(output, one) for output, one in zip(found, expected, strict=True))
    assert image.second["calls"] == len(calls) and image.runtime.guard.faults == []


@pytest.mark.parametrize(("value", "gpus", "reason"), [
    ("off", 0, None), ("auto", 0, "PyTorch sees no GPU here."), ("auto", 1, "PyTorch sees one GPU here."),
    ("1", 2, None), ("2", 2, "PyTorch sees 2 GPUs here, 0 to 1."), ("auto", 2, None),
])
def test_the_settings_say_where_the_option_has_no_effect(value: str, gpus: int, reason: str | None) -> None:
    machine = Machine("2.11.0", "GPU", (9, 0), False, frozenset(), gpus=gpus)
    assert why_no_effect("second_gpu", value, machine) == reason


def test_the_status_line_names_cards_memory_and_reasons() -> None:
    said = gpus_sentence({"calls": 3, "split": "cuda:0 + cuda:1, 1+1 rows", "reason": "", "bytes": 5 << 30})
    assert said == "Two GPUs: cuda:0 + cuda:1, 1+1 rows; 5120 MiB of weights on the second."
    assert gpus_sentence({"calls": 3, "split": "", "reason": "no room", "bytes": 0}) == "One GPU: no room."
    assert gpus_sentence({"calls": 0, "split": "", "reason": "", "bytes": 0}) == gpus_sentence({}) == ""


def test_weights_whose_edits_nobody_counts_are_copied_at_every_sampling() -> None:
    image = Image.of()
    with torch.inference_mode():
        unet = diffusers_unet(seed=5)
    image.runtime.adopt(unet, host_traits=WEBUI)
    image = replace(image, unet=unet)
    for _ in range(3):
        image.begin()
        for time in (901.0, 501.0):
            call = image.call(time)
            assert near(image.run(call), exact(image, call)) and image.second["split"]
        with torch.inference_mode():
            change_in_place(unet)
    (copy,) = image.copies
    weights = sum(parameter.nbytes for parameter in unet.parameters())
    assert image.runtime._managed[copy].bound.copied_bytes == 3 * weights


def test_compiling_early_passes_a_copy_by() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    assert all(begun.exception(60) is None for begun in image.runtime.compiling())


def test_tiling_goes_to_both_cards_and_back() -> None:
    image = Image.of()
    call, outputs = image.call(), []
    for mode in ("zeros", "circular", "zeros"):
        for module in image.unet.modules():
            if isinstance(module, nn.Conv2d):
                module.padding_mode = mode
        image.begin()
        outputs.append(image.run(call))
        assert image.second["split"] and near(outputs[-1], exact(image, call)) and len(image.copies) == 1
    assert not near(outputs[0], outputs[1]) and near(outputs[0], outputs[2])
