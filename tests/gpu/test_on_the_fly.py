"""LoRAs that a host applies at each call, and weights in float8, on a real GPU: served by graphs, as exactly as by the
host, and without a second copy of the UNet. ForgeOperations stands for the host's layers."""
from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from exact_operators import relative_error
from gpu_calls import last_call
from own_forward import own_forward
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("diffusers")

from lib_onediff.bench.models import TIME_IDS, random_unet
from lib_onediff.core.settings import Settings
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.hosts.a1111.layers import CASTS
from lib_onediff.hosts.forge.weight_functions import LayerFunctions, cast_to_input
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.scan import Casts, HostTraits

pytestmark = pytest.mark.gpu
WORST_RATIO = 1.1
MEBIBYTE = 2**20
# The most memory that our calls may need beyond the host's.
MOST_MORE = 64 * MEBIBYTE
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


class LowVramPatch:
    """As ComfyUI's weight function for LoRAs: at every call, it adds strength * up @ down of each LoRA to the
    weight."""

    def __init__(self, key: str, patches: dict[str, list[Any]]) -> None:
        self.key = key
        self.patches = patches

    def __call__(self, weight: Tensor) -> Tensor:
        for strength, (_, (up, down, *_)), *_ in self.patches[self.key]:
            weight = weight + strength * (up.to(weight) @ down.to(weight)).view(weight.shape)
        return weight


def parameters_of(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A layer's weight and bias in the dtype of x, with the weight's functions applied."""
    weight = layer.weight.to(x.dtype)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    for function in getattr(layer, "weight_function", ()):
        weight = function(weight)
    return weight, bias


class ForgeOperations:
    """The layers of a host that casts and changes its weights at every call."""

    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, *parameters_of(self, x))

    class Conv2d(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, *parameters_of(self, x))

    class GroupNorm(nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            return functional.group_norm(x, self.num_groups, *parameters_of(self, x), self.eps)

    class LayerNorm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return functional.layer_norm(x, self.normalized_shape, *parameters_of(self, x), self.eps)


for kind in (ForgeOperations.Linear, ForgeOperations.Conv2d, ForgeOperations.GroupNorm, ForgeOperations.LayerNorm):
    kind.__module__ = "backend.operations"
    kind.weight_function = ()


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    runtime.purge()
    yield
    runtime.release_all()
    runtime.release_memory()
    gc.collect()
    torch.cuda.empty_cache()


def host_unet(name: str, stored: torch.dtype) -> nn.Module:
    """A random UNet with the layers of ForgeOperations. stored: the dtype of its weights."""
    unet = random_unet(name, torch.device("cuda")).half().to(stored)
    for module in unet.modules():
        kind = getattr(ForgeOperations, type(module).__name__, None)
        if kind is not None:
            module.__class__ = kind
            module.parameters_manual_cast = True
    return unet


def add_lora(unet: nn.Module, strength: float, rank: int = 16) -> dict[str, list[Any]]:
    """Add a LoRA to every linear layer of every attention. Returns the LoRAs by layer; the first value of an entry is
    its strength."""
    generator = torch.Generator("cuda").manual_seed(0)
    patches = {}
    random = lambda *shape: torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16)  # noqa: E731
    for path, module in unet.named_modules():
        if isinstance(module, nn.Linear) and ".attn" in path:
            out, width = module.weight.shape
            up = random(out, rank) / rank**0.5
            down = random(rank, width) / width**0.5
            patches[path] = [[strength, ("lora", (up, down, float(rank), None, None)), 1.0, None, None]]
            module.weight_function = [LowVramPatch(path, patches)]
    return patches


def call_for(unet: Any, side: int, device: str = "cuda", dtype: torch.dtype = torch.float16) -> UNetCall:
    """A call of a batch of two images. side: the width and height of the image in pixels."""
    generator = torch.Generator(device).manual_seed(1)
    random = lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype)  # noqa: E731
    config = unet.config
    y = None
    if config.projection_class_embeddings_input_dim:
        waves = unet.add_time_proj(size_numbers(device).flatten()).reshape(2, -1).to(dtype)
        y = torch.cat([random(2, config.projection_class_embeddings_input_dim - waves.shape[1]), waves], dim=1)
    return UNetCall(
        random(2, 4, side // 8, side // 8), torch.tensor([500.0, 500.0], device=device),
        random(2, 77, config.cross_attention_dim), y,
    )


def size_numbers(device: str) -> Tensor:
    """SDXL's time_ids for two images."""
    return torch.tensor([[512.0, 512, 0, 0, 512, 512]] * 2, device=device)


def forward(unet: Any, call: UNetCall) -> Callable[[], Tensor]:
    """The host's forward for this call, as a function without arguments."""
    added = None
    if call.y is not None:
        waves = TIME_IDS * unet.config.addition_time_embed_dim
        added = {"text_embeds": call.y[:, :-waves], "time_ids": size_numbers(call.y.device.type)}

    @torch.no_grad()
    def run() -> Tensor:
        return own_forward(unet)(call.latent, call.timestep, call.context, added_cond_kwargs=added).sample

    return run


def host_traits() -> HostTraits:
    return HostTraits(trusted={__name__}, functions=LayerFunctions(), casts=Casts(cast_to_input))


def served(
    unet: nn.Module, call: UNetCall, backend: str, calls: int = 3, traits: HostTraits | None = None
) -> Tensor:
    """Our output of the last of several calls: the first runs without a graph, after the second a graph is captured,
    the third is replayed. The backend eager has no graphs. Checks that this backend served it so."""
    runtime.adopt(unet, Settings(backend=backend), traits or host_traits())
    with torch.no_grad():
        for _ in range(calls):
            output = runtime.run(unet, call, forward(unet, call))
    status = last_call()
    assert status["route"] == ("plain" if backend == "eager" else "graph"), status["reason"]
    assert status["backend"] == backend, status["reason"]
    return output


@torch.no_grad()
def exact_output(unet: Any, call: UNetCall) -> Tensor:
    """The host's output in float32, with the same values of the parameters."""
    wide = lambda tensor: None if tensor is None else tensor.float()  # noqa: E731
    return forward(unet, UNetCall(wide(call.latent), call.timestep, wide(call.context), wide(call.y)))()


@pytest.mark.parametrize("backend", ["native", "cudagraph", "eager"])
@pytest.mark.parametrize("stored", [torch.float16, *FLOAT8], ids=str)
@pytest.mark.parametrize(("name", "side"), [("tiny-sdxl", 512), ("sdxl", 1024)])
def test_with_a_lora_our_error_is_not_above_that_of_the_host_and_its_graph_serves_another_strength(
    name: str, side: int, stored: torch.dtype, backend: str
) -> None:
    """Errors in float16 are against the host's output in float32 with the same parameters (exact); ours may be a tenth
    larger. Then the LoRA's strength changes, and the same graph serves it (backend eager: no graph). stored: the dtype
    of the weights, which the host casts to float16 at each use. side: the width and height of the image in pixels."""
    unet = host_unet(name, stored)
    call = call_for(unet, side)
    patches = add_lora(unet, 0.5)
    exact = exact_output(unet, call)
    host = forward(unet, call)()
    mine = relative_error(served(unet, call, backend), exact)
    theirs = relative_error(host, exact)
    print(f"{name} {stored} {backend}: {mine:.2e}, the host {theirs:.2e}")
    assert mine <= WORST_RATIO * theirs
    # Another strength is checked once; then the same graph serves it, in the same memory.
    before = last_call()["calls"]["graph"]
    for entries in patches.values():
        entries[0][0] = -0.25
    exact = exact_output(unet, call)
    host = forward(unet, call)()
    mine = relative_error(served(unet, call, backend, calls=2), exact)
    theirs = relative_error(host, exact)
    print(f"another strength: {mine:.2e}, the host {theirs:.2e}")
    assert mine <= WORST_RATIO * theirs
    assert last_call()["calls"]["graph"] == before + (backend != "eager")


def peak(work: Callable[[], object]) -> int:
    """The peak bytes that torch allocated during work(), minus those allocated before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_calls_with_float8_weights_need_no_second_copy_of_the_unet() -> None:
    """The calls run without graphs, whose memory has a budget of its own. What OneDiff keeps and its peak in a call are
    together at most 64 MiB above the host's peak in a call. The LoRA's factors and small parameters, of which OneDiff
    keeps copies, do not count."""
    unet = host_unet("sdxl", torch.float8_e4m3fn)
    call = call_for(unet, 1024)
    add_lora(unet, 0.5)
    forward(unet, call)()
    host = peak(forward(unet, call))
    start = torch.cuda.memory_allocated()
    served(unet, call, "eager", calls=2)
    held = torch.cuda.memory_allocated() - start
    network = runtime.services.networks.get(unet)
    assert network is not None
    mine = peak(lambda: served(unet, call, "eager", calls=1)) + held
    # Besides the LoRAs and small parameters.
    assert mine - network.bound.on_the_fly.bytes <= host + MOST_MORE


def autocast_unet(name: str) -> nn.Module:
    """A random UNet as A1111's option "FP8 weight" stores it: linear layers and convolutions in float8, norms in
    float16."""
    unet = random_unet(name, torch.device("cuda")).half()
    for module in unet.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.to(FLOAT8[0])
    return unet


@pytest.mark.parametrize("backend", ["native", "cudagraph", "eager"])
@pytest.mark.parametrize(("name", "side"), [("tiny-sdxl", 512), ("sdxl", 1024)])
def test_with_float8_weights_that_autocast_casts_our_error_is_not_above_that_of_the_host(
    name: str, side: int, backend: str
) -> None:
    """A1111 stores weights in float8, and autocast casts them at each use. Errors are against the host's output in
    float32 with the same weights (exact); ours may be a tenth larger. Both are measured again after an edit of all
    float8 weights in place."""
    unet = autocast_unet(name)
    call = call_for(unet, side)
    traits = HostTraits(casts=CASTS)

    def check() -> None:
        with torch.autocast("cuda"):
            mine = served(unet, call, backend, traits=traits)
            host = forward(unet, call)()
        exact = exact_output(copy.deepcopy(unet).float(), call)
        assert relative_error(mine, exact) <= WORST_RATIO * relative_error(host, exact)

    check()
    # As when a LoRA is merged: the graph reads the weights and biases at the same addresses.
    with torch.no_grad():
        for parameter in unet.parameters():
            if parameter.dtype == FLOAT8[0]:
                parameter.copy_((1.25 * parameter.half()).to(FLOAT8[0]))
    runtime.begin_sampling(unet)
    check()
