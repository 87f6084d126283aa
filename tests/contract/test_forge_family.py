"""WebUIs of the Forge family: other checkpoints, forwards of extensions, memory, and work in the main thread."""
from __future__ import annotations

import gc
import threading
import types
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract_hosts import FAMILY, Host, Sampler, calls_of
from test_generations import OURS, close
from torch import nn

from lib_onediff.core.refusal import Refusal
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui import status
from lib_onediff.weights.joining import shares_storage

family = pytest.mark.parametrize("host", FAMILY, indirect=True)
forges = pytest.mark.parametrize("host", ["forge", "neo"], indirect=True)


def load(host: Host, checkpoint: Any) -> None:
    """Let the WebUI delete its checkpoint and load another."""
    data = host.module("modules.sd_models").model_data
    memory = host.module(host.adapter.memory)
    data.sd_model = host.checkpoint = None
    memory.current_loaded_models.clear()
    gc.collect()
    data.sd_model = host.checkpoint = checkpoint
    host.announce()


@family
def test_onediff_computes_a_refiner_that_the_webui_loads_during_a_sampling(host: Host) -> None:
    """The WebUI replaces the checkpoint and continues the sampling with the new UNet. It does not call the callback for
    the beginning of a sampling again."""
    host.start()
    host.generate()
    load(host, host.make())
    with host.no_gradients():
        assert calls_of(lambda: host.sample(None, None))[1] == OURS


@family
def test_loading_an_unsupported_checkpoint_frees_the_previous_unet_and_gives_the_reason(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """OneDiff keeps no reference to the previous UNet. The log, the status and the refusal to pre-warm give the same
    reason, with the model's name. The next supported checkpoint is computed by OneDiff again."""
    adapter = host.start()
    host.generate()
    unet = weakref.ref(host.unet)
    weight = weakref.ref(next(host.unet.parameters()))
    other = host.make()
    other.forge_objects.unet.model.diffusion_model = nn.Linear(1, 1)
    # The object whose class has the model's name: the engine, or with ComfyUI's code the model around the network.
    named = other.forge_objects.unet.model if adapter.name == "ldm_patched" else other
    named.__class__ = type("Lumina2", (type(named),), {})
    load(host, other)
    assert unet() is None and weight() is None and "forward" not in vars(host.unet)
    models = "SD1, SD2, SDXL, Anima, Krea 2, Z-Image and Lumina 2" if host.name == "neo" else "SD1, SD2 and SDXL"
    reason = f"Lumina 2 is not accelerated: OneDiff supports {models}"
    assert [record.getMessage() for record in caplog.records if "Lumina 2" in record.getMessage()] == [f"{reason}."]
    found = status.current_status(adapter)
    assert (found["served"], found["reason"]) == (False, reason)
    assert not any(found[name] for name in ("model", "backend", "resolution", "step_ms", "ratio", "relative_error"))
    with pytest.raises(Refusal, match=reason):
        adapter.warm(64, 64, 2, 77)
    load(host, host.make())
    assert adapter.why_not_served() is None and calls_of(host.generate)[1] == OURS


@family
def test_an_extension_whose_forward_on_the_unet_object_bypasses_ours_is_named(host: Host) -> None:
    """The status names the extension (here this module). OneDiff computes again once that forward is removed."""
    host.start()
    host.unet.forward = lambda x, timesteps=None, **others: x * 0.25
    assert calls_of(host.generate)[1] == {"host": 1}
    assert runtime.status()["reason"] == f"another extension has replaced the UNet's forward ({__name__})"
    del host.unet.forward
    assert calls_of(host.generate)[1] == OURS


@family
@pytest.mark.parametrize("replaced", ["the class's forward", "the caller"])
def test_an_extension_that_replaces_the_class_forward_or_the_caller_of_the_unet_is_named(
    host: Host, replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replaced code answers without calling our hook, so that OneDiff sees no UNet call. The status names the
    extension (here this module), and OneDiff computes again without it."""
    host.start()
    kind, method, sentence = {
        "the class's forward": (type(host.unet), "forward", "another extension has replaced the UNet's forward"),
        "the caller": (
            type(host.networks()[0]), "apply_model",
            "another extension has replaced the WebUI's function that calls the UNet",
        ),
    }[replaced]
    with monkeypatch.context() as patch:
        # HareSkip for Anima does this: it replaces a class's forward, and answers every call itself.
        patch.setattr(kind, method, lambda self, x, *given, **named: x * 0.25)
        assert calls_of(host.generate)[1] == {"host": 1}
    assert runtime.status()["reason"] == f"{sentence} ({__name__})"
    assert calls_of(host.generate)[1] == OURS


def by_regions(attention: Any, x: Any, context: Any = None, **named: Any) -> Any:
    """A forward like Regional Prompter's: each half of the prompt is for one half of the image. Checks that it gets no
    arguments that the host's blocks would not pass."""
    assert named.get("value") is None and named.get("mask") is None
    halves = context.chunk(2, dim=1)
    left, right = (type(attention).forward(attention, x, half) for half in halves)
    return torch.cat([left[:, : x.shape[1] // 2], right[:, x.shape[1] // 2 :]], dim=1)


def tripled(block: Any, x: Any, context: Any = None, **named: Any) -> Any:
    """A forward of a transformer block, with three times the output of the block's own."""
    return 3 * type(block).forward(block, x, context)


@family
@pytest.mark.parametrize(("name", "forward"), [("attn2", by_regions), ("", tripled)], ids=["attention", "block"])
def test_our_forward_calls_an_extensions_forward_on_a_block_or_an_attention(
    host: Host, name: str, forward: Any
) -> None:
    """The image is close to the one that the host makes with the same extension, and the status names the extension
    (this module). name: the name of the attention in the block that has the extension's forward; "": the block itself
    has it."""
    blocks = [block for block in host.unet.modules() if hasattr(block, "attn2")]
    changed = [getattr(block, name) if name else block for block in blocks]
    for module in changed:
        module.forward = types.MethodType(forward, module)
    expected = host.generate()
    for module in changed:
        del module.forward
    plain = host.generate()
    host.start()
    host.generate()
    for module in changed:
        module.forward = types.MethodType(forward, module)
    made, calls = calls_of(host.generate)
    assert calls == OURS and close(made, expected) and not close(made, plain)
    assert f"{name or 'block'} by {__name__} in {len(blocks)} blocks" in runtime.status()["reason"]
    for module in changed:
        del module.forward
    made, calls = calls_of(host.generate)
    assert calls == OURS and close(made, plain) and __name__ not in runtime.status()["reason"]


@family
def test_the_host_computes_a_model_in_a_dtype_that_onediff_does_not_support(host: Host) -> None:
    """The model is computed in float64, which the status gives as the reason. Back in float32, OneDiff computes the
    next generation, even after one that failed before its first UNet call."""
    host.start()
    host.unet.computation_dtype = torch.float64
    assert calls_of(host.generate)[1] == {"host": 2}
    assert "stored as float32 and computed in float64" in runtime.status()["reason"]
    host.unet.computation_dtype = torch.float32

    def fails(patcher: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        host.generate(fails)
    assert calls_of(host.generate)[1] == OURS, "the generation that failed left no reason behind"


@family
def test_the_host_finishes_a_sampling_during_which_onediff_is_switched_off(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OneDiff computes the first of two calls, is switched off before the second, and on again after it. The image is
    close to the host's, and OneDiff computes the next sampling."""
    expected = host.generate()
    adapter = host.start()
    model = host.checkpoint.forge_objects.unet.model
    switch = [adapter.stop, adapter.serve]
    apply = model.apply_model

    def then_switch(*args: Any, **kwargs: Any) -> Any:
        output = apply(*args, **kwargs)
        if switch:
            switch.pop(0)()
        return output

    monkeypatch.setattr(model, "apply_model", then_switch)
    made, calls = calls_of(host.generate)
    assert calls == {"plain": 1} and close(made, expected)
    assert not switch, "stopped after the first call, and served again after the second"
    assert not any(shares_storage(parameter) for parameter in host.unet.parameters())
    assert calls_of(host.generate)[1] == OURS and adapter.hooks() == 1


@pytest.mark.parametrize("host", ["neo"], indirect=True)
def test_the_webui_is_asked_to_keep_the_memory_free_that_a_size_lacked_before(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here samplings with a width of 512 lacked 300 bytes, and those of other widths none."""
    adapter = host.start()
    checkpoint = host.checkpoint
    monkeypatch.setattr(runtime, "room_lacked", lambda unet, size: 300 if unet is host.unet and 512 in size else 0)

    def left_free(width: int) -> int:
        """The bytes that the WebUI is asked to leave free, in a sampling of this width."""
        checkpoint.forge_objects = checkpoint.forge_objects_after_applying_lora.shallow_copy()
        adapter.before_sampling(SimpleNamespace(sd_model=checkpoint, sampler=Sampler(), is_hr_pass=False, width=width))
        return checkpoint.forge_objects.unet.extra_preserved_memory_during_sampling

    assert [left_free(width) for width in (512, 768, 512)] == [300, 0, 300]


@forges
def test_exclusive_work_runs_in_the_main_thread_of_the_host_and_holds_its_queue_lock(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exclusively() is for work that must not run beside a generation, such as pre-warming, and refuses it during one.
    It returns the result of the work or raises its exception; the host's function for the main thread returns
    nothing."""
    adapter = host.start()
    lock = host.module("modules.call_queue").queue_lock
    handed_over: list[Any] = []
    main_thread = host.module("modules_forge.main_thread")
    monkeypatch.setattr(main_thread, "run_and_wait_result", lambda work: (handed_over.append(work), work())[:0])
    answers: list[Any] = []

    def request_work() -> None:
        answers.append(adapter.exclusively(lambda: lock.acquire(blocking=False)))
        try:
            adapter.exclusively(lambda: [][1])
        except IndexError as error:
            answers.append(error)

    thread = threading.Thread(target=request_work)
    thread.start()
    thread.join(20)
    assert answers[0] is False and isinstance(answers[1], IndexError) and len(handed_over) == 2
    with lock, pytest.raises(Refusal, match="making an image"):
        adapter.exclusively(lambda: None)
    assert adapter.exclusively(threading.current_thread) is threading.main_thread() and len(handed_over) == 2
