"""Every function of ours that runs during an image, made to raise in turn, once and always: the image is the host's
own, nothing reaches the host, and the status answers. At night all of them everywhere, otherwise some in some hosts."""
from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy
import pytest

pytest.importorskip("gradio")
pytest.importorskip("diffusers")

from broken_functions import Breaker, Name, functions_called
from builders import SMALL, SMALL_XL
from contract_hosts import HOSTS, controlled_forward, running
from grid import WHOLE
from test_public_api_pipelines import inputs, pipeline, quiet

from lib_onediff.public import compile_pipe, status, uncompile_pipe
from lib_onediff.runtime.runtime import runtime

__all__ = ["quiet"]
pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="code does not say which class it is of"),
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")),
]
# What the host itself calls, each no more than a step to the guard, and the guard. Nothing stands around them.
OUTERMOST = {
    "Guard.serve", "Guard.attempt", "Guard.hook.<locals>.decorate.<locals>.guarded",
    # contract_hosts decorates within a generation; the script does once, when it is loaded.
    "Guard.hook", "Guard.hook.<locals>.decorate",
    "Link.__init__.<locals>.patched", "Link.__init__.<locals>.untraced", "ClassPatch.look_up", "TablePatch.look_up",
    "TablePatch.get", "ModuleForward.stands", "is_front", "ModuleForward._by_hooks", "LoopAnnouncer.stands",
    "LoopAnnouncer._follow.<locals>.close",
    "listen.<locals>.listening", "status", "Cache.status",
    "Routes.status", "Runtime.settings",
    "SentenceRoute.get_route_handler.<locals>.handle_with_sentences",
}
DOORS = ("api/auth.py", "api/origins.py")
PIPELINES: dict[str, Any] = {
    "SD1": ("StableDiffusionImg2ImgPipeline", SMALL, {}, ""),
    "SDXL": ("StableDiffusionXLPipeline", SMALL_XL, {}, "hosts/"),
    "fewer steps": (
        "StableDiffusionXLPipeline", SMALL_XL, {"deepcache_interval": 2, "skip_negative_after": 50},
        "deepcache|guidance|forecast|schedule|_by_step",
    ),
}


def some(names: list[Name], own: str) -> list[Name]:
    """Those to try: at night all whose file fits own and each fifth of the others, otherwise a tenth of that."""
    # Who cannot be looked at is not let in.
    tried = [name for name in names if name[1] not in OUTERMOST and not name[0].endswith(DOORS)]
    fits = [name for name in tried if re.search(own, name[0])]
    others = [name for name in tried if name not in fits][::5]
    return [*fits, *others] if WHOLE else [*fits, *others][::10]


def distance(made: list[Any], expected: list[Any]) -> float:
    """The largest of any value's; infinite where one is no number."""
    pairs = zip(made, expected, strict=True)
    far = [float(numpy.abs(numpy.asarray(one) - numpy.asarray(other)).max()) for one, other in pairs]
    return max(far) if numpy.isfinite(far).all() else float("inf")


def nothing_is_lost(
    prepare: Callable[[], Any], images: Callable[[], list[Any]], expected: list[Any], own: str
) -> None:
    """Try the functions. prepare: lets OneDiff be as if it had seen nothing. images: makes them, with OneDiff.
    expected: the host's own. own: of which files all functions are tried, as a pattern."""

    def afresh() -> None:
        runtime.guard.forget()
        runtime.tuning_cache.clear()
        runtime.purge()
        prepare()

    def work() -> None:
        made.append(images())
        status()

    made: list[list[Any]] = []
    afresh()
    names, breaker, found = functions_called(work), Breaker(), []
    # With lossless settings none.
    usual = distance(made.pop(), expected)
    for name in some(names, own):
        for always in (False, True):
            afresh()
            with breaker.broken(name, always) as raised:
                try:
                    work()
                    far = distance(made.pop(), expected)
                    problem = f"{far:.3f} away" if far > max(1 / 255, 1.5 * usual) else ""
                except Exception as error:
                    problem = repr(error)
            if problem and raised:
                found.append(f"{name[0]}:{name[2]} {name[1]}, {'always' if always else 'once'}: {problem}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", PIPELINES if WHOLE else ["fewer steps"])
def test_an_image_of_a_pipeline(name: str) -> None:
    kind, layout, options, own = PIPELINES[name]
    pipe = pipeline(kind, layout)
    steps = {"num_inference_steps": 12} if options else {}

    def images() -> list[Any]:
        return [pipe(**{**inputs(kind, 64, 64), **steps}).images[0]]

    def prepare() -> None:
        compile_pipe(uncompile_pipe(pipe), **options)

    expected = images()
    nothing_is_lost(prepare, images, expected, own)


@pytest.mark.parametrize("name", [*(HOSTS if WHOLE else ["reforge"]), "a1111 with ControlNet"])
def test_an_image_of_a_webui(name: str, fresh_runtime: None) -> None:
    with running(name.split()[0]) as host:
        if "ControlNet" in name:
            host.unet.forward = MethodType(controlled_forward, host.unet)

        def images() -> list[Any]:
            return list(host.generate())

        def prepare() -> None:
            if host.adapter is not None:
                host.switch(False)
            runtime.webui = None
            host.start()

        expected = images()
        nothing_is_lost(prepare, images, expected, "hosts/")
