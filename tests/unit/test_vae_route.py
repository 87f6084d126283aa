"""VAE decodes: which of them OneDiff computes, what computes them if our kernels or our forward fail, and which route
and reason users see."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from builders import generating, relative_error
from ladder_builders import pretend_a_gpu
from torch import Tensor
from vae_builders import (
    Host,
    a_latent,
    decode,
    decodes_by_route,
    diffusers_vae,
    host_picture,
    last_decode,
    routed_picture,
)

from lib_onediff.core.settings import Settings
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.usefixtures("fresh_route", "exact_products")


@pytest.fixture
def host() -> Host:
    return Host(diffusers_vae().decoder)


def test_only_the_first_decode_at_a_size_is_also_run_by_the_host(host: Host) -> None:
    """The first decode at each size, and of each decoder, needs the host's output to check ours. After a purge, the
    next decode is checked again."""
    host_decodes = []
    for size in ((4, 4), (4, 4), (5, 7), (5, 7), (4, 4)):
        decode(host, a_latent(host.decoder, *size))
        host_decodes.append(host.calls)
    assert host_decodes == [1, 1, 2, 2, 2]
    assert decodes_by_route() == {"ours": 5, "host": 0}
    other = Host(diffusers_vae(1).decoder)
    for _ in range(2):
        latent = a_latent(other.decoder, 4, 4)
        assert torch.allclose(decode(other, latent), host_picture(other.decoder, latent), atol=1e-5)
    assert other.calls == 1
    runtime.purge()
    decode(other, latent)
    assert other.calls == 2, "nothing is known any more"


@pytest.mark.parametrize(("change", "reason"), [
    (lambda picture: 1.01 * picture,
     "OneDiff's output differs too much from the one without OneDiff (relative error 9.9e-03; rounding explains "
     "1.0e-04)"),
    (lambda picture: picture[:, :, :-1], "OneDiff's output is (1, 3, 12, 12) in torch.float32, not (1, 3, 11, 12)"),
    (lambda picture: picture.half(),
     "OneDiff's output is (1, 3, 12, 12) in torch.float32, not (1, 3, 12, 12) in torch.float16"),
], ids=["values", "shape", "type"])
def test_if_our_first_image_differs_from_that_of_the_host_the_host_image_is_returned(change: Any, reason: str) -> None:
    """change: changes the values, shape or dtype of the host's image, so that the check finds a difference. Our forward
    is not tried again at this size."""
    host = Host(diffusers_vae().decoder, change)
    latent = a_latent(host.decoder)
    for calls in (1, 2):
        assert torch.equal(decode(host, latent), change(host_picture(host.decoder, latent)))
        assert host.calls == calls
        route, given = last_decode()
        assert route == "host" and given.startswith(reason), given
    (row,) = runtime.rows()
    assert (row.state, row.model) == ("failed", "VAE decoder") and row.reason.startswith(reason)


@pytest.mark.parametrize("kind", [RuntimeError, TypeError])
def test_after_an_error_in_our_decode_the_image_of_the_host_is_returned(
    host: Host, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """After two errors at a size, our forward is not tried again at this size, even without the cause of the error.
    Other sizes are still ours."""
    def broken(*given: Any, **named: Any) -> Tensor:
        raise kind("first line\nsecond line")

    monkeypatch.setattr(torch_ops, "resize", broken)
    latent = a_latent(host.decoder)
    for _ in range(2):
        assert torch.equal(decode(host, latent), host_picture(host.decoder, latent))
        assert last_decode() == ("host", "OneDiff's computation failed: first line (backend eager)")
    monkeypatch.undo()
    # After two failures, our forward is not tried again.
    assert torch.equal(decode(host, latent), host_picture(host.decoder, latent))
    assert last_decode() == ("host", "OneDiff's computation failed: first line (backend eager)")
    decode(host, a_latent(host.decoder, 3, 3))
    assert last_decode() == ("ours", "")


def test_out_of_memory_frees_the_graphs_and_our_tensors_before_the_host_decodes(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards, the next decode is ours. freed: True when the graphs are released, and whether our tensors are gone
    when the host decodes."""
    held: list[Any] = []
    freed: list[bool] = []

    def out_of_memory(image: Tensor, *others: Any) -> Tensor:
        held.append(weakref.ref(image))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    monkeypatch.setattr(torch_ops, "resize", out_of_memory)
    monkeypatch.setattr(runtime.services, "release_memory", lambda: freed.append(True))
    host.change = lambda picture: (freed.append(held[0]() is None), picture)[1]
    latent = a_latent(host.decoder)
    assert torch.equal(decode(host, latent), host_picture(host.decoder, latent))
    assert freed == [True, True]
    assert last_decode() == ("host", "the GPU memory was full: OneDiff freed what it held (its CUDA graphs)")
    monkeypatch.undo()
    host.change = lambda picture: picture
    decode(host, latent)
    assert last_decode() == ("ours", "")


def test_if_onediff_is_off_for_a_generation_the_host_decodes_its_image(host: Host) -> None:
    """The reason is the one with which OneDiff was switched off. The next decode, outside of the generation, is
    ours."""
    latent = a_latent(host.decoder)
    with generating(runtime, Settings(enabled=False), "Not today."):
        decode(host, latent)
        assert last_decode() == ("host", "Not today.")
    decode(host, latent)
    assert last_decode() == ("ours", "")


def test_decodes_of_several_threads_get_their_own_images(host: Host) -> None:
    """A1111 decodes live previews in the threads of requests. Each image must be close to the one that the host decodes
    from the same latent."""
    latents = 5 * [a_latent(host.decoder, *size) for size in ((4, 4), (5, 7), (6, 3), (4, 4))]
    with ThreadPoolExecutor(4) as threads:
        for latent, picture in zip(latents, threads.map(partial(decode, host), latents), strict=True):
            assert torch.allclose(picture, host_picture(host.decoder, latent), atol=1e-5)
    assert decodes_by_route() == {"ours": 20, "host": 0}


def test_onediff_keeps_no_deleted_decoder_alive(host: Host) -> None:
    decode(host, a_latent(host.decoder))
    gone = weakref.ref(host.decoder)
    host.decoder = None
    gc.collect()
    assert gone() is None


class ReplacedKernels:
    """torch's operators as stand-ins for our kernels. resize() can be replaced by one that fails or gives wrong
    numbers."""

    def __init__(self) -> None:
        self.resize: Any = torch_ops.resize

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_ops, name)

    def breaks(self, *given: Any) -> Any:
        raise RuntimeError("no such kernel")


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplacedKernels]:
    stand = ReplacedKernels()
    pretend_a_gpu(monkeypatch, stand)
    return stand


def entries() -> dict[str, str]:
    return {entry.key.backend: entry.state.value for entry in runtime.table.entries()}


def test_if_a_kernel_fails_torch_operators_decode_images_of_that_size(native: ReplacedKernels) -> None:
    """OneDiff computes the image without our kernels (backend eager), close to the host's. Other sizes use the
    kernels."""
    decoder = diffusers_vae().decoder
    latent = a_latent(decoder)
    native.resize = native.breaks
    reason = "OneDiff's computation failed: no such kernel (backend native)"
    for _ in range(2):
        assert relative_error(routed_picture(decoder, latent), host_picture(decoder, latent)) < 1e-5
        assert last_decode() == ("ours", reason)
    assert entries() == {"native": "failed", "eager": "proved"}
    native.resize = torch_ops.resize
    routed_picture(decoder, a_latent(decoder, 3, 3))
    assert last_decode() == ("ours", "")


def test_if_a_kernel_is_wrong_torch_operators_decode_from_the_next_image_on(native: ReplacedKernels) -> None:
    """The first image, whose check finds the error of 1 % in resize(), is the host's own. The next one is computed by
    OneDiff without our kernels."""
    decoder = diffusers_vae().decoder
    latent = a_latent(decoder)
    native.resize = lambda *given: 1.01 * torch_ops.resize(*given)
    assert torch.equal(routed_picture(decoder, latent), host_picture(decoder, latent))
    route, reason = last_decode()
    assert route == "host" and reason.endswith("(backend native)")
    assert relative_error(routed_picture(decoder, latent), host_picture(decoder, latent)) < 1e-5
    assert last_decode() == ("ours", reason)


# --- a failure in the middle ------------------------------------------------------------------------------------------


def raises(error: BaseException) -> Any:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fails


@pytest.mark.parametrize("error", [ValueError("theirs"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("ours_fails", [False, True])
def test_an_exception_in_the_decode_of_the_host_is_raised_and_not_counted_as_our_fault(
    host: Host, error: BaseException, ours_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host must be called only once. ours_fails: whether OneDiff's code around the decode raises an exception as
    well."""
    host_decodes: list[int] = []

    def fails() -> Tensor:
        host_decodes.append(1)
        raise error

    if ours_fails:
        monkeypatch.setattr(runtime.vae, "_serve", raises(IndexError("ours")))
    latent = a_latent(host.decoder)
    with pytest.raises(type(error)) as raised, torch.no_grad():
        runtime.vae.decode(host.decoder, latent, fails)
    assert raised.value is error and host_decodes == [1] and runtime.guard.faults == []
    monkeypatch.undo()
    decode(host, latent)
    assert last_decode()[0] == "ours"


def test_after_a_fault_in_our_code_around_a_decode_the_host_decodes_once_and_the_fault_is_logged(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime.vae, "_serve", raises(IndexError("ours")))
    latent = a_latent(host.decoder)
    assert torch.equal(decode(host, latent), host_picture(host.decoder, latent)) and host.calls == 1
    sentence = "a fault of OneDiff in the VAE's forward, please report it: ours"
    assert last_decode() == ("host", sentence) and runtime.guard.faults == [sentence]


@pytest.mark.parametrize("function", ["_note", "_count"])
def test_a_fault_while_a_decode_is_counted_loses_no_image(
    host: Host, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image must be close to the host's, without another decode by the host. function: the function of the VAE
    route that raises an exception when it notes or counts the decode, after the image is made."""
    latent = a_latent(host.decoder)
    decode(host, latent)
    monkeypatch.setattr(runtime.vae, function, raises(IndexError("no statistics")))
    assert torch.allclose(decode(host, latent), host_picture(host.decoder, latent), atol=1e-5) and host.calls == 1
    assert runtime.guard.faults == ["a fault of OneDiff in counting a decode, please report it: no statistics"]
