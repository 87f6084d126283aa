"""Binding a network's weights to our forward: the host's parameters become views of fused tensors, so that no weight is
stored twice; unbinding makes them ordinary parameters again."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, SD1, SDXL, a_call, diffusers_unet, ldm_unet, our_output, relative_error, served
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lib_onediff
from lib_onediff.core.refusal import Refusal
from lib_onediff.families.registry import FAMILIES
from lib_onediff.weights.binding import Binding

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "SD1": lambda: diffusers_unet(**SD1), "SDXL": lambda: diffusers_unet(**SDXL), "ldm": ldm_unet,
}
EVERY_UNET = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


def storage_bytes(unet: nn.Module) -> int:
    """The bytes of all storages of a module's parameters, each counted once."""
    storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in unet.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def values(unet: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in unet.named_parameters()}


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Whether two results of values() are equal to the bit."""
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def addresses_of(binding: Binding) -> list[int]:
    return [parameter.data_ptr() for parameter in binding.layers.parameters()]


@EVERY_UNET
def test_binding_needs_no_more_memory_and_unbinding_restores_ordinary_parameters(build: Callable) -> None:
    """bind() returns the number of bytes that it copied: of the fused layers' weights at the first time, 0 at the
    second. No bit of a weight changes."""
    unet = build()
    size = storage_bytes(unet)
    objects = dict(unet.named_parameters())
    before = values(unet)
    trainable = {name: parameter.requires_grad for name, parameter in objects.items()}
    for _ in range(2):
        binding = Binding(unet, FAMILIES.read(unet))
        members = [member for fusion in binding.layout.fusions() for member in fusion.members]
        parts = [f"{member.path}.weight" for member in members]
        parts += [f"{member.path}.bias" for member in binding.layout.embeddings.members]
        expected = sum(unet.get_parameter(part).nbytes for part in parts)
        assert binding.bind() == expected
        addresses = addresses_of(binding)
        assert binding.bind() == Binding(unet, FAMILIES.read(unet)).bind() == 0
        assert addresses_of(binding) == addresses and storage_bytes(unet) <= size + 4096 and same(before, values(unet))
        binding.unbind()
        assert storage_bytes(unet) == size and same(before, values(unet))
    after = dict(unet.named_parameters())
    assert all(after[name] is parameter for name, parameter in objects.items())
    assert {name: parameter.requires_grad for name, parameter in after.items()} == trainable
    for parameter in after.values():
        assert type(parameter) is nn.Parameter and parameter.is_contiguous() and parameter.storage_offset() == 0
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_binding_never_writes_into_a_storage_that_the_host_may_keep() -> None:
    """Before it merges a LoRA, a host keeps the original weight by a view of its memory. Here it keeps such views from
    before and after the first bind(), then sets a merged weight, which is bound. Neither view changes."""
    unet = diffusers_unet()
    layer = unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_k
    backup = layer.weight.detach()
    first = backup.clone()
    binding = Binding(unet, FAMILIES.read(unet))
    binding.bind()
    backup_of_view = layer.weight.detach()
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    binding.bind()
    assert torch.equal(backup, first)
    assert torch.equal(backup_of_view, first)
    assert torch.equal(layer.weight, first * 2)


@pytest.mark.parametrize("create_in_inference_mode", [True, False])
@pytest.mark.parametrize("call_in_inference_mode", [True, False])
def test_a_unet_made_or_called_in_inference_mode_is_served_and_restored(
    create_in_inference_mode: bool, call_in_inference_mode: bool
) -> None:
    """torch forbids some edits and views of parameters that were made in inference mode. After uncompile_unet(), the
    values and each parameter's mode are as before."""
    with torch.inference_mode(create_in_inference_mode):
        unet = diffusers_unet(**SDXL)
    before = values(unet)
    lib_onediff.compile_unet(unet)
    with torch.inference_mode(call_in_inference_mode):
        call = a_call(unet)
        for _ in range(2):
            output = served(unet, call)
            assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
    with torch.no_grad():
        assert relative_error(output.clone(), our_output(diffusers_unet(**SDXL), call)) < 1e-5
    lib_onediff.uncompile_unet(unet)
    assert same(before, values(unet))
    assert all(parameter.is_inference() == create_in_inference_mode for parameter in unet.parameters())


def test_a_unet_made_in_inference_mode_and_moved_outside_of_it_is_served() -> None:
    """A host moves a model between devices outside of inference mode; here double() and float() replace the parameters'
    data. The output is compared with that from before."""
    with torch.inference_mode():
        unet = diffusers_unet(**SDXL)
    call = a_call(unet)
    with torch.inference_mode():
        expected = our_output(unet, call)
    lib_onediff.compile_unet(unet)
    for _ in range(2):
        unet.double()
        unet.float()
        with torch.inference_mode():
            assert relative_error(served(unet, call), expected) < 1e-5
        assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]


def test_a_unet_with_a_lora_merged_in_inference_mode_is_served() -> None:
    """Only the merged weights were made in inference mode. Each parameter keeps its mode."""
    unet = diffusers_unet(**SDXL)
    call = a_call(unet)
    for name, layer in unet.named_modules():
        if name.endswith(("to_q", "to_v")):
            with torch.inference_mode():
                layer.weight = nn.Parameter(layer.weight * 1.5, requires_grad=False)
    kinds = [parameter.is_inference() for parameter in unet.parameters()]
    expected = our_output(unet, call)
    lib_onediff.compile_unet(unet)
    for _ in range(2):
        assert relative_error(served(unet, call), expected) < 1e-5, lib_onediff.status()["reason"]
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
    assert [parameter.is_inference() for parameter in unet.parameters()] == kinds


@pytest.mark.parametrize(("spoil", "reason"), [
    (lambda unet: unet.mid_block.resnets[0].conv1.half(),
     "its weights are of mixed types: torch.float32, but .* is torch.float16"),
    (lambda unet: unet.mid_block.resnets[0].conv1.to_empty(device="meta"),
     "weights are not loaded .they are on PyTorch.s meta device."),
    (lambda unet: unet.to_empty(device="meta"), "weights are not loaded .they are on PyTorch.s meta device."),
    (lambda unet: unet.mid_block.resnets[0].conv1.to(torch.float8_e4m3fn),
     "mid_block.resnets.0.conv1 is stored as float8_e4m3fn"),
], ids=["mixed", "partly meta", "meta", "float8"])
def test_unsupported_weights_are_refused_in_one_line_and_left_alone(spoil: Callable, reason: str) -> None:
    """spoil: makes a weight of the UNet unsupported. reason: the text of the Refusal that bind() raises, a pattern."""
    unet = diffusers_unet()
    spoil(unet)
    binding = Binding(unet, FAMILIES.read(unet))
    addresses = addresses_of(binding)
    with pytest.raises(Refusal, match=reason) as refusal:
        binding.bind()
    assert "\n" not in str(refusal.value)
    assert addresses_of(binding) == addresses


def test_float8_weights_are_bound_if_the_host_casts_them_unless_fused_layers_differ() -> None:
    """cast_to: the dtype to which the host casts each weight at each use; by default it casts none. Layers that are
    fused must be stored in one dtype."""
    unet = diffusers_unet()
    for layer in unet.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.to(torch.float8_e4m3fn)
    before = {name: value.float() for name, value in values(unet).items()}
    binding = Binding(unet, FAMILIES.read(unet))
    with pytest.raises(Refusal, match="is stored as float8_e4m3fn"):
        binding.bind()
    binding.cast_to = torch.float16
    binding.bind()
    assert binding.dtype == torch.float16 and binding.layers.dtype == torch.float8_e4m3fn
    assert same(before, {name: value.float() for name, value in values(unet).items()})
    unet.get_submodule(binding.fusions[0].members[0].path).half()
    with pytest.raises(Refusal, match=f"the layers of {binding.fusions[0].name} are stored in several types"):
        binding.bind()


def test_a_bound_unet_is_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    """By safetensors, torch.save and diffusers. The values are the same, and the file of torch.save has no weight
    twice."""
    from diffusers import UNet2DConditionModel
    from safetensors.torch import load_file, save_file

    unet = diffusers_unet()
    before = values(unet)
    lib_onediff.compile_unet(unet)
    served(unet, a_call(unet))
    save_file(unet.state_dict(), tmp_path / "weights.safetensors")
    assert same(before, load_file(tmp_path / "weights.safetensors"))
    torch.save(unet.state_dict(), tmp_path / "weights.pt")
    assert same(before, torch.load(tmp_path / "weights.pt", weights_only=True))
    assert (tmp_path / "weights.pt").stat().st_size < 1.1 * storage_bytes(unet)
    unet.save_pretrained(tmp_path / "folder")
    loaded = UNet2DConditionModel.from_pretrained(tmp_path / "folder", cross_attention_dim=CONTEXT_WIDTH)
    assert same(before, values(loaded))


def test_unbinding_on_a_full_gpu_restores_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """unbind() copies each weight out of the fused memory by copy_of(), which here raises OutOfMemoryError each time.
    It must then do without more GPU memory."""
    unet = diffusers_unet(**SDXL)
    before = values(unet)
    binding = Binding(unet, FAMILIES.read(unet))
    binding.bind(True)
    full = 0

    def no_room(source: Tensor, *given: object) -> Tensor:
        nonlocal full
        full += 1
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lib_onediff.weights.binding, "copy_of", no_room)
    binding.unbind()
    monkeypatch.undo()
    assert full > 2 and same(before, values(unet))
    assert all(parameter.is_contiguous() for parameter in unet.parameters())


class Louder(TorchDispatchMode):
    """A dispatch mode that multiplies the result of aten.clone by 1.1."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made * 1.1 if function is torch.ops.aten.clone.default else made


@pytest.mark.parametrize("name", ["contiguous", "clone", "copy_", "detach", "split", "cpu", "to", "a mode"])
def test_binding_keeps_every_bit_if_an_extension_has_replaced_a_function_of_torch(
    monkeypatch: pytest.MonkeyPatch, name: str,
) -> None:
    """name: the method of Tensor that an extension has replaced by one whose results are multiplied by 1.1; "a mode":
    see Louder. Binding to channels-last memory and unbinding must not use it, because a wrong weight would stay
    wrong."""
    unet = diffusers_unet(**SD1)
    before = values(unet)
    binding = Binding(unet, FAMILIES.read(unet))
    with monkeypatch.context() as patch:
        around: Any = Louder() if name == "a mode" else nullcontext()
        if name != "a mode":
            theirs = getattr(Tensor, name)

            def louder(*args: Any, **kwargs: Any) -> Any:
                made = theirs(*args, **kwargs)
                return [one * 1.1 for one in made] if isinstance(made, tuple) else made * 1.1

            patch.setattr(Tensor, name, louder)
        with around:
            binding.bind(channels_last=True)
    assert same(before, values(unet))
    kernels = [one for one in unet.parameters() if one.dim() == 4 and one.shape[-1] > 1]
    assert kernels and all(one.is_contiguous(memory_format=torch.channels_last) for one in kernels)
    with monkeypatch.context() as patch:
        if name != "a mode":
            patch.setattr(Tensor, name, louder)
        with Louder() if name == "a mode" else nullcontext():
            binding.unbind()
    assert same(before, values(unet))


def test_only_weights_that_a_binding_made_channels_last_are_made_contiguous_again() -> None:
    """Every second convolution's weight is channels-last before the binding, and stays so."""
    unet = diffusers_unet(**SD1)
    convolutions = [one for one in unet.parameters() if one.dim() == 4 and one.shape[-1] > 1]
    theirs = convolutions[::2]
    ours = convolutions[1::2]
    for weight in theirs:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    binding = Binding(unet, FAMILIES.read(unet))
    binding.bind(channels_last=True)
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in convolutions)
    binding.bind(channels_last=False)
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in theirs)
    assert all(one.is_contiguous() for one in ours)
    assert binding.restore_memory_formats() == 0
