"""Generations of every WebUI with OneDiff: which calls OneDiff serves, the reason in its status if it does not, and
that it leaves nothing behind when it is switched off. The WebUIs (hosts) are stand-ins with the code that OneDiff
hooks."""
from __future__ import annotations

import sys
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from builders import relative_error
from contract_hosts import ATTENTION, FAMILY, HOSTS, Host, Made, calls_of, controlled_forward, random
from torch import Tensor, nn

from lib_onediff.hosts import this_webui
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.joining import shares_storage

RELEASES = {
    "a1111": ("a1111", "A1111 v1.10.1"), "forge": ("forge", "Forge 2.0.1v1.10.1"), "neo": ("forge", "Forge Neo 2.30"),
    "reforge": ("ldm_patched", "reForge 1.0.0v2-v1.10.1RC"), "classic": ("ldm_patched", "Forge Classic"),
}
# The two UNet calls of a generation, by route: all by our forward, without CUDA graphs on a CPU ("plain"), or all by
# the host.
OURS = {"plain": 2}
BY_HOST = {"host": 2}


def close(made: Made, expected: Made) -> bool:
    """Whether two generations agree to within rounding."""
    return all(relative_error(ours, theirs) < 1e-5 for ours, theirs in zip(made, expected, strict=True))


def same(made: Made, expected: Made) -> bool:
    """Whether two generations are equal to the bit."""
    return all(torch.equal(ours, theirs) for ours, theirs in zip(made, expected, strict=True))


def attributes(host: Host) -> list[set[str]]:
    """The names of the attributes of each of the WebUI's modules and objects."""
    modules = [set(vars(module)) for network in host.networks() for module in network.modules()]
    objects = getattr(host.checkpoint, "forge_objects", host.checkpoint)
    return [*modules, set(vars(host.checkpoint)), *(set(vars(part)) for part in vars(objects).values())]


def test_onediff_serves_unet_and_vae_and_the_image_is_close_to_that_of_the_webui(host: Host) -> None:
    """Three generations in each WebUI, compared with one by the WebUI alone. The status has no fault and no reason, and
    the WebUI's name and release are recognised."""
    expected = host.generate()
    adapter = host.start()
    decodes = runtime.status()["vae"]["calls"]["ours"]
    assert (adapter.name, adapter.release) == RELEASES[host.name]
    for _ in range(3):
        made, calls = calls_of(host.generate)
        assert calls == OURS and close(made, expected)
        status = runtime.vae.status()
        assert (status["route"], status["reason"]) == ("ours", "") and adapter.why_not_served() is None
    assert runtime.status()["vae"]["calls"]["ours"] == decodes + 3 and runtime.guard.faults == []
    assert not any(entry.relative_error and entry.relative_error > 1e-5 for entry in runtime.table.entries())


@pytest.mark.parametrize("host", ["a1111"], indirect=True)
def test_with_lowvram_every_unet_call_is_served_and_the_block_on_the_gpu_is_moved_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --lowvram, the WebUI's hooks move a block to the GPU before its forward, and the previous block back. Our
    forward runs without these hooks, so OneDiff moves the last block back."""
    expected = host.generate()
    lowvram = host.module("modules.lowvram")
    monkeypatch.setattr(host.module("modules.shared").cmd_opts, "lowvram", True)
    unet = host.networks()[0]
    for block in (*unet.input_blocks, unet.middle_block, *unet.output_blocks):
        block.register_forward_pre_hook(lowvram.send_me_to_gpu)
    host.start()
    for _ in range(3):
        made, calls = calls_of(host.generate)
        assert calls == OURS and close(made, expected)
    # The check of the first output ran the host's forward, which moved a layer to the GPU. A later call moved it back.
    assert lowvram.module_in_gpu is None


def test_the_host_serves_networks_whose_class_is_derived_from_a_known_one(host: Host) -> None:
    """A class derived from a known one may compute something else, even if it has the same name. Here the UNet and the
    VAE's decoder have such classes; OneDiff still serves the encoder."""
    expected = host.generate()
    host.start()
    decoder = next(module for module in host.networks()[-1].modules() if type(module).__name__ == "Decoder")
    kinds = {network: type(network) for network in (host.unet, decoder)}
    for network, kind in kinds.items():
        network.__class__ = type(kind.__name__, (kind,), {"__module__": __name__})
    try:
        made, calls = calls_of(host.generate)
        assert calls == BY_HOST and torch.equal(made.latent, expected.latent) and runtime.guard.faults == []
        # OneDiff still serves the encoder.
        assert torch.equal(made.image, expected.image) and close(made, expected)
        assert "is derived from a known one, and may compute something else" in runtime.status()["reason"]
    finally:
        for network, kind in kinds.items():
            network.__class__ = kind
    made, calls = calls_of(host.generate)
    assert calls == OURS and close(made, expected)


def test_serving_again_adds_no_hook_and_switching_off_restores_the_webui(host: Host) -> None:
    """Before each of three generations, OneDiff is switched on and the model announced once more. Switched off, the
    WebUI has the same forwards and attributes as before, no weight that is a view of a fused tensor, and the same image
    to the bit."""
    expected = host.generate()
    before = attributes(host)
    originals = host.forwards()
    kept = [{name: value.clone() for name, value in network.named_parameters()} for network in host.networks()]
    adapter = host.start()
    for _ in range(3):
        adapter.serve()
        host.announce()
        host.generate()
        assert adapter.hooks() == 1
    host.switch(False)
    host.switch(False)
    assert adapter.hooks() == 0
    assert host.forwards() == originals and attributes(host) == before
    for network, values in zip(host.networks(), kept, strict=True):
        for name, parameter in network.named_parameters():
            assert torch.equal(values[name], parameter) and not shares_storage(parameter), name
    made, calls = calls_of(host.generate)
    assert calls == {} and same(made, expected)


def test_a_script_that_the_webui_reloads_gets_the_same_adapter(host: Host) -> None:
    """The adapter hooks the WebUI's classes; a second one would hook the UNet twice."""
    expected = host.generate()
    adapter = host.start()
    host.switch(False)
    assert this_webui() is adapter and host.start() is adapter
    made, calls = calls_of(host.generate)
    assert adapter.hooks() == 1 and calls == OURS and close(made, expected)


@pytest.mark.parametrize(
    ("host", "in_place"), [*((name, False) for name in HOSTS), ("classic", True)], indirect=["host"]
)
def test_our_images_follow_loras_that_the_webui_merges_and_removes(host: Host, in_place: bool) -> None:
    """At each strength, our image is close to the one of the WebUI alone. Switched off while a LoRA is merged, OneDiff
    leaves the merged weights and the WebUI's backup of the original ones intact. in_place: whether the WebUI writes
    merged weights into the present tensors."""
    if in_place:
        host.write_in_place()
    sequence = (0.0, 0.5, 0.25, 0.0, 0.5)
    expected = []
    for strength in sequence:
        host.set_lora(strength)
        expected.append(host.generate())
    assert not close(expected[0], expected[1]) and not close(expected[1], expected[2])
    host.start()
    for strength, hosts in zip(sequence, expected, strict=True):
        host.set_lora(strength)
        made, calls = calls_of(host.generate)
        assert calls == OURS and close(made, hosts)
    host.switch(False)  # while a LoRA is merged, and the original weights are put aside
    assert same(host.generate(), expected[-1])
    host.set_lora(0.0)
    assert same(host.generate(), expected[0])
    assert not any(shares_storage(parameter) for parameter in host.unet.parameters())


@pytest.mark.parametrize("host", ["a1111"], indirect=True)
def test_a_lora_changes_the_digest_of_the_weights_and_not_that_of_the_hosts_code(host: Any) -> None:
    """The digests are keys of the verdicts on our output that other processes reuse. A LoRA is a new object each time
    it is loaded: if it counted as code, no verdict would be found again. The same LoRA gives the same digests again."""
    host.start()
    digests = []
    for strength in (0.0, 0.5, 0.0, 0.5):
        host.set_lora(strength)
        assert calls_of(host.generate)[1] == OURS
        bound = runtime.services.networks.get(host.unet).bound
        digests.append((bound.sources(), bound.identity(), bound.host_code.changes))
    assert len({sources for sources, _, _ in digests}) == 1 and digests[-1][2] == digests[0][2]
    assert digests[0] == digests[2] and digests[1] == digests[3] != digests[0]


@pytest.mark.parametrize("host", ["a1111"], indirect=True)
def test_unmerged_loras_are_computed_beside_their_layers(host: Any) -> None:
    """sequence: strengths, each with whether A1111 computes LoRAs beside the layers (option lora_functional). Our
    images are close to those of A1111 alone. At the end, lora_functional is on and no LoRA is loaded: A1111's forward
    would leave a merged LoRA in the weight, ours removes it."""
    sequence = ((0.5, False), (0.5, True), (0.25, True), (0.5, True), (0.0, False))
    expected = []
    for strength, online in sequence:
        host.set_lora(strength, online)
        expected.append(host.generate())
    host.start()
    for (strength, online), hosts in zip(sequence, expected, strict=True):
        host.set_lora(strength, online)
        made, calls = calls_of(host.generate)
        assert calls == OURS and close(made, hosts), runtime.status()["reason"]
    # With lora_functional and no LoRA loaded, A1111's own forward leaves a merged LoRA in the weight.
    host.set_lora(0.5)
    assert close(host.generate(), expected[0])
    host.set_lora(0.0, online=True)
    assert close(host.generate(), expected[-1])


@pytest.mark.parametrize("host", ["a1111"], indirect=True)
def test_the_host_serves_with_an_unmerged_network_that_is_not_a_lora(host: Any) -> None:
    """A1111 calls LoRAs and their like networks. This one is a full difference of a convolution's weight, which our
    forward cannot compute beside the layer. The reason names it."""
    host.start()
    host.set_lora(0.0, online=True)
    networks = host.module("networks")
    convolution = "input_blocks.1.0.in_layers.2"
    difference = random(*host.unet.get_submodule(convolution).weight.shape)
    networks.loaded_networks[:] = [networks.network("another kind", 0.5, {convolution: difference})]
    calls = calls_of(host.generate)[1]
    assert calls == BY_HOST and runtime.status()["reason"].startswith("another kind is not a plain LoRA")


def add_noise(h: Tensor, skip: Tensor, options: Any) -> tuple[Tensor, Tensor]:
    """An output block patch that draws random numbers, as token merging does."""
    return h + 0.1 * torch.randn_like(h), skip


@pytest.mark.parametrize("host", FAMILY, indirect=True)
def test_our_forward_calls_an_extensions_output_block_patch(host: Host) -> None:
    """The patch is in the call's transformer_options, and draws random numbers. It gets the same ones from our forward
    as from the host's, with which the image is compared."""
    def extension(patcher: Any) -> None:
        patcher.set_model_output_block_patch(add_noise)

    def generate() -> Any:
        torch.manual_seed(3)
        return host.generate(extension)

    expected = generate()
    plain = host.generate()
    assert not torch.allclose(expected.latent, plain.latent, atol=0.1)
    host.start()
    for _ in range(2):
        made, calls = calls_of(generate)
        assert calls == OURS and close(made, expected)
        assert f"patches[output_block_patch] by {__name__}" in runtime.status()["reason"]
    assert calls_of(host.generate)[1] == OURS


@pytest.mark.parametrize("host", FAMILY, indirect=True)
def test_our_forward_adds_the_residuals_of_controlnet_and_t2i_adapters(host: Host) -> None:
    """The residuals are random tensors with the shapes of the skips and of the middle block's output, which forward
    hooks record first. The image is close to the host's with the same residuals."""
    skips: list[Tensor] = []
    blocks = (*host.unet.input_blocks, host.unet.middle_block)
    hooks = [block.register_forward_hook(lambda *given: skips.append(given[-1].clone())) for block in blocks]
    plain = host.generate()
    for hook in hooks:
        hook.remove()
    *output, middle = (random(*skip.shape, seed=3) for skip in skips[:len(blocks)])
    # The host takes residuals from the ends of these lists. A T2I adapter's list has a None, and the middle's has more
    # than is used.
    adapter = [random(*skip.shape, seed=4) if place != 1 else None for place, skip in enumerate(output)]
    control = {"input": adapter[::-1], "middle": [torch.ones(1), middle], "output": output}
    expected = host.generate(control=control)
    assert relative_error(expected.latent, plain.latent) > 0.01
    host.start()
    made, calls = calls_of(lambda: host.generate(control=control))
    assert calls == OURS and close(made, expected)


def test_a_forward_on_the_unet_object_that_calls_the_class_forward_is_served_except_in_a1111(host: Host) -> None:
    """OneDiff's hook is the forward of the class, so the call still reaches it. In A1111, such an extension may also
    run the UNet's layers itself, so the host serves."""
    unet = host.unet
    expected = host.generate()
    host.start()
    unet.forward = lambda *args, **kwargs: type(unet).forward(unet, *args, **kwargs)
    try:
        made, calls = calls_of(host.generate)
    finally:
        del unet.forward
    # In A1111, ControlNet's reference mode does both.
    assert calls == (BY_HOST if host.name == "a1111" else OURS) and close(made, expected)
    assert calls_of(host.generate)[1] == OURS


@pytest.mark.parametrize("host", ["a1111"], indirect=True)
@pytest.mark.parametrize("replaced", ["the class's forward", "the caller"])
def test_the_status_names_an_extension_that_replaces_the_code_that_calls_our_hook(
    host: Host, replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """replaced: what the extension (here this module) replaces, so that no UNet call reaches OneDiff's hook. Without
    the extension, OneDiff serves again."""
    host.start()
    kind, method = {
        "the class's forward": (type(host.unet), "forward"), "the caller": (type(host.checkpoint), "apply_model"),
    }[replaced]
    with monkeypatch.context() as patch:
        patch.setattr(kind, method, lambda self, x, *given, **named: x * 0.25)
        assert calls_of(host.generate)[1] == {"host": 1}
    assert runtime.status()["reason"] == f"another extension calls the UNet in place of the WebUI ({__name__})"
    assert calls_of(host.generate)[1] == OURS


@pytest.mark.parametrize("host", ["a1111"], indirect=True)
def test_the_host_serves_with_the_old_lycoris_extension_and_the_reason_says_to_uninstall_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1111 lists the forwards that the extension has patched in modules.patches. With an empty list, OneDiff serves
    again."""
    expected = host.generate()
    layer, *_ = [each for each in host.unet.modules() if isinstance(each, nn.Linear)]
    host.start()
    patches = SimpleNamespace(originals={})
    monkeypatch.setitem(sys.modules, "modules.patches", patches)
    # The extension adds an entry while its patches are on.
    patches.originals["lyco_patches"] = {(type(layer), "forward"): type(layer).forward}
    made, calls = calls_of(host.generate)
    assert calls == BY_HOST and torch.equal(made.latent, expected.latent)
    assert "uninstall it, the WebUI has LyCORIS built in since 1.5" in runtime.status()["reason"]
    patches.originals["lyco_patches"].clear()
    assert calls_of(host.generate)[1] == OURS


@pytest.mark.parametrize("host", ["a1111"], indirect=True)
def test_the_host_serves_a_generation_in_which_an_extension_runs_the_layers_itself(host: Host) -> None:
    """As ControlNet does in A1111, the extension sets a forward on the UNet object that calls the UNet's layers. The
    reason names it. Without it, OneDiff serves again."""
    plain = host.generate()
    unet = host.unet
    unet.forward = MethodType(controlled_forward, unet)
    expected = host.generate()
    assert relative_error(expected.latent, plain.latent) > 0.01
    del unet.forward
    host.start()
    assert calls_of(host.generate)[1] == OURS
    unet.forward = MethodType(controlled_forward, unet)
    made, calls = calls_of(host.generate)
    assert calls == BY_HOST and torch.equal(made.latent, expected.latent)
    assert runtime.status()["reason"] == "contract_hosts runs the UNet's layers itself"
    del unet.forward
    made, calls = calls_of(host.generate)
    assert calls == OURS and close(made, plain)


def test_a_generation_of_a_pre_warmed_size_adds_no_table_entry_for_unet_or_decode(host: Host) -> None:
    """The table has an entry for each shape that OneDiff has prepared. Only the VAE's encode, which is not pre-warmed,
    adds one. Pre-warming leaves the WebUI's queue lock free."""
    adapter = host.start()
    assert calls_of(lambda: adapter.exclusively(lambda: adapter.warm(64, 64, 2, 77)))[1] == {"plain": 1}
    adapter.exclusively(lambda: adapter.warm_decode(48, 48, 1))
    entries = len(runtime.table.entries())
    assert calls_of(host.generate)[1] == OURS
    # The encode was not pre-warmed.
    assert len(runtime.table.entries()) == entries + 1 == 3
    assert not host.module("modules.call_queue").queue_lock.locked()


@pytest.mark.parametrize("host", ["a1111"], indirect=True)
def test_in_a1111_sgms_unet_class_for_sdxl_is_served_too(host: Host) -> None:
    """A1111 has two UNet classes: sgm's for SDXL, and ldm's for SD1 and SD2, which the other tests use."""
    host.unet_module = "sgm.modules.diffusionmodules.openaimodel"
    host.checkpoint.model.diffusion_model = host.new_unet()
    expected = host.generate()
    adapter = host.start()
    made, calls = calls_of(host.generate)
    assert calls == OURS and adapter.hooks() == 1 and close(made, expected)
    assert host.unet.get_submodule(ATTENTION) is not None and type(host.unet).__module__.startswith("sgm.")
