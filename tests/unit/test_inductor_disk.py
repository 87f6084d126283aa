"""What Inductor has compiled, on the disk: by other processes, by other versions, deleted and damaged."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import a_call, relative_error, served
from grid import first
from inductor_fixtures import without_our_files
from test_inductor import CLOSE, LACK, SMALL_SD1, needs_inductor, ours

import lib_onediff
from lib_onediff.engines.inductor import compiler as backend_module
from lib_onediff.engines.inductor import disk as inductor_cache
from lib_onediff.engines.inductor import helper as inductor_helper
from lib_onediff.engines.inductor.compiler import Allowance, Compilable, Inductor
from lib_onediff.engines.inductor.disk import path_of
from lib_onediff.engines.inductor.helper import compile_in_processes
from lib_onediff.ops.inductor import artifact
from lib_onediff.ops.inductor.compiled import CompiledRegion
from lib_onediff.ops.inductor.regions import ADDITION, Region, Shapes, region_for
from lib_onediff.ops.tuning_cache import TuningCache
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store.history import History

Addition = tuple[Region, Shapes, tuple[torch.Tensor, ...]]


def an_addition(width: int = 16) -> Addition:
    """A small region, and inputs for it."""
    inputs = torch.randn(6, width), torch.randn(6, width), torch.randn(width)
    return region_for(ADDITION, inputs), tuple(tuple(tensor.shape) for tensor in inputs), inputs


def check_what_is_compiled(
    region: Region, shapes: Shapes, inputs: tuple[torch.Tensor, ...], digest: str | None = None
) -> str | None:
    """digest: of what may be read. Returns that of what is on the disk then."""
    compiled = CompiledRegion(region)
    digest = compiled.compile(shapes, path_of(region, shapes), digest)
    assert relative_error(compiled(*inputs), sum(inputs)) < CLOSE
    return digest


@pytest.fixture
def empty(compilers_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours is on the disk yet."""
    without_our_files(compilers_store, monkeypatch)


@needs_inductor
def test_what_was_deleted_before_it_was_read_is_compiled_by_others_again(
    empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def compile_elsewhere(missing: inductor_helper.Share, most: int) -> None:
        asked.append(len(missing))
        for region, shapes in missing:
            artifact.write(Path(f"{path_of(region, shapes)}{artifact.CODE}"), "")
            artifact.write(path_of(region, shapes), "")

    def compile_here(compiled: CompiledRegion, shapes: Shapes, digest: str | None) -> None:
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
        digest = artifact.digest_of(path_of(*addition[:2]))
        assert digest and check_what_is_compiled(*addition, digest) == digest


def test_what_another_version_has_compiled_is_not_read(empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    region, shapes, _ = an_addition()
    before = path_of(region, shapes)
    monkeypatch.setattr(inductor_cache, "source_digest", lambda: "changed")
    after = path_of(region, shapes)
    assert before.name == after.name and before != after


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which files torch was told to load and to run."""
    from torch._inductor.standalone_compile import CompiledArtifact

    loaded, load = [], CompiledArtifact.load

    def noted(*, path: str, format: str) -> CompiledArtifact:
        loaded.append(path)
        return load(path=path, format=format)

    monkeypatch.setattr(CompiledArtifact, "load", staticmethod(noted))
    return loaded


needs_artifacts = pytest.mark.skipif(
    LACK is not None or not artifact.are_possible(), reason=LACK or "this torch keeps its code in caches of its own"
)


@needs_artifacts
def test_code_on_the_disk_that_is_damaged_is_compiled_anew(
    empty: None, reads: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact.log, "propagate", True)
    addition = an_addition()
    path = path_of(*addition[:2])
    digest = check_what_is_compiled(*addition)
    files = list(path.parent.iterdir())
    assert path in files and {file.name for file in files} <= {path.name, path.name + artifact.CODE}, "one is not whole"
    for file in files:
        before = file.read_bytes()
        file.write_bytes(before.replace(b"2 <=", b"1 <=") if file == path else before + b" ")
        caplog.clear()
        again = check_what_is_compiled(*addition, digest)
        assert not reads and "is compiled anew: it is not what OneDiff has noted in its store" in caplog.text
        digest = again
    assert check_what_is_compiled(*addition, digest) == digest
    assert reads == [str(path) + artifact.CODE]


@needs_artifacts
def test_code_that_nobody_vouches_for_is_not_run(empty: None, reads: list[str]) -> None:
    addition = an_addition()
    check_what_is_compiled(*addition)
    check_what_is_compiled(*addition)
    assert not reads


@needs_artifacts
@pytest.mark.parametrize("helpers", first(1, [0, 1]))
def test_the_store_knows_what_was_compiled_and_nothing_else_is_run(
    empty: None, reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    helpers: int,
) -> None:
    monkeypatch.setattr(artifact.log, "propagate", True)

    region, shapes, inputs = an_addition()
    path = path_of(region, shapes)

    def in_a_process() -> int:
        """As a WebUI that was started again has it compiled; how often torch was told to run what lies on the disk."""
        tuning_cache, history, before = TuningCache(), History(), len(reads)
        history.open(tmp_path / "store")
        tuning_cache.attach(history.tuned, history.tune)
        inductor = Inductor(runtime.operators.attention, helpers, tuning_cache)
        compiled = inductor.operators.region(region)
        planned = inductor._compile({compiled: shapes}, torch.device("cpu"))
        wanted = Compilable("", torch.float32, torch.device("cpu"), False)
        assert inductor._read(wanted, planned, waits_for_compile=True)
        assert relative_error(compiled(*inputs), sum(inputs)) < CLOSE
        history.close()
        return len(reads) - before

    assert in_a_process() == helpers, "what a helper has just written"
    assert in_a_process() == 1
    code = Path(f"{path}{artifact.CODE}")
    code.write_bytes(code.read_bytes() + b" ")
    caplog.clear()
    assert in_a_process() == helpers
    assert f"{path} is compiled anew: it is not what OneDiff has noted in its store." in caplog.text
    assert in_a_process() == 1
    assert tuned_in(tmp_path / "store") == {f"{artifact.IN_STORE}{path.name}": artifact.digest_of(path)}


def tuned_in(folder: Path) -> dict[str, object]:
    history = History()
    history.open(folder)
    return history.tuned()
