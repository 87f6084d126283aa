"""IP-Adapters, FreeU, PAG and other attention processors of a diffusers UNet: our forward computes them itself, or
calls their functions."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import (
    CONTEXT_WIDTH,
    SD1,
    SMALL,
    SMALL_XL,
    a_call,
    compute,
    diffusers_arguments,
    diffusers_output,
    diffusers_unet,
    randomise,
    relative_error,
    served,
)
from own_forward import own_forward
from torch import Tensor

import lib_onediff
from lib_onediff.core.inputs import bytes_of, cloned_inputs, copy_inputs
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.hosts.diffusers.module_forward import attached
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5
EMBEDDING = 16
FREEU = (0.9, 0.2, 1.4, 1.6)
ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn1"


def projection(kind: str) -> Any:
    from diffusers.models.embeddings import ImageProjection, IPAdapterPlusImageProjection

    if kind == "plain":
        return ImageProjection(EMBEDDING, CONTEXT_WIDTH, 4)
    return IPAdapterPlusImageProjection(EMBEDDING, CONTEXT_WIDTH, hidden_dims=32, depth=2, dim_head=16, heads=2)


def load_ip_adapters(unet: Any, *kinds: str, scale: Any = 0.7) -> None:
    """Add IP-Adapters with random weights, as the modules that diffusers creates from their files."""
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
    from diffusers.models.embeddings import MultiIPAdapterImageProjection

    unet.set_attn_processor({
        name: randomise(IPAdapterAttnProcessor2_0(
            unet.get_submodule(name.removesuffix(".processor")).inner_dim, CONTEXT_WIDTH, (4,) * len(kinds),
            [scale] * len(kinds),
        )) if ".attn2." in name else processor
        for name, processor in unet.attn_processors.items()
    })
    unet.encoder_hid_proj = randomise(MultiIPAdapterImageProjection(list(map(projection, kinds))))
    unet.config.encoder_hid_dim_type = "ip_image_proj"


def unload_ip_adapters(unet: Any) -> None:
    unet.encoder_hid_proj = unet.config.encoder_hid_dim_type = None
    unet.set_default_attn_processor()


def images(*kinds: str, count: int = 1, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"plain": (2, count, EMBEDDING), "plus": (2, count, 7, EMBEDDING)}
    return [torch.randn(shapes[kind], generator=generator) for kind in kinds]


def both(unet: Any, embeddings: list[Tensor] | None = None, seed: int = 0, **others: Any) -> tuple[Tensor, Tensor]:
    """(our output, diffusers' own output) of a call."""
    given = {**diffusers_arguments(a_call(unet, seed=seed)), **others}
    if embeddings is not None:
        given["added_cond_kwargs"] = {**(given.get("added_cond_kwargs") or {}), "image_embeds": embeddings}
    with torch.no_grad():
        return unet(**given).sample, own_forward(unet)(**given).sample


def added(what: str) -> bool:
    """Whether the last call was computed by our forward alone, with an addition whose name contains these words."""
    key = runtime.call_stats.last_call.entry.key
    return lib_onediff.status()["route"] == "plain" and not key.patches and any(what in one for one in key.additions)


def within(reason: str) -> bool:
    """Whether our forward computed the last call, with these words in the reason: it names functions that it called."""
    status = lib_onediff.status()
    return status["route"] == "plain" and reason in status["reason"]


@pytest.mark.parametrize("kinds", [("plain",), ("plus",), ("plain", "plus")], ids="+".join)
@pytest.mark.parametrize("config", [SMALL, SD1, SMALL_XL], ids=["small", "SD1", "XL"])
def test_with_ip_adapters_our_output_is_close_to_diffusers(config: dict[str, Any], kinds: tuple[str, ...]) -> None:
    """Our forward computes the image prompts itself (see added). Embeddings of zeros must change the output, and after
    unloading the adapters, it must equal the output before loading them. kinds: the image projection of each
    adapter."""
    unet = lib_onediff.compile_unet(diffusers_unet(**config))
    plain = served(unet, a_call(unet))
    load_ip_adapters(unet, *kinds)
    for seed in (1, 2):
        output, expected = both(unet, images(*kinds, seed=seed), seed=seed)
        assert relative_error(output, expected) < CLOSE
        assert added("an image prompt of"), lib_onediff.status()
    without = both(unet, [0 * embedding for embedding in images(*kinds)], seed=2)[0]
    assert relative_error(without, expected) > 100 * CLOSE
    unload_ip_adapters(unet)
    assert torch.equal(served(unet, a_call(unet)), plain) and not added("image")


@pytest.mark.parametrize("config", [SD1, SMALL_XL], ids=["SD1", "XL"])
def test_with_freeu_our_output_is_close_to_diffusers_and_is_as_before_after_disabling_it(
    config: dict[str, Any]
) -> None:
    """Our forward calls FreeU's functions (see within). After disable_freeu(), the output equals the one before to the
    bit."""
    unet = lib_onediff.compile_unet(diffusers_unet(**config))
    call = a_call(unet, 16, 16)
    plain = served(unet, call)
    unet.enable_freeu(*FREEU)
    call = a_call(unet, 16, 16)
    output = served(unet, call)
    expected = diffusers_output(unet, call)
    assert relative_error(output, expected) < CLOSE and relative_error(output, plain) > 100 * CLOSE
    assert within("FreeU")
    unet.disable_freeu()
    assert torch.equal(served(unet, a_call(unet, 16, 16)), plain)


@pytest.mark.parametrize("zero", ["all but one", "one"])
def test_an_ip_adapter_is_computed_only_in_attentions_with_a_scale_above_0(zero: str) -> None:
    """InstantStyle uses an adapter in some blocks only. The status says in how many attentions it is computed. zero:
    how many attentions have a scale of 0."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL))
    load_ip_adapters(unet, "plain")
    adapters = [one for one in unet.attn_processors.values() if hasattr(one, "to_k_ip")]
    for one in adapters[:1] if zero == "one" else adapters[1:]:
        one.scale = [0.0]
    output, expected = both(unet, images("plain"))
    count = len(adapters) - 1 if zero == "one" else 1
    assert relative_error(output, expected) < CLOSE and added(f"in {count} attentions")


def test_a_call_without_the_image_of_the_ip_adapter_raises_the_exception_of_diffusers() -> None:
    """diffusers' own forward runs, and the reason in the status says that the call passes no image_embeds."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL))
    load_ip_adapters(unet, "plain")
    with pytest.raises(TypeError):
        both(unet)
    assert "passes no image_embeds" in lib_onediff.status()["reason"]


def test_with_two_masked_image_prompts_our_output_is_close_to_diffusers() -> None:
    """Each image prompt has its own mask and scale. Our forward computes no masks: it calls diffusers' processor."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL))
    load_ip_adapters(unet, "plain", scale=[0.3, 0.9])
    masks = torch.zeros(1, 2, 64, 64)
    masks[:, 0, :, :32] = masks[:, 1, 32:] = 1
    output, expected = both(unet, images("plain", count=2), cross_attention_kwargs={"ip_adapter_masks": [masks]})
    assert relative_error(output, expected) < CLOSE and within("IPAdapterAttnProcessor2_0")


def test_the_inputs_of_a_graph_include_image_prompts() -> None:
    """A graph computes from copies of the first call's inputs, into which later calls are copied. After a second call
    with other image prompts is copied, the output from these copies must be close to diffusers' output of that call."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL))
    load_ip_adapters(unet, "plain", "plus")
    calls = []
    for seed in (1, 2):
        given = diffusers_arguments(a_call(unet, seed=seed))
        given["added_cond_kwargs"] = {"image_embeds": images("plain", "plus", seed=seed)}
        with torch.no_grad():
            expected = own_forward(unet)(**given).sample
            unet(**given)
            calls.append((attached(unet)._call(unet, **given), expected))
    (first, _), (second, expected) = calls
    assert first.additions == second.additions and len(second.additions) == 2
    binding = runtime.services.networks.get(unet).bound.binding
    inputs = cloned_inputs(first)
    copy_inputs(second, inputs)
    with torch.no_grad():
        output = compute(binding.layout, binding.weights(), torch_ops, inputs)
    assert relative_error(output, expected) < CLOSE
    assert bytes_of(inputs) > sum(prompt.key_values.nbytes for prompt in second.image_prompts)


@pytest.mark.parametrize("change", ["scale", "adapter's weights", "other adapter", "image"])
def test_image_prompts_are_computed_again_after_a_change(change: str) -> None:
    """Our forward keeps the keys and values of image prompts from call to call. After each change, the output must
    differ from the one before, and be close to diffusers' own."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL))
    load_ip_adapters(unet, "plain")
    given = images("plain")
    before = both(unet, given)[0]
    processors = [one for one in unet.attn_processors.values() if hasattr(one, "to_k_ip")]
    if change == "scale":
        processors[0].scale = [0.1]
    elif change == "adapter's weights":
        with torch.no_grad():
            processors[0].to_v_ip[0].weight.mul_(2)
    elif change == "other adapter":
        load_ip_adapters(unet, "plain")
        unet.encoder_hid_proj.image_projection_layers[0].image_embeds.weight.data.mul_(2)
    else:
        given[0].mul_(2)
    output, expected = both(unet, given)
    assert relative_error(output, expected) < CLOSE and relative_error(output, before) > 100 * CLOSE


class Twice:
    """An attention processor that is no class of diffusers: it gives twice the projected values, without attention."""

    def __call__(self, attn: Any, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        return 2 * attn.to_out[0](attn.to_v(hidden_states))


@pytest.mark.parametrize("name", ["Twice", "AttnProcessor2_0"], ids=["own name", "name of a plain one"])
def test_an_attention_processor_of_another_package_is_called_by_our_forward(name: str) -> None:
    """name: the name of the processor's class. With the name of a class of diffusers, the processor must not be taken
    for that class."""
    unet = diffusers_unet(**SMALL)
    lib_onediff.compile_unet(unet)
    plain = both(unet)[0]
    unet.get_submodule(ATTENTION).set_processor(type(name, (Twice,), {"__module__": __name__})())
    output, expected = both(unet)
    assert relative_error(output, expected) < CLOSE and relative_error(output, plain) > 100 * CLOSE
    assert within(f"{__name__}.{name} in 1 attentions")


@pytest.mark.parametrize("guidance", ["PAGIdentitySelfAttnProcessor2_0", "PAGCFGIdentitySelfAttnProcessor2_0"])
def test_with_perturbed_attention_guidance_our_output_is_close_to_diffusers(guidance: str) -> None:
    """Our forward calls the attention processor of the guidance in one attention. guidance: the processor's class. The
    batch of 6 has room for the negative prompt, the prompt, and the prompt with perturbed attention."""
    from diffusers.models import attention_processor

    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL))
    unet.get_submodule(ATTENTION).set_processor(getattr(attention_processor, guidance)())
    call = a_call(unet, batch=6)
    output = served(unet, call)
    expected = diffusers_output(unet, call)
    assert relative_error(output, expected) < CLOSE and within(guidance)
