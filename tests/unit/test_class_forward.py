"""compile_unet replaces the forward of diffusers' class once, and serves only the compiled modules: tests with copies,
derived classes, other patches of the class, and forwards that other code keeps."""
from __future__ import annotations

import copy
import functools
import gc
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_arguments, diffusers_output, diffusers_unet, relative_error, served
from diffusers import UNet2DConditionModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from own_forward import own_forward
from test_public_api_pipelines import tiny_vae
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.guard import Guard, HostFunction
from lib_onediff.hosts.diffusers.module_forward import attached
from lib_onediff.hosts.diffusers.unet import NOT_SERVED
from lib_onediff.hosts.hooks import ClassPatch, TablePatch
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.module_tree import Tree

ROUNDING = 1e-5
HOSTS_OWN = own_forward(nn.Module.__new__(UNet2DConditionModel)).__func__


@pytest.fixture(autouse=True)
def no_other_unet_is_compiled() -> None:
    """Release what earlier tests have compiled, so that the class has diffusers' own forward."""
    gc.collect()
    for patch in list(runtime.patches.values()):
        for one in patch.objects():
            patch.take(one)
    assert UNet2DConditionModel.forward is HOSTS_OWN


def calls() -> dict[str, int]:
    return dict(lib_onediff.status()["calls"])


def is_ours(unet: Any) -> bool:
    """Make a call, assert that its output is the host's, and return whether our forward computed it."""
    before = calls()["plain"]
    call = a_call(unet)
    with torch.no_grad():
        expected = HOSTS_OWN(unet, **diffusers_arguments(call)).sample
    assert relative_error(served(unet, call), expected) < ROUNDING
    return calls()["plain"] > before


# --- copies -----------------------------------------------------------------------------------------------------------


def with_other_weights(twin: Any) -> Any:
    """Replace the last layer of a copy, which shares its layers with the original, by one with other weights."""
    twin._modules = dict(twin._modules)
    twin._modules["conv_out"] = copy.deepcopy(twin._modules["conv_out"])
    with torch.no_grad():
        twin.conv_out.bias.add_(1.0)
    return twin


def by_dictionary(unet: Any) -> Any:
    """A copy that shares all attributes with the original."""
    twin = type(unet).__new__(type(unet))
    twin.__dict__.update(unet.__dict__)
    return twin


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy, "copy.deepcopy": copy.deepcopy, "its dictionary": by_dictionary,
    "DataParallel": lambda unet: unet._replicate_for_data_parallel(),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_diffusers_computes_a_copy_with_its_own_weights_until_it_is_compiled(duplicate: Callable[[Any], Any]) -> None:
    """A copy of the compiled UNet has all its attributes, and must not be computed with the original's weights. The
    original stays compiled. duplicate: a way to copy."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    assert is_ours(unet)
    twin = with_other_weights(duplicate(unet))
    before = calls()
    assert torch.equal(served(twin, a_call(twin)), diffusers_output(twin, a_call(twin))) and calls() == before
    assert relative_error(served(twin, a_call(twin)), served(unet, a_call(unet))) > 1e-2
    assert is_ours(unet) and is_ours(lib_onediff.compile_unet(twin))


def test_diffusers_computes_a_copy_made_by_compile_regions_of_accelerate() -> None:
    """compile_regions copies the compiled UNet. After an edit of the copy's weights, its output equals that of
    diffusers' forward with these weights."""
    regions = pytest.importorskip("accelerate.utils")
    if not hasattr(regions, "compile_regions"):
        pytest.skip("this accelerate compiles no regions")
    unet = lib_onediff.compile_unet(diffusers_unet())
    twin = regions.compile_regions(unet, disable=True)
    with torch.no_grad():
        next(layer for layer in twin.modules() if isinstance(layer, nn.Conv2d)).weight.mul_(1.5)
    before = calls()
    call = a_call(unet)
    with torch.no_grad():
        expected = HOSTS_OWN(twin, **diffusers_arguments(call)).sample
        assert torch.equal(twin(**diffusers_arguments(call)).sample, expected) and calls() == before


def test_diffusers_computes_a_copy_of_a_compiled_vae_decoder_with_the_weights_of_the_copy() -> None:
    """compile_pipe() has compiled the decoder. Its copy, by copy.copy, has all its attributes, but another last
    layer."""
    vae = tiny_vae()
    pipe = type("Pipe", (), {})()
    pipe.unet = diffusers_unet()
    pipe.vae = vae
    lib_onediff.compile_pipe(pipe)
    latent = torch.randn(1, 4, 8, 8)
    twin = copy.copy(vae.decoder)
    twin._modules = {**twin._modules, "conv_out": copy.deepcopy(twin.conv_out)}
    with torch.no_grad():
        twin.conv_out.bias.add_(1.0)
        expected = own_forward(twin)(latent)
        assert torch.equal(twin(latent), expected) and not torch.allclose(vae.decoder(latent), expected, atol=0.5)


# --- compiled modules -------------------------------------------------------------------------------------------------


class Derived(UNet2DConditionModel):
    """A derived class that inherits diffusers' forward."""


class Louder(UNet2DConditionModel):
    """A derived class of the same name as its base, whose forward returns something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        return 3 * found[0], "beside it"


Louder.__name__ = Louder.__qualname__ = "UNet2DConditionModel"


@pytest.mark.parametrize("kind", [Derived, Louder])
def test_a_derived_class_is_not_patched_even_with_the_same_name(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    """Supported classes are recognised by identity, not by name. Compiling an object of a derived class only logs that
    the class is not supported, and leaves its output as it was."""
    plain = diffusers_unet()
    unet: Any = kind(**{name: value for name, value in plain.config.items() if not name.startswith("_")})
    unet.load_state_dict(plain.state_dict())
    call = a_call(plain)
    own = kind.__dict__.get("forward")
    before = calls()
    # Patches the base class.
    lib_onediff.compile_unet(plain)
    assert lib_onediff.compile_unet(unet.eval()) is unet
    assert NOT_SERVED in caplog.text and kind.__dict__.get("forward") is own
    with torch.no_grad():
        answer = unet(**diffusers_arguments(call))
        expected = diffusers_output(plain, call)
    if kind is Derived:
        assert torch.equal(answer.sample, expected)
    else:
        assert answer[1:] == ("beside it",) and relative_error(answer[0], 3 * expected) < ROUNDING
    assert calls() == before and is_ours(plain)
    assert lib_onediff.uncompile_unet(unet) is unet


def test_a_forward_of_another_package_gets_the_arguments_unchanged_and_its_result_is_returned(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before OneDiff patches the class, another package replaces diffusers' forward by a function that returns another
    kind of object. The caller gets this very object."""
    answers: list[Any] = []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        answers.append((HOSTS_OWN(self, *args, **kwargs)[0], {"args": args, "kwargs": kwargs}))
        return answers[-1]

    monkeypatch.setattr(UNet2DConditionModel, "forward", theirs)
    unet = lib_onediff.compile_unet(diffusers_unet())
    call = a_call(unet)
    with torch.no_grad():
        answer = unet(call.latent, call.timestep, encoder_hidden_states=call.context)
    assert answer is answers[-1] and answer[1]["args"][0] is call.latent
    assert list(answer[1]["kwargs"]) == ["encoder_hidden_states"]
    assert "was replaced by" in lib_onediff.status()["reason"]
    lib_onediff.uncompile_unet(unet)


@pytest.mark.parametrize("return_dict", [True, False])
def test_with_onediff_off_the_caller_gets_the_object_that_diffusers_forward_returned(
    return_dict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """recording wraps the call of diffusers' forward, and keeps what it returned: a UNet2DConditionOutput, or a tuple
    without return_dict."""
    unet = lib_onediff.compile_unet(diffusers_unet(), enabled=False)
    answers = list[Any]()

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        answers.append(run(self, *args, **kwargs))
        return answers[-1]

    run = HostFunction.__call__
    monkeypatch.setattr(HostFunction, "__call__", recording)
    call = a_call(unet)
    with torch.no_grad():
        answer = unet(call.latent, call.timestep, call.context, return_dict=return_dict)
    assert type(answer) is (UNet2DConditionOutput if return_dict else tuple) and any(one is answer for one in answers)
    assert lib_onediff.status()["route"] == "host"


# --- the class --------------------------------------------------------------------------------------------------------


def test_the_class_gets_its_own_forward_back_when_the_last_module_is_released() -> None:
    """A module is released by uncompile_unet, or with its last reference."""
    first, second = (lib_onediff.compile_unet(diffusers_unet()) for _ in range(2))
    assert UNet2DConditionModel.forward is not HOSTS_OWN
    lib_onediff.uncompile_unet(first)
    assert is_ours(second) and not is_ours(first)
    lib_onediff.uncompile_unet(second)
    assert UNet2DConditionModel.forward is HOSTS_OWN
    third = lib_onediff.compile_unet(diffusers_unet())
    assert is_ours(third)
    del third
    gc.collect()
    assert UNet2DConditionModel.forward is HOSTS_OWN


def test_our_patch_does_not_change_the_digest_of_the_host_code() -> None:
    """The results of verification are stored by this digest, and must remain valid for other releases of OneDiff.
    Tree(...).digest covers the code of a module's classes."""
    unet = diffusers_unet()
    before = Tree(unet, (), ()).digest
    lib_onediff.compile_unet(unet)
    assert Tree(unet, (), ()).digest == before


def test_diffusers_computes_while_another_package_has_patched_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases in order: a patch above ours, with compiling and uncompiling below it; diffusers' own forward set again; a
    patch below ours."""
    seen: list[Any] = []

    def wrapper(below: Any) -> Any:
        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(self)
            return below(self, *args, **kwargs)

        return theirs

    unet = lib_onediff.compile_unet(diffusers_unet())
    other = diffusers_unet()
    above = wrapper(UNet2DConditionModel.forward)
    UNet2DConditionModel.forward = above
    try:
        # A patch above ours sees every call first, and may do anything.
        assert not is_ours(unet) and seen == [unet] and "was replaced by" in lib_onediff.status()["reason"]
        assert not is_ours(lib_onediff.compile_unet(other)) and seen == [unet, other]
        lib_onediff.uncompile_unet(unet)
        lib_onediff.uncompile_unet(other)
        before = calls()
        assert UNet2DConditionModel.forward is above and not is_ours(unet) and calls() == before
        lib_onediff.compile_unet(unet)
        # Restoring the class's own forward removes ours too. The next compilation or sampling sets it again.
        UNet2DConditionModel.forward = HOSTS_OWN
        assert not is_ours(unet)
        assert is_ours(lib_onediff.compile_unet(unet))
        UNet2DConditionModel.forward = HOSTS_OWN
        with lib_onediff.sampling(unet):
            assert is_ours(unet)
        lib_onediff.uncompile_unet(unet)
        assert UNet2DConditionModel.forward is HOSTS_OWN
        # With a patch below ours, the host serves until the patch is removed.
        UNet2DConditionModel.forward = wrapper(HOSTS_OWN)
        lib_onediff.compile_unet(unet)
        assert not is_ours(unet) and "was replaced by" in lib_onediff.status()["reason"]
        UNet2DConditionModel.forward = HOSTS_OWN
        assert not is_ours(unet) and is_ours(lib_onediff.compile_unet(unet))
    finally:
        lib_onediff.uncompile_unet(unet)
        lib_onediff.uncompile_unet(other)
        UNet2DConditionModel.forward = HOSTS_OWN


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_patches_can_be_undone_in_any_order(order: tuple[int, int]) -> None:
    """order: the indices of the two patches, each of which adds 10 to the result, as they are undone."""
    class Owner:
        def forward(self, x: int) -> int:
            return x + 1

    own = Owner.__dict__["forward"]
    add = lambda original, module, x: original(module, x) + 10  # noqa: E731
    patches = [ClassPatch(Owner, "forward", add, Guard(), "a method") for _ in range(2)]
    for _ in range(2):
        for patch in patches:
            patch.apply()
        assert Owner().forward(1) == 22
        patches[order[0]].undo()
        assert Owner().forward(1) == 12
        patches[order[1]].undo()
        assert Owner.__dict__["forward"] is own


def test_an_object_without_a_hash_runs_the_original_method_of_a_patched_class() -> None:
    """TablePatch looks up each object in a table. The lookup must not raise if the object cannot be hashed."""

    class Owner:
        __hash__ = None  # type: ignore[assignment]

        def forward(self, x: int) -> int:
            return x + 1

    patch = TablePatch(Owner, "forward", Guard(), "a method")
    patch.apply()
    assert Owner().forward(1) == 2
    patch.undo()


# --- a forward that other code keeps ----------------------------------------------------------------------------------


def test_a_kept_forward_keeps_its_module_alive_and_compiled() -> None:
    """Only the bound method unet.forward is kept. Calling it must run our forward, with diffusers' output."""
    expected = diffusers_output(diffusers_unet(), a_call(diffusers_unet()))
    forward = lib_onediff.compile_unet(diffusers_unet()).forward
    gc.collect()
    call = a_call(forward.__self__)
    before = calls()["plain"]
    with torch.no_grad():
        assert relative_error(forward(**diffusers_arguments(call)).sample, expected) < ROUNDING
    assert calls()["plain"] == before + 1


def test_our_forward_has_the_name_and_signature_of_the_forward_that_it_replaces() -> None:
    unet = diffusers_unet()
    hosts = own_forward(unet)
    ours = lib_onediff.compile_unet(unet).forward
    assert inspect.ismethod(ours) and ours.__self__ is unet and ours == unet.forward and ours.__func__ is not HOSTS_OWN
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(ours, name) == getattr(hosts, name)
    assert inspect.signature(ours) == inspect.signature(hosts)
    assert inspect.signature(ours.__func__) == inspect.signature(HOSTS_OWN)
    assert inspect.unwrap(ours) is inspect.unwrap(HOSTS_OWN) and ours.__code__.co_varnames[0] == "self"
    # Hooks of accelerate and diffusers wrap a forward like this.
    hooked = functools.update_wrapper(functools.partial(lambda *given: None, unet), ours)
    assert inspect.signature(hooked) == inspect.signature(hosts)


# --- accelerate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
def test_our_forward_computes_an_offloaded_unet_and_diffusers_its_copy(is_first: bool) -> None:
    """accelerate's cpu_offload keeps the forward that it wraps. is_first: the UNet is offloaded before it is compiled.
    The UNet gets no attribute of ours, because its copy would have it, too. After uncompile_unet, accelerate's wrapper
    has diffusers' own forward again."""
    accelerate = pytest.importorskip("accelerate")
    unet = diffusers_unet()
    steps = (lambda: accelerate.cpu_offload(unet, torch.device("cpu")), lambda: lib_onediff.compile_unet(unet))
    for step in steps[::1 if is_first else -1]:
        step()
    assert attached(unet) is not None and "lib_onediff" not in repr(vars(unet))
    call = a_call(unet)
    expected = diffusers_output(diffusers_unet(), call)
    assert relative_error(served(unet, call), expected) < ROUNDING
    twin = copy.deepcopy(unet)
    before = calls()
    assert relative_error(served(twin, call), expected) < ROUNDING and calls() == before
    lib_onediff.uncompile_unet(unet)
    assert vars(unet)["_old_forward"].__func__ is HOSTS_OWN
    accelerate.hooks.remove_hook_from_module(unet, recurse=True)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_two_threads_at_once_both_run_the_hooks_around_the_host_forward() -> None:
    """OneDiff is off, and diffusers' offloading has put hooks around the forward. Each thread's call must run the
    hooks, even while another thread is inside them."""
    hooks = pytest.importorskip("diffusers.hooks", reason="needs diffusers 0.33")
    unet = diffusers_unet()
    call = a_call(unet)
    expected = diffusers_output(unet, call)
    hooks.apply_group_offloading(unet, torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    lib_onediff.compile_unet(unet, enabled=False)
    reference = unet._diffusers_hook._fn_refs[0]
    own = reference.pre_forward
    moved = list[str]()
    both = threading.Barrier(2, timeout=60)

    def move(*given: Any, **named: Any) -> Any:
        moved.append(threading.current_thread().name)
        both.wait()
        return own(*given, **named)

    reference.pre_forward = move
    outputs: dict[str, Tensor] = {}
    threads = [
        threading.Thread(target=lambda name=name: outputs.update({name: served(unet, call)}), name=name)
        for name in ("one", "other")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(moved) == ["one", "other"]
    assert all(relative_error(output, expected) < ROUNDING for output in outputs.values()) and len(outputs) == 2
    assert runtime.guard.faults == []
