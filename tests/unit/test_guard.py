"""The guard around every hook. A fault (an exception of our own code) is recorded and hidden from the host; an
exception of the host's code is raised."""
from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest

from lib_onediff.core.attempt import HostError
from lib_onediff.core.guard import Guard
from lib_onediff.core.origins import beneath_ours
from lib_onediff.core.refusal import Refusal
from lib_onediff.hosts.hooks import ClassPatch
from lib_onediff.weights.scan import refuse_replaced


class Owner:
    def forward(self, x: int) -> int:
        if x < 0:
            raise ValueError("the host's own")
        return x + 1


def patched(replacement: Any, guard: Guard, reasons: list[str]) -> ClassPatch:
    """Patch the forward of a new class by this replacement. reasons: gets the reason of each call that is left to the
    host."""
    owner = type("Patched", (Owner,), {"forward": Owner.forward})
    patch = ClassPatch(owner, "forward", replacement, guard, "the test", lambda module, reason: reasons.append(reason))
    patch.apply()
    return patch


def broken(original: Any, module: Any, x: int) -> int:
    """Call the host's forward, and then raise an error of our own."""
    original(module, x)
    raise IndexError("first line\nsecond line")


def test_an_exception_of_ours_after_a_caught_one_of_the_webui_is_recorded_as_our_fault() -> None:
    """Our hook calls the host's forward, which raises, catches that, calls it again with success, and raises an
    exception of its own. This is recorded as a fault, and the caller gets the host's result."""
    guard = Guard()
    reasons = []

    def fails_after_the_host_has_recovered(original: Any, module: Any, x: int) -> int:
        with contextlib.suppress(HostError):
            original(module, -1)
        original(module, x)
        raise KeyError("ours")

    module = patched(fails_after_the_host_has_recovered, guard, reasons).owner()
    assert module.forward(1) == 2 and reasons == guard.faults


def test_exceptions_of_the_webui_are_raised_and_not_logged_as_faults(caplog: pytest.LogCaptureFixture) -> None:
    """The traceback has three frames of OneDiff's hook between the caller's and the WebUI's."""
    guard = Guard()
    reasons = []
    module = patched(lambda original, module, x: original(module, x), guard, reasons).owner()
    with pytest.raises(ValueError, match="the host's own") as raised:
        module.forward(-1)
    # Our hook replaces the host's function and calls it, with no other code in between.
    assert [frame.name for frame in raised.traceback][1:] == ["patched", "untraced", "serve", "forward"]
    assert reasons == [] and guard.faults == [] and not guard.suspended and caplog.records == []


def test_a_hook_that_fails_returns_its_fallback(caplog: pytest.LogCaptureFixture) -> None:
    """otherwise: the fallback, by default None. A fault of a hook with in_generation suspends OneDiff for that image. A
    fault that occurs again is not logged again."""
    guard = Guard()

    @guard.hook("the page", otherwise=[])
    def page() -> list[int]:
        raise TypeError("no page")

    @guard.hook("the settings", in_generation=True)
    def settings() -> None:
        raise TypeError("no settings")

    assert page() == [] and not guard.suspended
    assert settings() is None
    assert guard.suspended == "a fault of OneDiff in the settings, please report it: no settings"
    assert guard.attempt("watching", lambda: [][1], 7) == 7 and guard.attempt("watching", lambda: 3) == 3
    assert len(guard.faults) == 3 and len(caplog.records) == 3
    for _ in range(5):
        page()
    assert len(caplog.records) == 3, "the same fault is logged once"


def test_after_a_fault_that_a_hook_handled_the_webui_computes_the_rest_of_the_image(
    caplog: pytest.LogCaptureFixture
) -> None:
    """The hook of the UNet records its own fault with give_up() and returns the host's output. The VAE's hook, called
    next, then leaves its call to the host as well. After resume(), which begins the next image, it serves again."""
    guard = Guard()
    reasons = []

    def answers(original: Any, module: Any, x: int) -> int:
        try:
            return broken(original, module, x)
        except IndexError as error:
            guard.give_up("the route", error)
            return original(module, x)

    guard.resume()
    unet = patched(answers, guard, reasons)
    vae = patched(lambda original, module, x: -x, guard, reasons)
    assert vae.owner().forward(1) == -1
    assert unet.owner().forward(1) == 2 and reasons == []
    assert vae.owner().forward(1) == 2 and reasons == guard.faults
    guard.resume()
    assert vae.owner().forward(1) == -1


def test_a_fault_outside_of_hooks_does_not_stop_onediff_for_the_image(caplog: pytest.LogCaptureFixture) -> None:
    """give_up() is called outside of any hook: it records the fault, and the next calls of a hook are served."""
    guard = Guard()
    reasons = []
    guard.resume()
    sentence = guard.give_up("the route", KeyError("ours"))
    module = patched(lambda original, module, x: -x, guard, reasons).owner()
    assert module.forward(1) == module.forward(1) == -1
    assert guard.faults == [sentence] and not guard.suspended and reasons == []


def test_undoing_our_patch_keeps_a_later_one_of_other_code() -> None:
    """The other code's forward (+ 100) calls ours (doubles), which calls the original (+ 1). After undo(), ours only
    calls the original; after apply(), it doubles again."""
    class Owner:
        def forward(self, x: int) -> int:
            """Adds one."""
            return x + 1

    def doubled(original: Any, module: Any, x: int) -> int:
        return 2 * original(module, x)

    def theirs(self: Any, x: int) -> int:
        return ours(self, x) + 100

    patch = ClassPatch(Owner, "forward", doubled, Guard(), "a method")
    patch.apply()
    ours: Any = Owner.__dict__["forward"]
    assert Owner.forward.__doc__ == "Adds one."
    Owner.forward = theirs
    assert Owner().forward(3) == 108
    patch.undo()
    assert Owner.__dict__["forward"] is theirs and Owner().forward(3) == 104
    patch.apply()
    assert Owner().forward(3) == 108


def test_the_package_that_replaced_a_method_is_found_by_the_code_not_by_the_wrapped_name() -> None:
    """functools.wraps gives another package's function the name and module of the function that it replaces. The
    refusal still names that package, also beneath our own patch."""

    class Owner:
        def forward(self, x: int) -> int:
            return x + 1

    own = Owner.__dict__["forward"]
    strange = {"__name__": "strange.package"}
    exec("def forward(self, x): return x + 2", strange)
    patch = ClassPatch(Owner, "forward", lambda original, module, x: original(module, x), Guard(), "a method")
    patch.apply()
    refuse_replaced(Owner)
    assert beneath_ours(Owner.__dict__["forward"]) is own
    patch.undo()
    # It has the name and the module of the function that it replaces.
    Owner.forward = functools.wraps(own)(strange["forward"])  # type: ignore[method-assign]
    patch.apply()
    with pytest.raises(Refusal, match="Owner.forward was replaced by strange.package"):
        refuse_replaced(Owner)
    assert Owner().forward(1) == 3
