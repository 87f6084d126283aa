"""Our blocks inside the loop of an extension that walks ldm's or sgm's stages itself, as sd-webui-controlnet does."""
from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.call import Call
from ...core.device import Candidates, Device
from ...core.guard import first_line
from ...core.key import ShapeKey
from ...core.operators import Operators
from ...core.patch_points import PatchPoints
from ...core.precision import Flags, flags_for, our_modes
from ...core.refusal import Refusal
from ...core.settings import ONE_GPU, Settings
from ...core.table import Entry, State, Stopwatch
from ...families.unet.forward import block_shifts
from ...families.unet.layers import Layers
from ...families.unet.layout import Stage
from ...runtime.call_stats import BLOCKS
from ...runtime.card_route import network_of, sampling_now
from ...runtime.managed_unet import ManagedUNet
from ...runtime.runtime import runtime
from ...runtime.services import OUT_OF_MEMORY
from ...runtime.verify import blame, computed_twice, relative_error, rounding_limit, state_of
from ..changed_modules import ChangedModules, foreign_forward
from ..hooks import ForwardPatches
from .patches import does_nothing_now, patches_of

log = logging.getLogger("onediff")
HostBlock = Callable[[], Tensor]


@dataclass(eq=False)
class LoopPass:
    """One walk through the stages, from the first input block to the last output block."""

    entry: Entry
    layers: Layers
    stages: tuple[Stage, ...]
    embedding: weakref.ref[Tensor]
    context: weakref.ref[Tensor]
    stop: Callable[[], None]
    worst_error: float = 0.0


@dataclass(eq=False)
class WatchedLoop:
    """A UNet whose blocks are looked after; running is the pass in progress, None where it is the host's. last: the
    index of the last stage. stop: ends the timing of a pass that is the host's."""

    unet: weakref.ref[nn.Module]
    last: int
    running: LoopPass | None = field(default=None)
    stop: Callable[[], None] | None = None

    def note_gone(self, embedding: weakref.ref[Tensor]) -> None:
        """An embedding, which its loop's owner has made, is gone: a pass that was given up keeps no weights alive."""
        if self.running is not None and self.running.embedding is embedding:
            self.running = None


class StageHooks(ForwardPatches):
    """Class-level patches of TimestepEmbedSequential.forward, which only act inside a foreign loop: they serve the
    calls of single stages of the UNets that are watched."""

    def __init__(
        self, stage_classes: Iterable[type], changed: ChangedModules | None = None,
        check: Callable[[nn.Module], object] = lambda unet: None,
        upcasts_attention: Callable[[], bool] = lambda: False,
    ) -> None:
        """changed: what other extensions have put within a UNet's stages. check: raises Refusal where a UNet's stages
        are the host's now. upcasts_attention: see Call."""
        super().__init__(stage_classes, self._forward, "the UNet's blocks", self._declined)
        self._changed, self._check = changed or ChangedModules(does_nothing_now), check
        self._upcasts_attention = upcasts_attention
        # Where launches may cost more than what is launched. Elsewhere ours are taken to be the faster ones.
        self.timed_on = ("cuda",)
        self._places: weakref.WeakKeyDictionary[nn.Module, tuple[WatchedLoop, int]] = weakref.WeakKeyDictionary()

    def stop(self) -> None:
        super().stop()
        self._places.clear()

    def watch(self, unet: Any) -> None:
        """Look after the stages of this UNet from now on."""
        stages = [*unet.input_blocks, unet.middle_block, *unet.output_blocks]
        if self._places.get(stages[0], (None, 0))[0] is None:
            loop = WatchedLoop(weakref.ref(unet), len(stages) - 1)
            self._places.update({stage: (loop, index) for index, stage in enumerate(stages)})

    def watches(self, unet: Any) -> bool:
        return self._unet_of(unet.input_blocks[0]) is unet

    def _unet_of(self, stage: nn.Module) -> nn.Module | None:
        """The watched UNet that a stage belongs to."""
        loop, _ = self._places.get(stage, (None, 0))
        return None if loop is None else loop.unet()

    def _declined(self, stage: Any, reason: str) -> None:
        """Count a walk through the stages that is the host's once; the UNet's own forward has counted its own."""
        unet: Any = self._unet_of(stage)
        if unet is not None and stage is unet.input_blocks[0] and foreign_forward(unet) is not None:
            runtime.note_host(reason, unet)

    def _forward(
        self, original: Callable[..., Tensor], stage: nn.Module, x: Tensor, emb: Tensor, context: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Tensor:
        """Stands in for TimestepEmbedSequential.forward(self, x, emb, context=None, ...)."""
        host = lambda: original(stage, x, emb, context, *args, **kwargs)  # noqa: E731
        unet = self._unet_of(stage)
        owner = None if unet is None else foreign_forward(unet)
        if owner is None or args or kwargs or not isinstance(context, Tensor):
            return runtime.pressure.run_host(host)
        return self._run(stage, x, emb, context, owner, host)

    def _run(
        self, stage: nn.Module, hidden_states: Tensor, embedding: Tensor, context: Tensor, owner: str, host: HostBlock
    ) -> Tensor:
        """The output of one stage: (batch, channels, height, width).

        embedding: (batch, width), the timestep's (and label's) embedding, made by the loop's owner; owner: its name
        for people. Never raises for a reason of ours, as Runtime.run.
        """
        loop, index = self._places[stage]
        running = loop.running if index else None
        if index and running is None:
            # This pass through the loop is the host's.
            output = runtime.pressure.run_host(host)
            if index == loop.last and loop.stop is not None:
                loop.stop()
                loop.stop = None
            return output
        try:
            if running is None:
                with runtime.computing(hidden_states.device):
                    running = self._begin(loop, hidden_states, embedding, context, owner)
            return self._stage(loop, running, index, hidden_states, embedding, context, host)
        except Refusal as refusal:
            reason = str(refusal)
        except torch.cuda.OutOfMemoryError:
            reason = OUT_OF_MEMORY
        except Exception as error:
            reason = runtime.guard.note("the UNet's blocks", error)
            if loop.running is not None:
                blame(loop.running.entry, f"our blocks failed: {first_line(error)}")
        loop.running = None
        if reason is OUT_OF_MEMORY:
            runtime.free_graphs()
        runtime.note_host(reason, loop.unet())
        return runtime.pressure.run_host(host)

    def _begin(
        self, loop: WatchedLoop, hidden_states: Tensor, embedding: Tensor, context: Tensor, owner: str
    ) -> LoopPass:
        """A new pass through the loop. Raises Refusal where it is the host's."""
        loop.running, loop.stop, call_stats = None, None, runtime.call_stats
        call_stats.begin()
        unet: Any = loop.unet()  # its blocks are called: it is there
        self._check(unet)
        managed, settings = runtime.managed_and_settings(unet)
        # The owner of the loop has embedded timestep and y already.
        patches = patches_of(self._changed.at_call(managed.bound.module))
        call = Call(
            latent=hidden_states, timestep=embedding[:, 0], context=context, patches=patches,
            upcast_attention=self._upcasts_attention(),
        )
        device, services = hidden_states.device, runtime.services
        found = services.devices.launched(settings, device, hidden_states.dtype, services.waits_for_compile)
        is_timed = device.type in self.timed_on
        seen = self._seen_before(managed, settings, call, found.devices) if is_timed else None
        slower = "" if seen is None else why_the_hosts(seen)
        if seen is not None and slower:
            # As the host has them: that is what is timed.
            if managed.bound.undo_channels_last():
                managed.drop_runners()
            loop.stop = seen.host.start(device)
            raise Refusal(slower)
        entry, why_not_faster = self._entry(managed, settings, call, found)
        call_stats.notice(entry)
        ops = runtime.devices.operators(entry.key.backend, managed.has_wide_norms)
        with our_modes(hidden_states.device, entry.key.precision):
            layers = self._layers(managed, ops, call, embedding, entry.key.precision)
        managed.served_last = True
        owns = f"{owner} runs the UNet's loop itself"
        runtime.stepping.rest(settings, owns)
        within = "" if patches is None else (
            f"other extensions compute within the UNet: {', '.join(entry.key.patches)}"
        )
        no_low_bit = "" if settings.low_bit == "off" else "Low-bit is for the whole UNet alone"
        if settings.second_gpu != ONE_GPU:
            runtime.two_gpus.note(why_one=owns)
        call_stats.note(BLOCKS, "; ".join(filter(None, (owns, within, why_not_faster, no_low_bit))))
        layout = managed.bound.layout
        stages = (*layout.input_stages, layout.middle_stage, *layout.output_stages)
        made = weakref.ref(embedding, loop.note_gone)
        stopwatch = Stopwatch() if entry.state is State.COLD else entry.own
        stop = stopwatch.start(device)
        loop.running = LoopPass(entry, layers, stages, made, weakref.ref(context), stop)
        return loop.running

    def _entry(
        self, managed: ManagedUNet, settings: Settings, call: Call, found: Candidates
    ) -> tuple[Entry, str]:
        """What is known of this shape by the best backend that has not failed, and why it is not a better one. Raises
        Refusal where there is none."""
        bound, reason = managed.bound, found.reason
        bound.refresh(call, channels_last=found.devices[0].traits.channels_last)
        managed.refuse_call(call, is_embedded=True)
        for device in found.devices:
            key = key_of(managed, settings, call, device.name)
            entry = runtime.table.entry(key, bound.layout.model_name)
            entry.of_weights(bound.identity(), sampling_now(bound))
            if entry.state is not State.FAILED:
                try:
                    device.prepare(network_of(managed, call))
                    return entry, reason
                except RuntimeError as error:
                    blame(entry, f"its kernels do not load: {first_line(error)}")
            reason = entry.reason
        raise Refusal(reason)

    def _seen_before(
        self, managed: ManagedUNet, settings: Settings, call: Call, devices: tuple[Device, ...]
    ) -> Entry | None:
        """What is known of a shape that was proved, before the weights are made ready for it."""
        known = runtime.table.by_key()
        try:
            entries = [known.get(key_of(managed, settings, call, device.name)) for device in devices]
            weights = managed.bound.identity()
        except Refusal:  # not bound yet
            return None
        return next((entry for entry in entries if entry is not None and (
            entry.weights == weights and entry.state is State.PROVED
        )), None)

    @staticmethod
    def _layers(managed: ManagedUNet, ops: Operators, call: Call, embedding: Tensor, flags: Flags) -> Layers:
        bound = managed.bound
        weights, dtype = bound.weights(), bound.binding.dtype
        shifts = block_shifts(bound.layout, weights, ops, embedding.to(dtype))
        patches = call.patches or PatchPoints()
        return Layers(weights, ops, shifts, call.context.to(dtype), call.upcast_attention, (), patches)

    def _stage(
        self, loop: WatchedLoop, running: LoopPass, index: int, hidden_states: Tensor, embedding: Tensor,
        context: Tensor, host: HostBlock,
    ) -> Tensor:
        """The output of our stage. Raises Refusal where the rest of this pass is the host's."""
        if running.embedding() is not embedding or running.context() is not context:
            raise Refusal("the loop's owner gives some stages another timestep or context")
        device = hidden_states.device
        with runtime.computing(device), our_modes(device, running.entry.key.precision):
            # Another tensor: what our operators know of this one, they must not know of one that the owner writes into.
            given = hidden_states.to(running.entry.key.dtype)
            compute = lambda: running.layers.stage(running.stages[index], given, None).detach()  # noqa: E731
            patches = running.layers.patches
            functions = patches.functions()
            twice = type(patches) is not PatchPoints and running.entry.state is State.COLD
            output = computed_twice(running.entry, compute, functions) if twice else compute()
        if output is None:
            names = ", ".join(running.entry.key.patches)
            raise Refusal(blame(running.entry, f"what computes within a stage differs each time ({names})"))
        if running.entry.state is State.COLD:
            # Where ours cannot be used, the host runs once more, for the answer.
            rewind = state_of(device, functions)
            miss = self._compare(running, output, host())
            if miss is not None:
                rewind()
                raise Refusal(miss)
        if index == len(running.stages) - 1:
            # It must not keep the weights alive between calls.
            loop.running = None
            running.stop()
            if running.entry.state is State.COLD:
                running.entry.state, running.entry.relative_error = State.PROVED, running.worst_error
        return output

    @staticmethod
    def _compare(running: LoopPass, output: Tensor, expected: Tensor) -> str | None:
        """Why a stage's output cannot be used, or None."""
        error = relative_error(output, expected)
        running.worst_error = max(running.worst_error, error)
        limit = rounding_limit(running.entry.key.dtype, output.device, running.entry.key.precision)
        if error <= limit:
            return None
        what = f"a stage differs from the model's own by {error:.1e} (rounding explains {limit:.0e})"
        return blame(running.entry, what)


def key_of(managed: ManagedUNet, settings: Settings, call: Call, backend: str) -> ShapeKey:
    """Raises Refusal for a UNet that is not bound yet."""
    architecture, dtype = managed.bound.architecture, managed.bound.binding.dtype
    flags = flags_for(settings, dtype, call.latent.device)
    return replace(ShapeKey.of(architecture, dtype, call, backend, flags), inputs=("blocks", *managed.kinds))


def why_the_hosts(entry: Entry) -> str:
    """Why the next pass is the host's: to be timed, once ours were, or because the host's are faster. "" where ours
    are, or were not timed often enough."""
    own, host = entry.own.settled_ms, entry.host.settled_ms
    if own is None:
        return ""
    if host is None:
        return "the WebUI's own blocks are timed"
    if host >= own:
        return ""
    return f"the WebUI's own blocks are faster here: {host:.0f} ms against {own:.0f}"
