"""Every test of this folder starts with one thread, a fixed seed and a new runtime."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SMALL_XL
from graph_builders import PretendedGraphs
from ladder_builders import StandInOperators, attached, pretend_a_gpu
from quick_interpreter import remember_what_the_interpreter_looks_up
from runtime_fixtures import fresh_runtime, host_timed_often, no_machine_is_too_slow  # noqa: F401
from vae_builders import fresh_route  # noqa: F401

from lib_onediff.core.table import State
from lib_onediff.runtime import card_route
from lib_onediff.runtime.runtime import runtime

remember_what_the_interpreter_looks_up()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[Any]:
    """Skip tests of float16 if torch does not support it on a CPU, as 2.1 and 2.2."""
    try:
        return (yield)
    except RuntimeError as error:
        if not torch.__version__.startswith(("2.1.", "2.2.")) or "not implemented for 'Half'" not in str(error):
            raise
        pytest.skip("this torch computes no float16 on a CPU")


@pytest.fixture
def seen() -> Iterator[Any]:
    """The OneDiff tab of a very small WebUI, open on a page. It sends the page's requests and keeps the answers."""
    pytest.importorskip("gradio")
    from panel_builders import Seen

    page = Seen()
    yield page
    page.close()


@pytest.fixture
def link() -> Callable[[Path, Path], None]:
    """A function that makes a symbolic link, or skips the test where none can be made: on Windows without rights, and
    in Wine 8, which reports success."""
    def make(place: Path, target: Path) -> None:
        with suppress(OSError):
            place.symlink_to(target)
        if not place.is_symlink():
            pytest.skip("no symbolic link can be made here")

    return make


@pytest.fixture
def native_operators(monkeypatch: pytest.MonkeyPatch) -> StandInOperators:
    """torch's operators in place of the native backend's, on a machine that seems to have a GPU. A test may let them
    fail."""
    operators = StandInOperators()
    pretend_a_gpu(monkeypatch, operators)
    return operators


@pytest.fixture
def pretended(native_operators: StandInOperators, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGraphs]:
    """Pretended CUDA graphs and GPU memory for the backends of native_operators."""
    graphs = PretendedGraphs()
    monkeypatch.setattr(runtime.services.holdings, "made", graphs)
    monkeypatch.setattr(runtime.services.holdings, "card", graphs.card)
    yield graphs


@pytest.fixture
def on_a_gpu(
    native_operators: StandInOperators, pretended: PretendedGraphs, monkeypatch: pytest.MonkeyPatch
) -> StandInOperators:
    """The native backend's operators on a machine that seems to have a GPU with FP8 and INT8 products, besides
    pretended graphs. The kernels are replaced by torch's operators."""
    pytest.importorskip("triton", reason="needs Triton")
    from low_bit_builders import use_low_bit

    use_low_bit(monkeypatch)
    return native_operators


@pytest.fixture
def unet(pretended: PretendedGraphs) -> Any:
    """A small SDXL UNet that OneDiff serves with the runtime's settings and pretended graphs."""
    return attached(**SMALL_XL)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first output of a shape is taken as correct, without a comparison with the host's: the host of these tests
    ignores a ControlNet's residuals."""

    def taken(entry: Any, *given: Any, **more: Any) -> None:
        entry.state = State.PROVED
        entry.verdict.of_image = True

    monkeypatch.setattr(card_route, "prove", taken)
