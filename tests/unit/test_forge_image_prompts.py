"""IP-Adapters in the Forge family: our forward computes them as image prompts if it knows the source of their
function."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, a_call, our_output, relative_error, shared_ldm_unet
from comfy_unet import attended, patched_output
from test_patch_points import CLOSE, READ
from torch import Tensor, nn

from lib_onediff.families.unet.call import UNetCall
from lib_onediff.hosts.forge import image_prompts
from lib_onediff.hosts.forge.call import HostCall, unet_call
from lib_onediff.hosts.forge.image_prompts import image_prompts_of, source_digest
from lib_onediff.hosts.forge.patches import REPLACED

SIZE = (16, 32)
TOKENS = 4
ALWAYS = (999999999.9, 0.0)


class Adapter:
    """The function that the host's built-in extension sets in place of a cross attention, written anew. number: the
    index of the cross attention."""

    def __init__(self, number: int) -> None:
        self.k_key = f"{2 * number + 1}_to_k_ip"
        self.v_key = f"{2 * number + 1}_to_v_ip"
        self.weights = []
        self.conds = []
        self.unconds = []
        self.masks = []
        self.ipadapters = []
        self.weight_type = []
        self.sigma_start = []
        self.sigma_end = []
        self.unfold_batch = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, extra: dict[str, Any]) -> Tensor:
        result = attended(query, key, value, extra)
        order = extra["cond_or_uncond"]
        sigma = extra["sigmas"][0].item()
        rows = len(query) // len(order)
        for index, weight in enumerate(self.weights):
            if not self.sigma_end[index] <= sigma <= self.sigma_start[index]:
                continue
            tokens = [(self.conds[index], self.unconds[index])[kind].repeat(rows, 1, 1) for kind in order]
            layers = self.ipadapters[index].ip_layers.to_kvs
            keys, values = (layers[name](torch.cat(tokens)) for name in (self.k_key, self.v_key))
            result = result + attended(query, keys, values, extra) * weight
        return result


class Stranger(Adapter):
    """An adapter whose source is not in KNOWN."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, extra: dict[str, Any]) -> Tensor:
        return super().__call__(query, key, value, extra) * 2


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of Adapter is the only one in KNOWN."""
    monkeypatch.setattr(image_prompts, "KNOWN", {source_digest(Adapter.__call__)})


def adapters(count: int = 1, kind: type[Adapter] = Adapter, mask: Tensor | None = None, **changed: Any) -> dict:
    """transformer_options with this many IP-Adapters in three of ldm's cross attentions. kind: the class of their
    functions. changed: other values for all adapters."""
    torch.manual_seed(1)
    unet = shared_ldm_unet()
    functions = {}
    for number, key in enumerate([("input", 1), ("output", 5), ("middle", 0)]):
        stage = unet.middle_block if key[0] == "middle" else getattr(unet, f"{key[0]}_blocks")[key[1]]
        width = next(part.to_q.out_features for path, part in stage.named_modules() if path.endswith("attn2"))
        functions[key] = kind(number)
        functions[key].width = width
    for index in range(count):
        layers = nn.ModuleDict({
            name: nn.Linear(CONTEXT_WIDTH, one.width, bias=False)
            for one in functions.values() for name in (one.k_key, one.v_key)
        })
        cond = torch.randn(1, TOKENS, CONTEXT_WIDTH)
        uncond = torch.randn(1, TOKENS, CONTEXT_WIDTH)
        values = {
            "weights": 0.7 - 0.2 * index, "conds": cond, "unconds": uncond, "masks": mask,
            "ipadapters": SimpleNamespace(ip_layers=SimpleNamespace(to_kvs=layers)), "weight_type": "original",
            "sigma_start": ALWAYS[0], "sigma_end": ALWAYS[1], "unfold_batch": False, **changed,
        }
        for one in functions.values():
            for name, value in values.items():
                getattr(one, name).append(value)
    return {REPLACED: {"attn2": functions}, "cond_or_uncond": [1, 0], "sigmas": torch.tensor([5.0])}


def elsewhere(key: tuple[str, int]) -> dict[str, Any]:
    """transformer_options with an adapter that is also set for a stage that the UNet does not have, which the host
    never calls."""
    options = adapters()
    functions = options[REPLACED]["attn2"]
    return {**options, REPLACED: {"attn2": {**functions, key: functions["input", 1]}}}


def made(options: dict[str, Any], **changes: Any) -> UNetCall:
    """The call of our forward for these options."""
    call = a_call(shared_ldm_unet(), *SIZE, **changes)
    with torch.no_grad():
        found = image_prompts_of(shared_ldm_unet(), options, call.latent)
        given = HostCall(call.latent, call.timestep, call.context, None, None, dict(options), {})
        return unet_call(shared_ldm_unet(), given, False, READ, found)


def error(options: dict[str, Any], **changes: Any) -> float:
    """The relative error of our forward against the host's forward, which calls the adapters' functions."""
    ours = made(options, **changes)
    with torch.no_grad():
        expected = patched_output(shared_ldm_unet(), a_call(shared_ldm_unet(), *SIZE, **changes), dict(options))
        return relative_error(our_output(shared_ldm_unet(), ours), expected)


@pytest.mark.parametrize("options", [
    lambda: adapters(), lambda: adapters(2),
    lambda: adapters(sigma_start=9.0, sigma_end=5.0), lambda: adapters(sigma_start=4.0, sigma_end=0.0),
    lambda: {**adapters(), "cond_or_uncond": [0]},
], ids=["one", "two", "in its steps", "before its steps", "one prompt"])
def test_known_ip_adapters_become_image_prompts_and_our_output_is_close_to_that_of_the_host(options: Any) -> None:
    """options: with Adapter, whose source is KNOWN here. An adapter changes the output only in the steps between its
    sigma_start and sigma_end. "one prompt": the call has no negative prompt."""
    options = options()
    ours = made(options)
    assert ours.patches is None and ours.image_prompts
    assert error(options) < CLOSE
    plain = relative_error(
        our_output(shared_ldm_unet(), ours), our_output(shared_ldm_unet(), a_call(shared_ldm_unet(), *SIZE))
    )
    before_its_steps = options["sigmas"][0] > options[REPLACED]["attn2"]["middle", 0].sigma_start[0]
    assert (plain < CLOSE) == bool(before_its_steps)


def test_an_edited_strength_of_an_ip_adapter_takes_effect_at_the_next_call() -> None:
    """Our output is compared with the host's before and after the edit."""
    options = adapters()
    assert error(options) < CLOSE
    for one in options[REPLACED]["attn2"].values():
        one.weights[0] = 0.3
    assert error(options) < CLOSE


@pytest.mark.parametrize("options", [
    lambda: adapters(kind=Stranger), lambda: adapters(weight_type="linear"), lambda: adapters(unfold_batch=True),
    lambda: adapters(mask=torch.rand(1, 40, 60)),
    lambda: {**adapters(), "ad_params": {"sub_idxs": None}},
    lambda: {**adapters(), "cond_or_uncond": [1, 0, 0]},
    lambda: {**adapters(), REPLACED: {"attn2": {("input", 1): attended}}}, lambda: elsewhere(("input", 99)),
], ids=["source", "weight_type", "unfold_batch", "mask", "AnimateDiff", "cond_or_uncond", "no adapter", "no stage"])
def test_ip_adapters_that_our_forward_does_not_compute_run_as_functions_of_extensions(options: Any) -> None:
    """options: with another source (Stranger), another weight_type, unfold_batch, a mask, AnimateDiff, a cond_or_uncond
    that does not fit the batch, a function that is no adapter, or a stage that the UNet lacks. They are no image
    prompts, but functions that our forward calls (patches)."""
    ours = made(options())
    assert ours.patches is not None and not ours.image_prompts
