"""What Inductor has compiled, on the disk: by other processes, by other versions, deleted and damaged."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import a_call, relative_error, served
from test_inductor import CLOSE, SMALL_SD1, needs_inductor, ours

import lib_onediff
from lib_onediff.accelerator import runtime
from lib_onediff.backends import inductor as backend_module
from lib_onediff.backends import inductor_cache, inductor_helper
from lib_onediff.backends.inductor import Allowance, Inductor
from lib_onediff.backends.inductor_cache import path_of
from lib_onediff.backends.inductor_helper import compile_in_processes
from lib_onediff.ops import artifact
from lib_onediff.ops.compiled import CompiledRegion
from lib_onediff.ops.regions import ADDITION, Region, Shapes, region_for

Addition = tuple[Region, Shapes, tuple[torch.Tensor, ...]]


def an_addition(width: int = 16) -> Addition:
    """A small region, and inputs for it."""
    inputs = torch.randn(6, width), torch.randn(6, width), torch.randn(width)
    return region_for(ADDITION, inputs), tuple(tuple(tensor.shape) for tensor in inputs), inputs


def check_what_is_compiled(region: Region, shapes: Shapes, inputs: tuple[torch.Tensor, ...]) -> None:
    compiled = CompiledRegion(region)
    compiled.compile(shapes, path_of(region, shapes))
    assert relative_error(compiled(*inputs), sum(inputs)) < CLOSE


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on the disk yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@needs_inductor
def test_what_was_deleted_before_it_was_read_is_compiled_by_others_again(
    empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def compile_elsewhere(missing: inductor_helper.Share, most: int) -> None:
        asked.append(len(missing))
        for region, shapes in missing:
            artifact.write(path_of(region, shapes), "")

    def compile_here(compiled: CompiledRegion, shapes: Shapes) -> None:
        pytest.fail("a call has compiled")

    monkeypatch.setattr(backend_module, "compile_in_processes", compile_elsewhere)
    monkeypatch.setattr(backend_module, "compile_region", compile_here)
    inductor = Inductor(runtime.operators.attention, helpers=1)
    monkeypatch.setattr(runtime.operators, "inductor", inductor)
    monkeypatch.setattr(inductor, "_allowance", Allowance(0.0))
    unet = ours(SMALL_SD1)
    served(unet, a_call(unet))
    inductor.finish()
    for file in inductor_cache.folder().iterdir():
        file.unlink()
    served(unet, a_call(unet))
    inductor.finish()
    assert lib_onediff.status()["route"] == "host"
    batches, singles, again = asked
    assert again == batches > singles


@needs_inductor
def test_copies_of_a_process_compile_what_this_one_reads(empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_helper, "REGIONS_FOR_A_HELPER", 1)
    additions = [an_addition(width) for width in (16, 24)]
    compile_in_processes([(region, shapes) for region, shapes, _ in additions], most=2)
    for addition in additions:
        assert path_of(*addition[:2]).exists()
        check_what_is_compiled(*addition)


def test_what_another_version_has_compiled_is_not_read(empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    region, shapes, _ = an_addition()
    before = path_of(region, shapes)
    monkeypatch.setattr(inductor_cache, "SOURCES", inductor_cache.SOURCES + b"# changed")
    after = path_of(region, shapes)
    assert before.name == after.name and before != after


@needs_inductor
def test_code_on_the_disk_that_is_damaged_is_compiled_anew(empty: None) -> None:
    addition = an_addition()
    path = path_of(*addition[:2])
    check_what_is_compiled(*addition)
    files = list(path.parent.iterdir())
    assert path in files and {file.name for file in files} <= {path.name, path.name + artifact.CODE}, "one is not whole"
    for file in files:
        file.write_bytes(b"{}")
    check_what_is_compiled(*addition)
