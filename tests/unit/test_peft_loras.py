"""LoRAs as diffusers loads them, by peft, are computed by our forward: beside their layers, and merged."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_arguments, diffusers_output, diffusers_unet, relative_error, served
from torch import Tensor, nn

import lib_onediff
from lib_onediff.runtime.runtime import runtime

pytest.importorskip("peft")
CLOSE, SHOWS = 1e-5, 1e-3
ATTENTIONS = ["to_q", "to_k", "to_v", "to_out.0"]
QUERY_AND_KEY = ["to_q", "to_k"]
# A kernel, a stride, 1x1, and everything that is linear.
CONVOLUTIONS = ["conv1", "conv2", "downsamplers.0.conv", "upsamplers.0.conv", "conv_shortcut", "conv_in", "conv_out"]
EVERYTHING = [*ATTENTIONS, *CONVOLUTIONS, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out", "time_emb_proj",
              "linear_1", "linear_2"]
TO_QUERY = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


def add(unet: Any, targets: list[str] = ATTENTIONS, name: str = "a", seed: int = 1, **config: Any) -> None:
    """A LoRA of random numbers that shows."""
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


def files(unet: Any, seed: int, rank: int, targets: tuple[str, ...] = ("to_q", "to_v")) -> dict[str, Tensor]:
    """A LoRA as in a file."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for path, module in unet.named_modules():
        if isinstance(module, nn.Linear) and path.removesuffix(".base_layer").endswith(targets):
            path = path.removesuffix(".base_layer")
            state[f"{path}.lora_A.weight"] = 0.1 * torch.randn(rank, module.in_features, generator=generator)
            state[f"{path}.lora_B.weight"] = 0.1 * torch.randn(module.out_features, rank, generator=generator)
    return state


def load(unet: Any, seed: int, rank: int, **how: Any) -> None:
    unet.load_lora_adapter(files(unet, seed, rank), prefix=None, adapter_name="a", **how)


def half_factors(unet: Any) -> None:
    add(unet)
    for path, parameter in unet.named_parameters():
        if "lora_" in path:
            # Those numbers that both types have: the host computes in float32 in either case.
            parameter.data = parameter.data.half().float()
            if "lora_A" in path and "attn1" in path:
                parameter.data = parameter.data.double()


def with_bias(unet: Any) -> None:
    add(unet, ["to_out.0", "conv1", "time_emb_proj"], lora_bias=True)


CASES: dict[str, Callable[[Any], None]] = {
    "attentions": add,
    "to_q and to_k of fused layers": lambda unet: add(unet, QUERY_AND_KEY),
    "everything": lambda unet: add(unet, EVERYTHING),
    "other ranks and alphas by layer": lambda unet: add(
        unet, EVERYTHING, rank_pattern={"to_q": 2, "conv1": 3, "to_v": 9}, alpha_pattern={"to_q": 0, "to_k": 1.5}
    ),
    "rank-stabilised": lambda unet: add(unet, use_rslora=True),
    "another type": half_factors,
    "biases": with_bias,
    "dropout": lambda unet: add(unet, lora_dropout=0.5) or unet.eval(),
    "two": lambda unet: two(unet, [0.5, 0.3]),
    "two, one at nothing": lambda unet: two(unet, [1.0, 0.0]),
    "two, by block": lambda unet: two(unet, [{"down": 0.7, "mid": 0.2, "up": 1.5}, 2.0]),
    "one of two": lambda unet: two(unet, 1.0) or unet.set_adapters("b", 0.5),
    "one of two deleted": lambda unet: two(unet, 1.0) or unet.delete_adapters("a"),
    "disabled": disabled,
    "enabled again": lambda unet: disabled(unet) or unet.enable_lora(),
    "merged": fused,
    "merged in part": lambda unet: fused(unet, lora_scale=0.7),
    "merged safely": lambda unet: fused(unet, safe_fusing=True),
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


def is_ours(unet: Any, seed: int = 0, **others: Any) -> Tensor:
    """Our answer to a call, which is the host's. Another context: nothing is known of it."""
    call = a_call(unet, seed=seed)
    output = served(unet, call, **others)
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
    assert relative_error(output, diffusers_output(unet, call, **others)) < CLOSE
    return output


def is_the_hosts(unet: Any, reason: str, seed: int = 0, **others: Any) -> None:
    call = a_call(unet, seed=seed)
    output = served(unet, call, **others)
    assert lib_onediff.status()["route"] == "host" and reason in lib_onediff.status()["reason"], lib_onediff.status()
    assert torch.equal(output, diffusers_output(unet, call, **others))


@pytest.mark.parametrize("change", CASES.values(), ids=CASES)
def test_every_state_of_loras(change: Callable[[Any], None], request: pytest.FixtureRequest) -> None:
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    plain, lay = is_ours(unet), addresses(unet)
    change(unet)
    output = is_ours(unet, seed=1)
    different = relative_error(output, without(unet, seed=1)) > SHOWS
    assert different is (request.node.callspec.id not in SAME_AS_WITHOUT)
    if "safely" not in request.node.callspec.id:
        assert addresses(unet) == lay
    if "merged" in request.node.callspec.id:
        unet.unfuse_lora()
    unet.unload_lora()
    assert relative_error(is_ours(unet), plain) < CLOSE
    lib_onediff.uncompile_unet(unet)


def without(unet: Any, seed: int) -> Tensor:
    return diffusers_output(diffusers_unet(**SMALL_XL), a_call(unet, seed=seed))
