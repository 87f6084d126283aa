"""The ways in which Forge Neo makes the same image: as it comes, with what it offers to be faster, and with ours."""
from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from .generation import Hooks
from .host import Checkpoint, torch_compile_script

HOST, ONEDIFF, SAGE, OVER_SAGE = "host", "onediff", "sage", "onediff-over-sage"
COMPILE_PRESETS = ("guard_filter_fn", "dynamic")
SAGE_HEADS = (64, 96, 128)


class CannotRun(Exception):
    """This variant does not exist on this machine; the message says why, in one line."""


class NeoVariant(Hooks):
    """Neo as it comes. note: what else is to be said of it; settled: whether it can get no faster."""

    def __init__(self, name: str) -> None:
        self.name = name

    def enter(self, checkpoint: Checkpoint) -> None:
        """The user switches it on. Raises CannotRun."""
        use_attention("attention_pytorch")

    def leave(self, checkpoint: Checkpoint) -> None:
        """The user switches it off."""

    def routes(self) -> Counter[str]:
        """How many UNet calls went which way so far; empty where there is but one way."""
        return Counter()

    def settled(self, routes: Counter[str]) -> bool:
        """Whether an image whose calls took these routes was as fast as any later one."""
        return True

    def note(self) -> str:
        return ""


class TorchCompile(NeoVariant):
    """Neo's own Torch Compile accordion with one of its presets."""

    def __init__(self, preset: str, checkout: Path) -> None:
        super().__init__(f"compile {preset}")
        self._preset, self._checkout = preset, checkout
        self._script: Any = None
        self._caches = contextlib.ExitStack()
        self._note = ""

    def enter(self, checkpoint: Checkpoint) -> None:
        super().enter(checkpoint)
        if checkpoint.device.type == "cpu":
            raise CannotRun("not on a CPU")
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # Neither preset finds what the other, or an earlier run, has compiled.
        from torch._inductor import utils

        fresh_cache = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
        self._caches.enter_context(fresh_cache())
        self._script = torch_compile_script(self._checkout)

    def before(self, p: Any) -> None:
        self._script.process_batch(p, self._preset)

    def leave(self, checkpoint: Checkpoint) -> None:
        if self._script is not None:
            counters = torch._dynamo.utils.counters
            frames, breaks = counters["frames"], sum(counters["graph_break"].values())
            self._note = (
                f"{frames['ok']} of {frames['total']} frames compiled,"
                f" {counters['stats']['unique_graphs']} graphs, {breaks} breaks"
            )
            self._script.process_batch(SimpleNamespace(sd_model=checkpoint), "Disable")
            self._script = None
        torch._dynamo.reset()
        # Where the time was over, others may still be writing there.
        with contextlib.suppress(OSError):
            self._caches.close()

    def note(self) -> str:
        return self._note


class Sage(NeoVariant):
    """SageAttention where Neo uses it: with the package present, at the head sizes that version 1 has."""

    def __init__(self) -> None:
        super().__init__(SAGE)
        self._calls: Counter[str] = Counter()
        self._failure = Failure()

    def enter(self, checkpoint: Checkpoint) -> None:
        from backend import attention, memory_management

        if not memory_management.sage_enabled():
            raise CannotRun("not on a CPU" if checkpoint.device.type == "cpu" else "sageattention cannot be imported")
        use_attention("attention_sage", self._counted)
        attention.logger.addHandler(self._failure)

    def _counted(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        def counted(q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
            self._calls["sage" if q.shape[-1] // heads in SAGE_HEADS else "pytorch"] += 1
            return attention(q, k, v, heads, *args, **kwargs)

        return counted

    def leave(self, checkpoint: Checkpoint) -> None:
        from backend import attention

        attention.logger.removeHandler(self._failure)
        use_attention("attention_pytorch")

    def note(self) -> str:
        total = sum(self._calls.values())
        return f"{self._calls['sage']} of {total} attention calls have a head size that it takes" if total else ""


class OneDiff(NeoVariant):
    """Ours, with its default options."""

    def __init__(self, name: str = ONEDIFF) -> None:
        super().__init__(name)
        self._adapter, self._runtime = onediff_adapter()
        self._reason = ""

    def enter(self, checkpoint: Checkpoint) -> None:
        super().enter(checkpoint)
        self._adapter.serve()
        self._adapter.model_loaded(checkpoint)

    def before(self, p: Any) -> None:
        self._runtime.guard.resume()
        self._adapter.before_sampling(p)

    def after(self, p: Any) -> None:
        self._adapter.after_run(p)
        self._reason = str(self._runtime.status()["reason"] or "")

    def leave(self, checkpoint: Checkpoint) -> None:
        self._adapter.stop()

    def routes(self) -> Counter[str]:
        return Counter(self._runtime.status()["calls"])

    def settled(self, routes: Counter[str]) -> bool:
        return set(routes) == ({"graph"} if torch.cuda.is_available() else {"plain"})

    def note(self) -> str:
        return "; ".join(filter(None, dict.fromkeys([self._reason, *self._runtime.guard.faults])))


class OneDiffOverSage(OneDiff):
    """Ours for a user who has chosen SageAttention: it is not used, and is no yardstick for the first call."""

    def __init__(self) -> None:
        super().__init__(OVER_SAGE)

    def enter(self, checkpoint: Checkpoint) -> None:
        super().enter(checkpoint)
        if checkpoint.device.type == "cpu":
            raise CannotRun("not on a CPU")
        use_attention("attention_sage")

    def leave(self, checkpoint: Checkpoint) -> None:
        super().leave(checkpoint)
        use_attention("attention_pytorch")

    def note(self) -> str:
        return "; ".join(filter(None, [super().note(), *self._adapter.notes()]))


def onediff_adapter() -> tuple[Any, Any]:
    """Our adapter for Forge, not serving yet, and the runtime that it hands calls to."""
    from ...hosts.forge.adapter import Forge
    from ...runtime.runtime import runtime

    return Forge(), runtime


class Failure(logging.Handler):
    """Ends a variant at the first error that is logged: Neo's attention logs one a call and uses another instead."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        raise CannotRun((record.getMessage().splitlines() or [""])[0])


def use_attention(name: str, around: Callable[[Any], Any] = lambda attention: attention) -> None:
    """Have Neo's UNet use one of Neo's attentions, as if Neo had chosen it when it was imported."""
    from backend import attention
    from backend.nn import unet

    chosen = around(getattr(attention, name))
    attention.attention_function = unet.attention_function = chosen


@contextlib.contextmanager
def switched_on(variant: NeoVariant, checkpoint: Checkpoint) -> Iterator[None]:
    """With this variant on, the model unloaded before and after. Raises CannotRun."""
    from modules import sd_models

    with contextlib.ExitStack() as leaving:
        leaving.callback(checkpoint.unload)
        checkpoint.unload()
        sd_models.model_data.sd_model = checkpoint
        leaving.callback(variant.leave, checkpoint)
        variant.enter(checkpoint)
        yield


def variants_for(names: list[str], checkout: Path) -> list[NeoVariant]:
    made: dict[str, Callable[[], NeoVariant]] = {
        HOST: lambda: NeoVariant(HOST), ONEDIFF: OneDiff, SAGE: Sage, OVER_SAGE: OneDiffOverSage,
        **{preset: partial(TorchCompile, preset, checkout) for preset in COMPILE_PRESETS},
    }
    return [made[name]() for name in names]


# In this order: what may leave work behind in the process, stopped half-way, comes last.
ALL = (HOST, ONEDIFF, SAGE, OVER_SAGE, *COMPILE_PRESETS)
