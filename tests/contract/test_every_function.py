"""Makes each function of OneDiff that runs during an image raise, once or at every call. The image must be right (see
what_is_wrong), no exception may reach the host, and OneDiff must serve the next image. Nightly runs try the functions
in all hosts, other runs a selection of them in some hosts."""
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

from broken_functions import Breaker, Broken, Name, functions_called
from builders import SMALL, SMALL_XL
from contract_hosts import HOSTS, calls_of, controlled_forward, running
from grid import WHOLE
from test_public_api_pipelines import inputs, pipeline, quiet
from torch import Tensor

from lib_onediff.public import compile_pipe, status, uncompile_pipe
from lib_onediff.runtime.runtime import Runtime, runtime

__all__ = ["quiet"]
pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names"),
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")),
]
# Functions that the host calls directly, before the guard is reached, and the guard itself. If one of these raises, the
# exception reaches the host.
OUTERMOST = {
    "Guard.serve", "Guard.attempt", "Guard.hook.<locals>.decorate.<locals>.guarded",
    # contract_hosts calls these during a generation, the script only when it is loaded.
    "Guard.hook", "Guard.hook.<locals>.decorate",
    "Link.__init__.<locals>.patched", "Link.__init__.<locals>.untraced", "ClassPatch.look_up", "TablePatch.look_up",
    "TablePatch.get", "ModuleForward.look_up", "is_front", "ModuleForward._by_hooks", "LoopAnnouncer.look_up",
    "LoopAnnouncer._follow.<locals>.close",
    "record_next_call.<locals>.recording", "status", "Cache.status",
    "Routes.status", "Runtime.settings",
    "SentenceRoute.get_route_handler.<locals>.handle_with_sentences",
}
# With DDIM, these random networks amplify any change of a step, so that a lossless image shows every fault of a step.
# But work that policies skip would change the image as much as a fault. With Euler, it changes the image by at most
# 0.04.
LOSSLESS = "DDIMScheduler"
LOSSY = "EulerDiscreteScheduler"
# An image with some steps by the host may differ from the host's image by this factor more than OneDiff's does.
SLACK = 1.25
# Files whose faults deny access, which is right.
DOORS = ("api/auth.py", "api/origins.py")
PIPELINES: dict[str, Any] = {
    "SD1": ("StableDiffusionImg2ImgPipeline", SMALL, {}, ""),
    "SDXL": ("StableDiffusionXLPipeline", SMALL_XL, {}, "hosts/"),
    "fewer steps": (
        "StableDiffusionXLPipeline", SMALL_XL, {"deepcache_interval": 2, "skip_negative_after": 50},
        "deepcache|guidance|forecast|schedule|_by_step",
    ),
}


def functions_to_try(names: list[Name], own: str) -> list[Name]:
    """A selection of these functions: in nightly runs all whose file matches the pattern `own` and every fifth of the
    others, otherwise a tenth of these."""
    tried = [name for name in names if name[1] not in OUTERMOST and not name[0].endswith(DOORS)]
    fits = [name for name in tried if re.search(own, name[0])]
    others = [name for name in tried if name not in fits][::5]
    return [*fits, *others] if WHOLE else [*fits, *others][::10]


class Reference(NamedTuple):
    """The images to compare with.

    host: the host's own.
    ours: OneDiff's without faults. It differs from the host's if policies skip work.
    calls: how many UNet calls of OneDiff's image took each route, by route.
    """

    host: list[Any]
    ours: list[Any]
    calls: dict[str, int]


def differences(made: Any, expected: Any) -> tuple[float, float]:
    """The largest difference of two images, and the root mean square of all differences; infinite if they
    cannot be compared."""
    made = numpy.asarray(made, dtype="float64")
    expected = numpy.asarray(expected, dtype="float64")
    if made.shape != expected.shape or not numpy.isfinite(made).all():
        return float("inf"), float("inf")
    found = numpy.abs(made - expected)
    return float(found.max()), float(numpy.sqrt(numpy.square(found).mean()))


def what_is_wrong(made: list[Any], reference: Reference) -> str:
    """Why images that were made with a fault are wrong; "" if they are right. Some steps may be the host's and others
    ours, so they must not differ from the host's images by much more than ours do."""
    for image, host, ours in zip(made, reference.host, reference.ours, strict=True):
        found = differences(image, host)
        usual = differences(ours, host)
        for name, difference, most in zip(("largest", "mean"), found, usual, strict=True):
            if not difference <= max(1 / 255, SLACK * most):
                return f"the {name} difference is {difference:.4f}, without a fault {most:.4f}"
    return ""


def what_is_wrong_next(made: list[Any], calls: dict[str, int], reference: Reference) -> str:
    """Why the images after a fault are wrong; "" if they are right: OneDiff must serve them again as
    without the fault."""
    difference = max(differences(image, ours)[0] for image, ours in zip(made, reference.ours, strict=True))
    if not difference <= 1 / 255:
        return f"the next image differs by {difference:.4f} from one without a fault"
    if calls != reference.calls:
        return f"the next image's calls took {calls}, not {reference.calls}: {runtime.status()['reason']}"
    return ""


def start_afresh(prepare: Callable[[], Any]) -> None:
    """Reset the runtime, its faults and its measurements, and call prepare()."""
    runtime.guard.forget()
    runtime.tuning_cache.clear()
    runtime.purge()
    prepare()


def reference_without_faults(
    prepare: Callable[[], Any], images: Callable[[], list[Any]], expected: list[Any]
) -> Reference:
    """The Reference for images that are made without faults. expected: the host's own."""
    start_afresh(prepare)
    ours = images()
    reference = Reference(expected, ours, {})
    _, calls = calls_of(images)
    return reference._replace(calls=calls)


def check_images_whichever_function_fails(
    prepare: Callable[[], Any], images: Callable[[], list[Any]], expected: list[Any], own: str
) -> None:
    """Make functions of ours fail while images are made, and assert that every image and the next one are right.

    prepare: lets OneDiff serve, as if newly started. images: makes the images with OneDiff. expected: the host's own
    images. own: see functions_to_try().
    """
    made: list[list[Any]] = []

    def work() -> None:
        made.append(images())
        # An exception of the status reaches whoever has asked for it, and no image.
        with contextlib.suppress(Broken):
            status()

    reference = reference_without_faults(prepare, images, expected)
    start_afresh(prepare)
    names = functions_called(work)
    breaker = Breaker()
    found = []
    for name in functions_to_try(names, own):
        for always in (False, True):
            start_afresh(prepare)
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
    """One of PIPELINES, and a function that makes its image."""
    kind, layout, options, _ = PIPELINES[name]
    pipe = pipeline(kind, layout, LOSSY if options else LOSSLESS)
    # Enough steps for policies.
    steps = {"num_inference_steps": 12} if options else {}
    return pipe, lambda: [pipe(**{**inputs(kind, 64, 64), **steps}).images[0]]


@pytest.mark.parametrize("name", PIPELINES if WHOLE else ["fewer steps"])
def test_whichever_function_of_onediff_fails_the_image_of_a_pipeline_is_right(name: str) -> None:
    """name: the name of a diffusers pipeline in PIPELINES. OneDiff's functions raise in turn, once and at every call.
    Right: the image differs from the pipeline's without OneDiff at most a little more than the image without a fault
    does, and OneDiff serves the next image as without a fault."""
    _, _, options, own = PIPELINES[name]
    pipe, images = pipeline_of(name)

    def prepare() -> None:
        compile_pipe(uncompile_pipe(pipe), **options)

    expected = images()
    check_images_whichever_function_fails(prepare, images, expected, own)


@pytest.mark.parametrize("name", [*(HOSTS if WHOLE else ["reforge"]), "a1111 with ControlNet"])
def test_whichever_function_of_onediff_fails_the_image_of_a_webui_is_right(name: str, fresh_runtime: None) -> None:
    """name: the name of the WebUI, for which a stand-in runs; in "a1111 with ControlNet", another extension has
    replaced the UNet's forward. OneDiff's functions raise in turn, once and at every call. Right: the image differs
    from the WebUI's without OneDiff at most a little more than the image without a fault does, and OneDiff serves the
    next image as without a fault."""
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
        check_images_whichever_function_fails(prepare, images, expected, "hosts/")


# --- whether the checks above notice wrong images -----------------------------------------------------------------

FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeroed": torch.zeros_like, "not a number": lambda output: output * float("nan"), "negated": torch.neg,
    "of another size": lambda output: output[..., :-1], "half as large": lambda output: output / 2,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["SDXL", "fewer steps"])
def test_what_is_wrong_rejects_an_image_of_wrong_unet_outputs(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """what_is_wrong() accepts OneDiff's and the host's images, and rejects an image in which OneDiff's second UNet call
    or every call has a wrong output. what_is_wrong_next() rejects an image in which every call has one. fault: how the
    output is wrong; for another size, the scheduler may raise before there is an image."""
    options = PIPELINES[name][2]
    pipe, images = pipeline_of(name)
    expected = images()
    reference = reference_without_faults(lambda: compile_pipe(pipe, **options), images, expected)
    if options:
        assert differences(reference.ours[0], expected[0])[0] > 1 / 255, "what the policies skip is visible"
    assert what_is_wrong(reference.ours, reference) == "" and what_is_wrong(expected, reference) == ""
    run = Runtime.run
    for first, last in ((1, 1), (0, 99)):
        count = itertools.count()
        monkeypatch.setattr(Runtime, "run", lambda *given, count=count, first=first, last=last, **more: (
            FAULTS[fault](run(*given, **more)) if first <= next(count) <= last else run(*given, **more)
        ))
        of_scheduler = (RuntimeError, ValueError) if fault == "of another size" else ()
        with contextlib.suppress(*of_scheduler):
            assert what_is_wrong(images(), reference), f"calls {first} to {last}"
            # A single wrong call was in the image before.
            assert what_is_wrong_next(images(), reference.calls, reference) or first == 1
        monkeypatch.setattr(Runtime, "run", run)
