"""Kernels that were compiled ahead: the archive contains every kernel that is launched, and launches reach the driver.
The driver is Library below, so the tests need no GPU."""
from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_onediff.core.card import TuningCache
from lib_onediff.core.operators import Residual
from lib_onediff.core.refusal import Refusal
from lib_onediff.core.settings import Settings
from lib_onediff.devices.cuda import native
from lib_onediff.devices.cuda.kernels import archive, driver, launching, products, tokens
from lib_onediff.devices.cuda.kernels.launch_config import EXACT_GATED_PRODUCT, INT8_PRODUCT, LAYER_NORM
from lib_onediff.devices.registry import Devices
from lib_onediff.devices.torch.device import Eager

BUILD = Path(__file__).parents[2] / ".ci" / "build_kernels.py"
GPU = torch.device("cuda")
# The CUDA version of a driver that is new enough for all kernels.
NEW = (13, 0)


class Function:
    """A function of a library loaded by ctypes, to which attributes such as argtypes can be assigned. A call returns
    work(...), or 0 if that returns None."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def __call__(self, *arguments: Any) -> int:
        return self.work(*arguments) or 0


class Library:
    """A driver without a GPU, which records what it is given.

    version: the CUDA version that it supports. statuses: by the name of a function, the status that it returns in place
        of success, without doing anything else.
    modules: the PTX of each module that was loaded. shared: each value of cuFuncSetAttribute. maps: the arguments of
        each tensor map after the output.
    launches: for each launch, its numbers (grid, block and bytes of shared memory) and the bytes of its parameters.
    """

    def __init__(self, version: tuple[int, int] = NEW, **statuses: int) -> None:
        self.version = version
        self.statuses = statuses
        self.modules: list[bytes] = []
        self.shared: list[int] = []
        self.launches: list[tuple[tuple[int, ...], bytes]] = []
        self.maps: list[tuple[Any, ...]] = []
        self.cuLaunchKernel = Function(self.launch)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.statuses.get(name) or getattr(self, f"do_{name}")(*given) or 0

    def do_cuDriverGetVersion(self, out: Any) -> None:
        out._obj.value = 1000 * self.version[0] + 10 * self.version[1]

    def do_cuModuleLoadData(self, out: Any, ptx: Any) -> None:
        self.modules.append(ptx.value)
        out._obj.value = len(self.modules)

    def do_cuModuleGetFunction(self, out: Any, module: Any, name: bytes) -> int:
        out._obj.value = module.value
        return 0 if f".entry {name.decode()}(" in self.modules[module.value - 1].decode() else 500

    def do_cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> None:
        self.shared.append(value)

    def do_cuGetErrorString(self, status: int, out: Any) -> None:
        out._obj.value = f"error {status}".encode()

    def do_cuTensorMapEncodeTiled(self, out: Any, *given: Any) -> None:
        self.maps.append(given)

    def launch(self, function: Any, *given: Any) -> int:
        *numbers, stream, pointers, _ = given
        places = [place - pointers[0] for place in pointers]
        self.launches.append((tuple(numbers), ctypes.string_at(pointers[0], places[-1] + 8)))
        return self.statuses.get("cuLaunchKernel", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lets launches on the CPU's tensors run as if on a card. Tests may assign `capability`, its compute capability,
    and `library`, its driver."""
    card = SimpleNamespace(capability=(8, 6), library=Library())
    monkeypatch.setattr(launching, "uses_archive", lambda device: True)
    monkeypatch.setattr(launching, "driver_here", lambda: driver.Driver(card.library))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    yield card
    launching.loaded.cache_clear()


def normed(config: Any = LAYER_NORM.candidates[0], start: int = 0) -> tuple[torch.Tensor, ...]:
    """Launch a layer norm of 3 tokens of width 320, and return its tensors: (tokens, weight, new deferred_bias,
    output). start: how many numbers after an aligned address the tokens begin."""
    residual = torch.zeros(3 * 320 + start, dtype=torch.float16)[start:].view(3, 320)
    weight = torch.zeros(320, dtype=torch.float16)
    now, output = tokens.layer_norm(Residual(residual), weight, None, 1e-5, config)
    return residual, weight, now.deferred_bias, output


@pytest.fixture(scope="module")
def build() -> Any:
    """The program .ci/build_kernels.py, loaded as a module. It replaces launching.launch_source, so tests that use it
    must restore that function."""
    spec = importlib.util.spec_from_file_location("build_kernels", BUILD)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def test_the_archive_was_built_from_these_sources_and_has_every_kernel_that_is_launched(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive has the digest of the present sources, every variant that .ci/build_kernels.py specifies, and no
    others."""
    monkeypatch.setattr(launching, "launch_source", launching.launch_source)
    manifest = archive.manifest()
    assert manifest.digest == build.digest(), "the sources have changed: run .ci/kernels write"
    wanted: dict[str, set[str]] = {}
    for one in build.specifications():
        wanted.setdefault(one["key"], set()).add(build.architecture_name(one["architecture"]))
    assert {key: set(variants) for key, variants in manifest.kernels.items()} == wanted
    with zipfile.ZipFile(archive.ARCHIVE) as file:
        assert file.testzip() is None


def test_product_and_attention_kernels_use_the_tensor_cores_of_each_architecture() -> None:
    """The PTX of each kernel has an instruction of the tensor cores: mma.sync, or wgmma on Hopper (90a)."""
    units = {"75": ("mma.sync",), "80": ("mma.sync",), "89": ("mma.sync",), "90a": ("wgmma", "mma.sync")}
    for key, variants in archive.manifest().kernels.items():
        if key.startswith(("products", "attention")):
            for architecture, variant in variants.items():
                text = archive.text_of(variant.file)[variant.start:variant.start + variant.bytes].decode()
                assert any(unit in text for unit in units[architecture]), (key, architecture)


def test_a_launch_gives_the_driver_the_grid_and_the_parameters(card: Any) -> None:
    """A layer norm of 3 tokens of width 320. Its parameters are the tensors' addresses, then the numbers, in the order
    of the kernel's signature."""
    residual, weight, deferred, output = normed()
    [(numbers, parameters)] = card.library.launches
    rows, warps = LAYER_NORM.candidates[0]
    assert numbers[:6] == (-(-3 // rows), 1, 1, 32 * warps, 1, 1)
    found = struct.unpack("@7P5ifPP", parameters)
    addresses = [one.data_ptr() for one in (residual, deferred, weight, weight, weight, deferred, output)]
    assert found[:12] == (*addresses, 3, 320, 0, 0, 0) and found[12:] == (pytest.approx(1e-5), 0, 0)


def test_a_kernel_is_loaded_once_for_each_launch_config(card: Any) -> None:
    """config: the index of the launch config of a layer norm. modules: how many kernels have been loaded after it."""
    for config, modules in ((0, 1), (0, 1), (1, 2), (0, 2)):
        normed(LAYER_NORM.candidates[config])
        assert len(card.library.modules) == modules


@pytest.mark.parametrize(("capability", "version", "target"), [
    ((7, 5), NEW, "sm_75"), ((8, 0), NEW, "sm_80"), ((8, 6), (12, 0), "sm_80"), ((12, 0), NEW, "sm_80"),
    ((9, 0), NEW, "sm_90a"), ((9, 0), (12, 4), "sm_80"), ((10, 0), NEW, "sm_80"),
])
def test_a_card_gets_the_newest_architecture_that_it_and_its_driver_support(
    capability: tuple[int, int], version: tuple[int, int], target: str
) -> None:
    """capability: the GPU's compute capability. version: the CUDA version of its driver; NEW suffices for all kernels.
    target: the architecture in the chosen PTX."""
    kernels = archive.manifest().kernels
    key = next(name for name in kernels if name.startswith("products.tile_by_tile i8 fp32 i8 fp32 fp16"))
    _, ptx = archive.variant((key,), capability, version)
    assert f".target {target}\n".encode() in ptx and ptx.endswith(b"\0")


def test_a_kernel_that_copies_tiles_gets_a_tensor_map_of_each_operand(card: Any) -> None:
    """On Hopper, the hardware (TMA) copies tiles by tensor maps, descriptions that the driver makes: here of two
    factors and of the output."""
    card.capability = (9, 0)
    given = torch.zeros(70, 320).half()
    weight = torch.zeros(2560, 320).half()
    bias = torch.zeros(2560).half()
    copied = next(config for config in EXACT_GATED_PRODUCT.candidates[1:] if config[0])
    products.exact_gated_product(given, weight, bias, copied)
    first = card.library.maps[0]
    # float16, of two axes; sizes and boxes from the innermost out, and the bytes from row to row.
    assert first[:2] == (6, 2) and list(first[3]) == [320, 70] and list(first[4]) == [640]
    assert list(first[5]) == [64, copied[1]] and first[2].value == given.data_ptr()
    [(_, parameters)] = card.library.launches
    assert len(card.library.maps) == 3 and struct.unpack_from("@2i2q", parameters, 128) == (70, 320, 320, 1)
    assert card.library.shared and card.library.shared[0] > 48 << 10


def test_a_kernel_is_loaded_and_launched_on_the_card_of_its_tensors(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """on_card makes the tensors' device the current one. seen: the numbers of loaded modules and of launches when its
    context begins and ends."""
    seen: list[Any] = []

    @contextlib.contextmanager
    def on_card(device: torch.device) -> Iterator[None]:
        seen.append((device, len(card.library.modules), len(card.library.launches)))
        yield
        seen.append((device, len(card.library.modules), len(card.library.launches)))

    monkeypatch.setattr(launching, "on_card", on_card)
    normed()
    assert seen == [(torch.device("cpu"), 0, 0), (torch.device("cpu"), 1, 1)]


def test_cards_of_different_architectures_load_different_kernels(card: Any) -> None:
    m, n, k, group, warps, stages = INT8_PRODUCT.candidates[0]
    types = torch.int8, torch.float32, torch.int8, torch.float32, *[torch.float16] * 4
    arguments = [torch.zeros(1, dtype=dtype) for dtype in types]
    constants = {"M": m, "N": n, "K": k, "GROUP": group, "RANKED": False}
    key = archive.key_of("products.tile_by_tile", arguments, warps, stages, constants)
    for index, card.capability in enumerate(((7, 5), (8, 9))):
        launching.loaded(key, torch.device("cuda", index))
    targets = [module[module.index(b".target"):].split(b"\n")[0] for module in card.library.modules]
    assert targets == [b".target sm_75", b".target sm_80"]


def test_launches_without_a_compiled_kernel_are_refused(card: Any) -> None:
    """The archive has no kernel for, in this order: a launch config, a dtype, a misaligned address, and a width."""
    with pytest.raises(Refusal, match="no kernel “tokens.layer_norm_rows .*” for this GPU .compute capability 8.6"):
        normed((7, 1))
    with pytest.raises(Refusal, match="no kernel .*float64"):
        tokens.geglu(torch.zeros(2, 64, dtype=torch.float64))
    with pytest.raises(Refusal, match="multiples of 16"):
        normed(start=1)
    with pytest.raises(Refusal, match="multiples of 16"):
        tokens.geglu(torch.zeros(2, 40, dtype=torch.float16))


def test_a_missing_kernel_is_blamed_on_the_driver_only_if_a_newer_driver_would_load_it() -> None:
    """A kernel for compute capability 8.9 alone, whose PTX needs a driver for CUDA 12.4."""
    kernels = archive.manifest().kernels
    name = next(name for name, by_architecture in kernels.items() if list(by_architecture) == ["89"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(archive, "key_name", lambda key: name)
        for capability, said in (((8, 9), "needs a newer NVIDIA driver"), ((8, 6), "no kernel “.*” for this GPU")):
            with pytest.raises(Refusal, match=f"{said}.*driver for CUDA 12.3.*the image is right"):
                archive.variant((), capability, (12, 3))


@pytest.mark.parametrize(("status", "kind"), [(2, torch.cuda.OutOfMemoryError), (218, RuntimeError)])
@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuLaunchKernel"])
def test_errors_of_the_driver_are_raised_with_its_reason(
    card: Any, call: str, status: int, kind: type[Exception]
) -> None:
    """call: the driver's function that fails. status: what it returns; 2 is out of memory."""
    card.library = Library(**{call: status})
    with pytest.raises(kind, match=f"{call}: error {status}"):
        normed()


@pytest.mark.parametrize(("capability", "version", "said"), [
    ((7, 0), NEW, "compute capability 7.5 or higher, such as GTX 16 and RTX 20, and the a card has 7.0"),
    ((8, 6), (11, 8), "driver 525 or newer, for CUDA 12.0, and this one is for CUDA 11.8"),
    ((7, 5), (12, 0), None),
])
def test_too_old_cards_and_drivers_are_refused(
    card: Any, capability: tuple[int, int], version: tuple[int, int], said: str | None
) -> None:
    """capability: the GPU's compute capability. version: the CUDA version of its driver. said: a part of the reason, in
    which "a card" is the name of the stand-in GPU; None: not refused."""
    card.capability, card.library = capability, Library(version)
    found = launching.why_not(GPU)
    assert found is None if said is None else said in str(found)


def test_without_a_driver_the_native_backend_says_that_the_driver_cannot_be_loaded(
    card: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "no-such-library.so.1")
    monkeypatch.setattr(launching, "driver_here", driver.driver_here.__wrapped__)
    assert "driver cannot be loaded" in str(launching.why_not(GPU))


def test_a_library_that_lacks_functions_of_the_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's stubs and other makers' libraries can be loaded in the driver's place, but lack functions."""
    class Stub:
        cuDriverGetVersion = Function(lambda out: 34)

        def cuLaunchKernel(self) -> None:
            """Without the attributes of a function of ctypes."""

    with pytest.raises(Refusal, match="NVIDIA's driver has no cuLaunchKernel: install the driver again"):
        driver.Driver(SimpleNamespace())
    stub = SimpleNamespace(cuLaunchKernel=SimpleNamespace(), cuDriverGetVersion=Stub.cuDriverGetVersion)
    with pytest.raises(RuntimeError, match="cuDriverGetVersion: 34"):
        driver.Driver(stub).version()
    for call, given in (("cuModuleLoadData", (b"", "name", 0)),):
        with pytest.raises(Refusal, match=f"has no {call}"):
            driver.Driver(stub).load(*given)
    with pytest.raises(Refusal, match="has no cuTensorMapEncodeTiled"):
        driver.Driver(stub).tensor_map(0, [8, 8], [8, 1], 2, 6, 3, [8, 8])
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: SimpleNamespace())
    monkeypatch.setattr(launching, "uses_archive", lambda device: True)
    monkeypatch.setattr(launching, "driver_here", driver.driver_here.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    assert launching.why_not(GPU) == "NVIDIA's driver has no cuLaunchKernel: install the driver again"


# --- damaged archives -------------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Any, compression: int = zipfile.ZIP_DEFLATED) -> None:
    """Write an archive with changed members to a path. change: takes two of the members by name, the manifest and
    LAYER_NORM_FILE, and returns the members to write."""
    with zipfile.ZipFile(archive.ARCHIVE) as whole:
        members = {"manifest.json": whole.read("manifest.json"), LAYER_NORM_FILE: whole.read(LAYER_NORM_FILE)}
    with zipfile.ZipFile(path, "w", compression) as damaged:
        for name, content in change(members).items():
            damaged.writestr(name, content)


def in_manifest(change: Any) -> Any:
    """A function that writes an archive whose manifest is change(manifest); see DAMAGES."""
    def changed(members: dict[str, bytes]) -> dict[str, bytes]:
        content = json.loads(members["manifest.json"])
        return {**members, "manifest.json": json.dumps(change(content)).encode()}

    return lambda path: rewritten(path, changed)


def of_each_kernel(change: Any) -> Any:
    """A function that writes an archive in whose manifest the list of each kernel variant is change(list); see
    DAMAGES."""
    return in_manifest(lambda content: {**content, "kernels": {
        key: {one: change(list(given)) for one, given in variants.items()}
        for key, variants in content["kernels"].items()
    }})


def flipped(path: Path, share: float) -> None:
    """Write the archive to a path, with all bits of 5000 bytes inverted. share: where these bytes begin, as a part of
    the archive's length."""
    content = bytearray(archive.ARCHIVE.read_bytes())
    start = int(len(content) * share)
    content[start:start + 5000] = bytes(255 - byte for byte in content[start:start + 5000])
    path.write_bytes(content)


# A member of the archive.
LAYER_NORM_FILE = "80/tokens.layer_norm_rows"
# Functions that write a damaged archive to a path, by what is wrong with it.
DAMAGES: dict[str, Any] = {
    "nothing": lambda path: None, "an empty file": lambda path: path.touch(),
    "a folder": lambda path: path.mkdir(),
    "cut off": lambda path: path.write_bytes(archive.ARCHIVE.read_bytes()[:1000]),
    "its end alone": lambda path: path.write_bytes(archive.ARCHIVE.read_bytes()[-5000:]),
    "other bytes at its end": lambda path: flipped(path, 0.9995),
    "no manifest": lambda path: rewritten(path, lambda members: {}),
    "no JSON": lambda path: rewritten(path, lambda members: {"manifest.json": b"{"}),
    "no text": lambda path: rewritten(path, lambda members: {"manifest.json": b"\xff\xfe\xff"}),
    "deep JSON": lambda path: rewritten(path, lambda members: {"manifest.json": b"[" * 100_000}),
    "a list": in_manifest(lambda content: []), "no kernels": in_manifest(lambda content: {"digest": "x"}),
    "a list of kernels": in_manifest(lambda content: {**content, "kernels": [1]}),
    "no variants": in_manifest(lambda content: {**content, "kernels": {"a": None}}),
    "too few numbers": of_each_kernel(lambda given: given[:3]),
    "a text for a number": of_each_kernel(lambda given: [given[0], "0", *given[2:]]),
    "a negative number": of_each_kernel(lambda given: [given[0], -1, *given[2:]]),
    "beyond the file": of_each_kernel(lambda given: [given[0], 10**9, *given[2:]]),
    "another file": of_each_kernel(lambda given: ["80/none", *given[1:]]),
    "another version's": in_manifest(lambda content: {"digest": "another", "kernels": {}}),
}


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The path at which the archive is looked up in this test. There is no file yet: the test writes a damaged one
    there."""
    monkeypatch.setattr(archive, "ARCHIVE", tmp_path / "kernels.zip")
    archive.manifest.cache_clear()
    archive.text_of.cache_clear()
    yield tmp_path / "kernels.zip"
    archive.manifest.cache_clear()
    archive.text_of.cache_clear()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_archive_makes_the_backend_say_install_onediff_again(card: Any, damaged: Path, damage: Any) -> None:
    """No exception is raised, whatever is wrong with the file. damage: writes such a file to a path; see DAMAGES."""
    with pytest.MonkeyPatch.context() as undamaged:
        undamaged.setattr(archive, "ARCHIVE", Path(archive.__file__).with_name("kernels.zip"))
        damage(damaged)
    assert str(launching.why_not(GPU)).endswith(": install OneDiff again")


@pytest.mark.parametrize("share", [0.0, 0.05, *(number / 20 for number in range(2, 20))])
def test_changed_bytes_anywhere_in_the_archive_are_found(card: Any, damaged: Path, share: float) -> None:
    """Either the manifest is refused, or at least one member; every member that can be read has its original content.
    share: where the changed bytes begin, as a part of the archive's length."""
    with pytest.MonkeyPatch.context() as undamaged:
        undamaged.setattr(archive, "ARCHIVE", Path(archive.__file__).with_name("kernels.zip"))
        flipped(damaged, share)
    with zipfile.ZipFile(Path(archive.__file__).with_name("kernels.zip")) as members:
        contents = {name: members.read(name) for name in members.namelist()}
    refused = 0
    with zipfile.ZipFile(damaged) as members:
        names = [name for name in members.namelist() if name != "manifest.json"]
    for name in names:
        try:
            assert archive.text_of(name) == contents[name]
        except Refusal as reason:
            refused += 1
            assert str(reason).startswith("OneDiff's compiled GPU code (kernels.zip) cannot be read (")
            assert str(reason).endswith("): install OneDiff again")
    assert refused or "install OneDiff again" in str(launching.why_not(GPU))


def test_an_archive_that_cannot_be_read_is_opened_once_and_the_next_backend_computes(
    card: Any, damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """reads: an item for each time the archive was opened."""
    reads: list[int] = []
    monkeypatch.setattr(native, "refuse_without_gpu", lambda device: None)

    def read(path: Path) -> None:
        reads.append(1)
        raise OSError("gone")

    monkeypatch.setattr(archive.zipfile, "ZipFile", read)
    devices = Devices([native.Native(TuningCache()), Eager()], lambda network: None)
    for _ in range(3):
        found = devices.candidates(Settings(), GPU, torch.float16, is_warm_up=False)
        assert [one.name for one in found.devices] == ["eager"]
        assert found.reason == (
            "OneDiff's compiled GPU code (kernels.zip) cannot be read (gone): install OneDiff again"
        )
    assert reads == [1]


def test_a_kernel_that_cannot_be_loaded_is_tried_again_only_after_out_of_memory(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """errors: what each load raises, in order; None: nothing. The fourth would be raised by a second load of the broken
    kernel."""
    device = native.Native(TuningCache())
    full, broken = (native.KernelUse(name, (), torch.float32, torch.device("cpu")) for name in ("full", "broken"))
    errors = [torch.cuda.OutOfMemoryError("full"), None, RuntimeError("broken"), AssertionError("loaded again")]

    def load_kernels(*given: Any) -> None:
        error = errors.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(native, "load_kernels", load_kernels)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        device.prepare(full)
    device.prepare(full)
    for _ in range(2):
        with pytest.raises(Refusal, match="broken"):
            device.prepare(broken)
