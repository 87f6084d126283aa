"""Our forward computes LoRAs that diffusers loads with peft, merged or not, or leaves them to diffusers with a
reason."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served
from torch import Tensor, nn

import lib_onediff
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.runtime import runtime

pytest.importorskip("peft")
CLOSE = 1e-5
SHOWS = 1e-3
ATTENTIONS = ["to_q", "to_k", "to_v", "to_out.0"]
QUERY_AND_KEY = ["to_q", "to_k"]
# Convolutions with a large kernel, with a stride and with a kernel of one pixel.
CONVOLUTIONS = ["conv1", "conv2", "downsamplers.0.conv", "upsamplers.0.conv", "conv_shortcut", "conv_in", "conv_out"]
EVERYTHING = [*ATTENTIONS, *CONVOLUTIONS, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out", "time_emb_proj",
              "linear_1", "linear_2"]
TO_QUERY = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


def add(unet: Any, targets: list[str] = ATTENTIONS, name: str = "a", seed: int = 1, **config: Any) -> None:
    """Add a LoRA of random numbers, which visibly changes the output."""
    from peft import LoraConfig

    unet.add_adapter(LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": targets, **config}), name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in unet.named_parameters():
            if "lora_" in path and f".{name}." in path:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    unet.requires_grad_(False)


def two(unet: Any, weights: Any) -> None:
    add(unet)
    add(unet, QUERY_AND_KEY, name="b", seed=2, r=2)
    unet.set_adapters(["a", "b"], weights)


def fused(unet: Any, **how: Any) -> None:
    add(unet)
    unet.fuse_lora(**how)


def disabled(unet: Any) -> None:
    add(unet)
    unet.disable_lora()


def files(unet: Any, seed: int, rank: int) -> dict[str, Tensor]:
    """Random tensors as in a LoRA's file."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for path, module in unet.named_modules():
        if isinstance(module, nn.Linear) and path.removesuffix(".base_layer").endswith(("to_q", "to_v")):
            path = path.removesuffix(".base_layer")
            state[f"{path}.lora_A.weight"] = 0.1 * torch.randn(rank, module.in_features, generator=generator)
            state[f"{path}.lora_B.weight"] = 0.1 * torch.randn(module.out_features, rank, generator=generator)
    return state


def needs_adapters(unet: Any) -> None:
    if not hasattr(unet, "load_lora_adapter"):
        pytest.skip("diffusers 0.30 loads and unloads LoRAs of pipelines alone")


def load(unet: Any, seed: int, rank: int, **how: Any) -> None:
    needs_adapters(unet)
    unet.load_lora_adapter(files(unet, seed, rank), prefix=None, adapter_name="a", **how)


def doubles(unet: Any) -> None:
    add(unet)
    for path, parameter in unet.named_parameters():
        if "lora_" in path:
            parameter.data = parameter.data.double()


def in_type(unet: Any, dtype: torch.dtype, name: str = "lora_") -> None:
    """Cast the LoRAs' parameters whose path contains `name`, as if loaded from a file in this dtype."""
    for path, parameter in unet.named_parameters():
        if "lora_" in path and name in path:
            parameter.data = parameter.data.to(dtype)


def in_half(unet: Any, dtype: torch.dtype, **config: Any) -> None:
    """Add LoRAs in this dtype, as strong as real ones. Stronger ones would amplify its rounding, and fail the check."""
    add(unet, [*ATTENTIONS, "conv1", "conv_shortcut"], **{"lora_alpha": 0.3, **config})
    in_type(unet, dtype)


def two_in_half(unet: Any) -> None:
    two(unet, [0.07, 0.03])
    in_type(unet, torch.float16)


def with_bias(unet: Any) -> None:
    add(unet, ["to_out.0", "conv1", "time_emb_proj"], lora_bias=True)


CASES: dict[str, Callable[[Any], object]] = {
    "attentions": add,
    "to_q and to_k of fused layers": lambda unet: add(unet, QUERY_AND_KEY),
    "everything": lambda unet: add(unet, EVERYTHING),
    "other ranks and alphas by layer": lambda unet: add(
        unet, EVERYTHING, rank_pattern={"to_q": 2, "conv1": 3, "to_v": 9}, alpha_pattern={"to_q": 0, "to_k": 1.5}
    ),
    "another type": doubles,
    "in float16": lambda unet: in_half(unet, torch.float16),
    "in bfloat16, of an odd scale": lambda unet: in_half(unet, torch.bfloat16, lora_alpha=0.13),
    "two in float16": two_in_half,
    "biases": with_bias,
    "dropout": lambda unet: add(unet, lora_dropout=0.5) or unet.eval(),
    "two": lambda unet: two(unet, [0.5, 0.3]),
    "two, by block": lambda unet: two(unet, [{"down": 0.7, "mid": 0.2, "up": 1.5}, 2.0]),
    "one of two": lambda unet: two(unet, 1.0) or unet.set_adapters("b", 0.5),
    "disabled": disabled,
    "enabled again": lambda unet: disabled(unet) or unet.enable_lora(),
    "merged": fused,
    "merged in part": lambda unet: fused(unet, lora_scale=0.7),
    "taken out again": lambda unet: fused(unet) or unet.unfuse_lora(),
    "one of two merged": lambda unet: two(unet, [0.5, 0.3]) or unet.fuse_lora(adapter_names=["b"]),
    "from a file": lambda unet: load(unet, seed=1, rank=3),
}
SAME_AS_WITHOUT = {"disabled"}


def addresses(unet: Any) -> dict[str, int]:
    return {
        path.replace(".base_layer", ""): parameter.data_ptr()
        for path, parameter in unet.named_parameters() if "lora_" not in path
    }


def checked_output(unet: Any, seed: int = 0, call: UNetCall | None = None, **others: Any) -> Tensor:
    """The output of a call. Asserts that OneDiff computed it and that it is close to diffusers' own. call: one of the
    same sampling; None: a call of a new sampling."""
    call = call or a_call(unet, seed=seed)
    output = served(unet, call, **others)
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
    assert relative_error(output, diffusers_output(unet, call, **others)) < CLOSE
    return output


def assert_left_to_the_host(unet: Any, reason: str, **others: Any) -> None:
    """Assert that a call's output is diffusers' own, to the bit, for this reason."""
    call = a_call(unet)
    output = served(unet, call, **others)
    assert lib_onediff.status()["route"] == "host" and reason in lib_onediff.status()["reason"], lib_onediff.status()
    assert torch.equal(output, diffusers_output(unet, call, **others))


@pytest.mark.parametrize("change", CASES.values(), ids=CASES)
def test_our_forward_computes_loras_in_every_state_without_moving_weights(
    change: Callable[[Any], object], request: pytest.FixtureRequest
) -> None:
    """The output is close to diffusers' own, and differs from that of a UNet without LoRAs. The addresses of the UNet's
    weights stay. After the LoRAs are unloaded, the output is that of before. change: one of CASES."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    plain = checked_output(unet)
    lay = addresses(unet)
    change(unet)
    output = checked_output(unet, seed=1)
    different = relative_error(output, output_without_loras(unet, seed=1)) > SHOWS
    assert different is (request.node.callspec.id not in SAME_AS_WITHOUT)
    assert addresses(unet) == lay
    if "merged" in request.node.callspec.id:
        unet.unfuse_lora()
    unet.unload_lora()
    assert relative_error(checked_output(unet), plain) < CLOSE
    lib_onediff.uncompile_unet(unet)


def output_without_loras(unet: Any, seed: int) -> Tensor:
    return diffusers_output(diffusers_unet(**SMALL_XL), a_call(unet, seed=seed))


def test_changes_of_loras_between_calls_take_effect_at_the_next_call() -> None:
    """Each output is close to diffusers' own, and differs from all others. After the first LoRA is loaded, edits of its
    strength or values move no weights (epoch.addresses), so that CUDA graphs stay valid."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    checked_output(unet)
    generation = runtime.services.networks.get(unet).bound.epoch.addresses
    call = a_call(unet)
    load(unet, seed=1, rank=3)
    outputs = [checked_output(unet, call=call)]
    moved = runtime.services.networks.get(unet).bound.epoch.addresses
    assert moved > generation
    steps: list[Callable[[], object]] = [
        lambda: unet.set_adapters("a", 0.5),
        # torch.utils.swap_tensors fails if there are weak references to the tensors, so we must keep none.
        lambda: load(unet, seed=2, rank=3, hotswap=True),
        lambda: unet.get_submodule(TO_QUERY).lora_B["a"].weight.add_(0.1),
        lambda: unet.get_submodule(TO_QUERY).scaling.update(a=3.0),
    ]
    with torch.no_grad():
        for step in steps:
            step()
            outputs.append(checked_output(unet, call=call))
            assert runtime.services.networks.get(unet).bound.epoch.addresses == moved
    load(unet, seed=3, rank=5, hotswap=True)
    outputs.append(checked_output(unet))
    add(unet, ["conv1"], name="b")
    unet.set_adapters(["a", "b"])
    outputs.append(checked_output(unet))
    unet.disable_lora()
    outputs.append(checked_output(unet))
    for index, output in enumerate(outputs):
        assert all(relative_error(output, other) > SHOWS for other in outputs[index + 1:])


def dora(unet: Any) -> None:
    add(unet, use_dora=True)


def loha(unet: Any) -> None:
    import peft

    peft.inject_adapter_in_model(peft.LoHaConfig(target_modules=["to_q"]), unet, "a")
    unet.eval()


def hooked(unet: Any, path: str) -> None:
    add(unet)
    unet.get_submodule(path).register_forward_hook(lambda module, given, output: 2 * output)


def replaced(unet: Any, path: str) -> None:
    add(unet)
    layer = unet.get_submodule(path)
    layer.forward = lambda *given: 2 * type(layer).forward(layer, *given)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "DoRA": (dora, "the LoRA a is of a kind that OneDiff does not support (D"),
    "LoHa": (loha, "peft.tuners.loha.layer.Linear"),
    "modules to save": (lambda unet: add(unet, modules_to_save=["conv_out"]), "peft.utils.other.ModulesToSaveWrapper"),
    "a hook on a LoRA": (lambda unet: hooked(unet, TO_QUERY), f"has set a hook on {TO_QUERY}"),
    "a hook within": (lambda unet: hooked(unet, f"{TO_QUERY}.lora_A.a"), f"has set a hook on {TO_QUERY}.lora_A.a"),
    "another forward": (lambda unet: replaced(unet, TO_QUERY), f"{TO_QUERY}.forward was replaced by"),
    "another forward within": (
        lambda unet: replaced(unet, f"{TO_QUERY}.base_layer"), f"{TO_QUERY}.base_layer.forward was replaced by"
    ),
    "training": (lambda unet: add(unet, lora_dropout=1e-9) or unet.train(), "drops values"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_diffusers_computes_a_lora_that_our_forward_does_not_support(
    change: Callable[[Any], object], reason: str
) -> None:
    """The LoRA is of another kind, has a hook or a replaced forward on its layers, or is in training mode. change: one
    of REFUSED. reason: a part of the reason in the status."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    change(unet)
    assert_left_to_the_host(unet, reason)
    unet.unload_lora()


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_a_calls_lora_scale_applies_to_that_call_only(scale: float) -> None:
    """The scale is an item of cross_attention_kwargs; diffusers sets it on all layers during the call. Calls with and
    without it alternate, and each output is close to diffusers'."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    other = diffusers_unet(**SMALL_XL)
    given = {"cross_attention_kwargs": {"scale": scale}}
    for one in (unet, other):
        two(one, [0.5, 0.3])
    call = a_call(unet)
    for others in ({}, given, given, {}):
        output = served(unet, call, **others)
        expected = diffusers_output(other, call, **others)
        assert lib_onediff.status()["route"] == "plain" and relative_error(output, expected) < CLOSE
    assert given == {"cross_attention_kwargs": {"scale": scale}}
    assert unet.get_submodule(TO_QUERY).scaling == other.get_submodule(TO_QUERY).scaling


def test_diffusers_computes_a_lora_scale_that_our_forward_cannot_apply() -> None:
    """The scale is 0, or the LoRA is on a layer that diffusers does not scale, or diffusers' own modules compute the
    attentions (SlicedAttnProcessor)."""
    given = {"cross_attention_kwargs": {"scale": 0.5}}
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    assert_left_to_the_host(unet, "the pipeline's LoRA scale is 0", cross_attention_kwargs={"scale": 0})
    checked_output(unet, **given)
    add(unet, ["to_q", "time_embedding.linear_1"])
    assert_left_to_the_host(unet, "the pipeline sets a LoRA scale", **given)
    needs_adapters(unet)
    unet.unload_lora()
    add(unet)
    from diffusers.models.attention_processor import SlicedAttnProcessor

    unet.set_attn_processor(SlicedAttnProcessor(2))
    assert_left_to_the_host(unet, "the pipeline sets a LoRA scale", **given)
    checked_output(unet)


def test_diffusers_computes_while_its_projections_are_fused() -> None:
    """fuse_qkv_projections() joins the layers that our forward reads. The reason names the function that undoes it."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    unet.fuse_qkv_projections()
    assert_left_to_the_host(unet, "unfuse_qkv_projections()")
    unet.unfuse_qkv_projections()
    checked_output(unet)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_diffusers_computes_if_a_half_precision_lora_amplifies_rounding(dtype: torch.dtype) -> None:
    """This LoRA is ten times as strong as real ones. It amplifies the different rounding of both forwards, and the
    check of the first call finds that the outputs differ."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    add(unet, EVERYTHING)
    in_type(unet, dtype)
    assert_left_to_the_host(unet, "differs too much from the one without OneDiff")


def test_diffusers_computes_loras_of_several_dtypes_and_loras_whose_inputs_are_not_cast() -> None:
    """One of two LoRAs is cast to float16, then both, which our forward computes. With peft's casting of inputs
    switched off, the caller gets diffusers' own error about dtypes."""
    helpers = pytest.importorskip("peft.helpers")
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    two(unet, [0.05, 0.03])
    checked_output(unet)
    in_type(unet, torch.float16, ".b.")
    assert_left_to_the_host(unet, "stored in several types")
    in_type(unet, torch.float16)
    checked_output(unet, seed=1)
    if not hasattr(helpers, "disable_input_dtype_casting"):
        pytest.skip("this release of peft always casts")
    with helpers.disable_input_dtype_casting(unet), pytest.raises(RuntimeError, match="same dtype"):
        served(unet, a_call(unet))
    checked_output(unet, seed=2)


def test_diffusers_is_called_for_a_lora_on_the_meta_device() -> None:
    """While peft loads a LoRA, its weights are on the meta device and have no values."""
    from peft import LoraConfig

    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    checked_output(unet)
    with torch.device("meta"):
        unet.add_adapter(LoraConfig(r=4, target_modules=QUERY_AND_KEY), "a")
    unet.requires_grad_(False)
    for _ in range(2):
        served(unet, a_call(unet))
        assert lib_onediff.status()["reason"].endswith(
            "its weights are not loaded (they are on PyTorch's meta device)"
        )
    unet.unload_lora()
    checked_output(unet)
