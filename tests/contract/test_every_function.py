"""Every function of ours that runs during an image, made to raise in turn, once and always: the image is right, nothing
reaches the host, the status answers, and the next image is right and ours again. At night all of them everywhere,
otherwise some in some hosts."""
from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import numpy
import pytest
import torch

pytest.importorskip("gradio")
pytest.importorskip("diffusers")

from broken_functions import Breaker, Name, functions_called
from builders import SMALL, SMALL_XL
from contract_hosts import HOSTS, calls_of, controlled_forward, running
from grid import WHOLE
from test_public_api_pipelines import inputs, pipeline, quiet
from torch import Tensor

from lib_onediff.public import compile_pipe, status, uncompile_pipe
from lib_onediff.runtime.runtime import Runtime, runtime

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
    "TablePatch.get", "ModuleForward.look_up", "is_front", "ModuleForward._by_hooks", "LoopAnnouncer.look_up",
    "LoopAnnouncer._follow.<locals>.close",
    "listen.<locals>.listening", "status", "Cache.status",
    "Routes.status", "Runtime.settings",
    "SentenceRoute.get_route_handler.<locals>.handle_with_sentences",
}
# With DDIM these random networks amplify what a step changes: a lossless image shows every fault of a step, and what
# policies leave out would be as far away as a fault. With Euler it is 0.04 at most.
LOSSLESS = "DDIMScheduler"
LOSSY = "EulerDiscreteScheduler"
# How much farther from the host's an image may be of which some steps are the host's.
SLACK = 1.25
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


class Reference(NamedTuple):
    """What is right. host: the host's own image. ours: OneDiff's, undisturbed, which differs where steps are left out.
    calls: how many UNet calls of an undisturbed image took each route."""

    host: list[Any]
    ours: list[Any]
    calls: dict[str, int]


def apart(made: Any, expected: Any) -> tuple[float, float]:
    """The largest difference of two images, and their root mean square; infinite where they cannot be compared."""
    made = numpy.asarray(made, dtype="float64")
    expected = numpy.asarray(expected, dtype="float64")
    if made.shape != expected.shape or not numpy.isfinite(made).all():
        return float("inf"), float("inf")
    differences = numpy.abs(made - expected)
    return float(differences.max()), float(numpy.sqrt(numpy.square(differences).mean()))


def what_is_wrong(made: list[Any], reference: Reference) -> str:
    """Why an image with a fault in the middle is not right; "" where it is. Some of its steps may be the host's and
    others ours, so that it is no farther from the host's than ours is."""
    for image, host, ours in zip(made, reference.host, reference.ours, strict=True):
        for far, measured, what in zip(apart(image, host), apart(ours, host), ("at most", "in the mean"), strict=True):
            if not far <= max(1 / 255, SLACK * measured):
                return f"{far:.4f} away {what}, where ours is {measured:.4f}"
    return ""


def what_is_wrong_next(made: list[Any], calls: dict[str, int], reference: Reference) -> str:
    """The same of the next image, in which nothing fails any more: it is ours again."""
    far = max(apart(image, ours)[0] for image, ours in zip(made, reference.ours, strict=True))
    if not far <= 1 / 255:
        return f"the next image is {far:.4f} away from an undisturbed one"
    if calls != reference.calls:
        return f"the next image's calls went by {calls}, not {reference.calls}: {runtime.status()['reason']}"
    return ""


def afresh(prepare: Callable[[], Any]) -> None:
    """OneDiff is as if it had seen nothing."""
    runtime.guard.forget()
    runtime.tuning_cache.clear()
    runtime.purge()
    prepare()


def undisturbed(prepare: Callable[[], Any], images: Callable[[], list[Any]], expected: list[Any]) -> Reference:
    """expected: the host's own image."""
    afresh(prepare)
    ours = images()
    reference = Reference(expected, ours, {})
    _, calls = calls_of(images)
    return reference._replace(calls=calls)


def nothing_is_lost(
    prepare: Callable[[], Any], images: Callable[[], list[Any]], expected: list[Any], own: str
) -> None:
    """Try the functions. prepare: lets OneDiff be as if it had seen nothing. images: makes them, with OneDiff.
    expected: the host's own. own: of which files all functions are tried, as a pattern."""
    made: list[list[Any]] = []

    def work() -> None:
        made.append(images())
        status()

    reference = undisturbed(prepare, images, expected)
    afresh(prepare)
    names = functions_called(work)
    breaker = Breaker()
    found = []
    for name in some(names, own):
        for always in (False, True):
            afresh(prepare)
            with breaker.broken(name, always) as raised:
                try:
                    work()
                    problem = what_is_wrong(made.pop(), reference)
                except Exception as error:
                    problem = repr(error)
            if raised and not problem:
                try:
                    problem = what_is_wrong_next(*calls_of(images), reference)
                except Exception as error:
                    problem = f"the next image: {error!r}"
            if problem and raised:
                found.append(f"{name[0]}:{name[2]} {name[1]}, {'always' if always else 'once'}: {problem}")
    assert not found, "\n".join(found)


def pipeline_of(name: str) -> tuple[Any, Callable[[], list[Any]]]:
    """One of PIPELINES, and what makes its image."""
    kind, layout, options, _ = PIPELINES[name]
    pipe = pipeline(kind, layout, LOSSY if options else LOSSLESS)
    # As many as policies want.
    steps = {"num_inference_steps": 12} if options else {}
    return pipe, lambda: [pipe(**{**inputs(kind, 64, 64), **steps}).images[0]]


@pytest.mark.parametrize("name", PIPELINES if WHOLE else ["fewer steps"])
def test_an_image_of_a_pipeline(name: str) -> None:
    _, _, options, own = PIPELINES[name]
    pipe, images = pipeline_of(name)

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


# --- the measure itself -------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeroed": torch.zeros_like, "not a number": lambda output: output * float("nan"), "negated": torch.neg,
    "of another size": lambda output: output[..., :-1], "half as large": lambda output: output / 2,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["SDXL", "fewer steps"])
def test_a_wrong_output_is_noticed(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a single call in the first half of an image, and of all of them."""
    options = PIPELINES[name][2]
    pipe, images = pipeline_of(name)
    expected = images()
    reference = undisturbed(lambda: compile_pipe(pipe, **options), images, expected)
    if options:
        measured = apart(reference.ours[0], expected[0])
        assert measured[0] > 1 / 255, "the policies have left out what can be seen"
    assert what_is_wrong(reference.ours, reference) == "" and what_is_wrong(expected, reference) == ""
    run = Runtime.run
    for first, last in ((1, 1), (0, 99)):
        count = itertools.count()
        monkeypatch.setattr(Runtime, "run", lambda *given, count=count, first=first, last=last, **more: (
            FAULTS[fault](run(*given, **more)) if first <= next(count) <= last else run(*given, **more)
        ))
        with contextlib.suppress(RuntimeError, ValueError):  # the scheduler's, of another size
            assert what_is_wrong(images(), reference), f"calls {first} to {last}"
            assert what_is_wrong_next(images(), reference.calls, reference) or first == 1
        monkeypatch.setattr(Runtime, "run", run)
