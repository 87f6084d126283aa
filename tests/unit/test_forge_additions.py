"""FreeU, Kohya's hires fix and perturbed attention of the Forge family are computed by our forward, where the source of
their functions is known. The functions here are written anew, from what the hosts' own do."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import a_call, our_output, relative_error, shared_ldm_unet
from comfy_unet import patched_output
from test_patch_points import CLOSE, READ, copied, mean_value, with_an_image
from torch import Tensor
from torch.nn import functional

from lib_onediff.core.call import UNetCall
from lib_onediff.families.unet import read_ldm
from lib_onediff.families.unet.read_ldm import family_of
from lib_onediff.hosts.forge import additions
from lib_onediff.hosts.forge.additions import kind_of_code, read_additions
from lib_onediff.hosts.forge.call import HostCall, unet_call
from lib_onediff.hosts.forge.image_prompts import source_digest
from lib_onediff.hosts.forge.patches import PATCHES, REPLACED

Options = dict[str, Any]
SIZE = (16, 32)


class FreeUForForge:
    doFreeU = True


def Fourier_filter(x: Tensor, threshold: int, scale: float) -> Tensor:
    frequencies = torch.fft.fftshift(torch.fft.fft2(x.float()), dim=(-2, -1))
    middle = tuple(slice(side // 2 - threshold, side // 2 + threshold) for side in x.shape[-2:])
    frequencies[(..., *middle)] *= scale
    return torch.fft.ifft2(torch.fft.ifftshift(frequencies, dim=(-2, -1))).real.to(x.dtype)


def adaptive_resize(samples: Tensor, width: int, height: int, upscale_method: str, crop: str) -> Tensor:
    return functional.interpolate(samples, size=(height, width), mode=upscale_method)


def freeu(factors: tuple[float, float] = (1.3, 0.4), follows_mean: bool = True) -> Callable[..., Any]:
    channels = shared_ldm_unet().model_channels
    scale_dict = {channels * 4: factors, channels * 2: (1.2, 0.6)}

    def second(h: Tensor, hsp: Tensor, transformer_options: Options) -> tuple[Tensor, Tensor]:
        scale = scale_dict.get(h.shape[1]) if FreeUForForge.doFreeU else None
        if scale is None:
            return h, hsp
        mean = h.mean(1, keepdim=True)
        least, most = mean.amin((1, 2, 3), keepdim=True), mean.amax((1, 2, 3), keepdim=True)
        h[:, : h.shape[1] // 2] *= (scale[0] - 1) * (mean - least) / (most - least) + 1
        return h, Fourier_filter(hsp, threshold=1, scale=scale[1])

    def first(h: Tensor, hsp: Tensor, transformer_options: Options) -> tuple[Tensor, Tensor]:
        scale = scale_dict.get(int(h.shape[1]))
        if scale is None:
            return h, hsp
        h[:, : h.shape[1] // 2] *= scale[0]
        return h, Fourier_filter(hsp, threshold=1, scale=scale[1])

    return second if follows_mean else first


def stranger(h: Tensor, hsp: Tensor, transformer_options: Options) -> tuple[Tensor, Tensor]:
    return h * 1.1, hsp


def attn_proc(q: Tensor, k: Tensor, v: Tensor, to: Options) -> Tensor:
    return v


def hires_fix(
    block_number: int = 3, downscale_factor: float = 2.0, downscale_method: str = "bicubic",
    upscale_method: str = "bilinear", after_skip: bool = True, steps: tuple[float, float] = (9.0, 1.0),
) -> dict[str, list[Any]]:
    sigma_start, sigma_end = steps

    def smaller(h: Tensor, transformer_options: Options) -> Tensor:
        sigma = transformer_options["sigmas"][0].item()
        if transformer_options["block"][1] == block_number and sigma_end <= sigma <= sigma_start:
            height, width = (round(side * (1.0 / downscale_factor)) for side in h.shape[2:])
            return adaptive_resize(h, width, height, downscale_method, "disabled")
        return h

    def larger(h: Tensor, hsp: Tensor, transformer_options: Options) -> tuple[Tensor, Tensor]:
        if h.shape[2] != hsp.shape[2]:
            h = adaptive_resize(h, hsp.shape[3], hsp.shape[2], upscale_method, "disabled")
        return h, hsp

    where = "input_block_patch_after_skip" if after_skip else "input_block_patch"
    return {where: [smaller], "output_block_patch": [larger]}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    fix = hires_fix()
    functions = {
        freeu(): additions.FREEU_2, freeu(follows_mean=False): additions.FREEU, Fourier_filter: additions.FOURIER,
        fix["input_block_patch_after_skip"][0]: additions.SMALLER, fix["output_block_patch"][0]: additions.LARGER,
        adaptive_resize: additions.RESIZE, attn_proc: additions.PERTURBED,
    }
    monkeypatch.setattr(additions, "KNOWN", {source_digest(one): kind for one, kind in functions.items()})
    kind_of_code.cache_clear()
    # As the Forge family's UNets do, and the oracle here.
    monkeypatch.setattr(read_ldm, "FAMILIES_THAT_RESIZE_BEFORE", {family_of(shared_ldm_unet())})


def options_of(*patches: dict[str, list[Any]], sigma: float = 5.0, **replaced: Any) -> Options:
    lists: dict[str, list[Any]] = {}
    for one in patches:
        for name, functions in one.items():
            lists.setdefault(name, []).extend(functions)
    return {PATCHES: lists, REPLACED: replaced, "sigmas": torch.tensor([sigma, sigma])}


def joined(function: Any) -> dict[str, list[Any]]:
    return {"output_block_patch": [function]}


def made(options: Options, size: tuple[int, int] = SIZE) -> UNetCall:
    call = a_call(shared_ldm_unet(), *size)
    found = read_additions(shared_ldm_unet(), options, call.latent)
    given = HostCall(call.latent, call.timestep, call.context, None, None, copied(options), {})
    return unet_call(shared_ldm_unet(), given, False, READ, found)


def error(options: Options, size: tuple[int, int] = SIZE) -> float:
    """How far our forward is from the host's with the functions in it."""
    expected = patched_output(shared_ldm_unet(), a_call(shared_ldm_unet(), *size), copied(options))
    return relative_error(our_output(shared_ldm_unet(), made(options, size)), expected)


OURS: dict[str, Callable[[], Options]] = {
    "FreeU": lambda: options_of(joined(freeu())),
    "the first FreeU": lambda: options_of(joined(freeu(follows_mean=False))),
    "hires fix": lambda: options_of(hires_fix()),
    "with its skip": lambda: options_of(hires_fix(after_skip=False)),
    "a size that does not divide": lambda: options_of(hires_fix(downscale_factor=1.7, downscale_method="area")),
    "another stage": lambda: options_of(hires_fix(block_number=1, upscale_method="nearest-exact")),
    "FreeU, then hires fix": lambda: options_of(joined(freeu()), hires_fix()),
    "perturbed attention": lambda: options_of(attn1={("middle", 0): attn_proc}),
    "one block's": lambda: options_of(attn1={("output", 4, 0): attn_proc, ("input", 4): attn_proc}),
    "all": lambda: options_of(joined(freeu()), hires_fix(), attn1={("middle", 0): attn_proc}),
}


@pytest.mark.parametrize("name", OURS)
def test_they_are_part_of_our_forward(name: str) -> None:
    options = OURS[name]()
    ours = made(options)
    assert ours.patches is None and ours.additions
    assert error(options) < CLOSE
    plain = our_output(shared_ldm_unet(), a_call(shared_ldm_unet(), *SIZE))
    assert relative_error(our_output(shared_ldm_unet(), ours), plain) > 10 * CLOSE
    assert "hires" not in name or error(options, (26, 36)) < CLOSE


def test_out_of_their_steps_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreeUForForge, "doFreeU", False)
    options = options_of(joined(freeu()), hires_fix(), sigma=0.5)
    ours = made(options)
    assert ours.patches is None and not ours.additions and error(options) < CLOSE


def test_beside_other_functions() -> None:
    options = options_of(joined(freeu()), hires_fix(), attn2={("middle", 0): with_an_image})
    ours = made(options)
    assert ours.freeu is not None and ours.shrink is not None
    assert [name.split(" ")[0] for name in ours.patches.structure] == ["patches_replace[attn2]"]
    assert error(options) < CLOSE


@pytest.mark.parametrize("options", [
    lambda: options_of(joined(stranger)),
    lambda: options_of(joined(freeu()), joined(stranger)),
    lambda: options_of(hires_fix(), joined(freeu())),
    lambda: options_of(hires_fix(), hires_fix()),
    lambda: options_of(hires_fix(downscale_method="bislerp")),
    lambda: options_of(hires_fix(), {"input_block_patch": [lambda h, transformer_options: h * 1.1]}),
    lambda: options_of(hires_fix(), attn1={("middle", 0): mean_value}),
    lambda: options_of(attn1={("middle", 0): attn_proc, ("input", 4): mean_value}),
], ids=[
    "a stranger", "FreeU and a stranger", "another order", "twice", "a way of the host's own", "a stranger before",
    "who reads what it takes down", "an attention beside",
])
def test_what_is_used_otherwise_runs_as_the_functions_that_they_are(options: Any) -> None:
    ours = made(options())
    assert not ours.additions and ours.patches.structure


@pytest.mark.parametrize("name", ["Fourier_filter", "adaptive_resize"])
def test_another_function_within_makes_another_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), name, lambda samples, *others, **more: samples)
    options = options_of(joined(freeu())) if name == "Fourier_filter" else options_of(hires_fix())
    assert not made(options).additions
