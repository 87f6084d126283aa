"""What users ask of what is ready: to see it, to pin it, and to throw it away.
What is kept on the disk holds for a machine, and for our sources (Fingerprint)."""
from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
from collections.abc import Collection
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.image import UNTOLD, ImageRecord
from ..core.policy import StepPolicy
from ..core.version import __version__
from ..store.history import chosen_folder
from ..weights.low_bit import LowBitWeights
from .call_stats import GRAPH, HOST, ROUTES, CallStats
from .graphs.accounting import MemorySnapshot
from .rows import LowBitErrors, ResolutionRow, Totals, rows_of
from .services import Services
from .stepping import Stepping
from .two_gpus import TwoGpusRoute
from .vae.route import DecoderRoute

PACKAGE = Path(__file__).resolve().parents[1]
# What no UNet's output passes through. Everything else counts, what is added later too.
COMPUTES_NOTHING = {"api", "bench", "ui"}
SECONDS_A_PAGE_WAITS = 0.05


@dataclass(frozen=True)
class Fingerprint:
    """What verdicts, timings and tuned choices depend on besides the shape. gpu: its name, or 'cpu'. onediff: our
    version and the digest of our sources."""

    gpu: str
    driver: str
    torch: str
    onediff: str

    @property
    def digest(self) -> str:
        """By which the store tells machines apart."""
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:16]

    @classmethod
    def of(cls) -> Fingerprint:
        """The current GPU's, or the CPU's where torch can use no GPU."""
        gpu = "cpu"
        driver = "none"
        if torch.cuda.is_available():
            driver = f"hip {torch.version.hip}" if torch.version.hip else nvidia_driver()
            try:
                gpu = torch.cuda.get_device_name(torch.device("cuda"))
            except RuntimeError:
                gpu = "a GPU that does not start"
        return cls(gpu, driver, torch.__version__, f"{__version__} {source_digest()}")


@functools.cache
def source_digest(package: Path = PACKAGE) -> str:
    """A digest of the sources that compute, as they are at the first call: milliseconds, and nothing is imported."""
    digest = hashlib.sha256()
    for folder, inside, names in os.walk(package):
        inside[:] = sorted(name for name in inside if name != "__pycache__" and name not in COMPUTES_NOTHING)
        for name in sorted(name for name in names if name.endswith((".py", ".zip"))):
            source = Path(folder, name)
            digest.update(f"{source.relative_to(package).as_posix()}\0".encode() + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def nvidia_driver() -> str:
    """The NVIDIA driver's version, such as '580.95.05', or 'unknown'; asks NVML once, which takes milliseconds."""
    version = ctypes.create_string_buffer(96)
    with contextlib.suppress(OSError):
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlSystemGetDriverVersion(version, len(version))
            nvml.nvmlShutdown()
    return version.value.decode("ascii", "replace") or "unknown"


class Cache:
    """Every method may be called from any thread."""

    def __init__(
        self, services: Services, stepping: Stepping, vae: DecoderRoute, two_gpus: TwoGpusRoute
    ) -> None:
        self._services = services
        self._stepping = stepping
        self._vae = vae
        self._two_gpus = two_gpus
        self._seen = MemorySnapshot()
        # In place of CallStats.status where that fails: who reads it finds every key.
        self._unknown = CallStats().status()

    # --- to see ---------------------------------------------------------------------------------------------------

    def rows(self) -> list[ResolutionRow]:
        """What is known about every resolution, the last used first."""
        services = self._services
        return rows_of(
            services.table.entries(), services.history.rows(), services.history.pins(), self._look().gives_back,
            services.call_stats.parts, services.call_stats.images,
        )

    def totals(self) -> Totals:
        """What all graphs hold and may hold, what lies on the disk, and how often a graph served a call."""
        counts = self._services.call_stats.calls
        holdings = self._services.holdings
        calls = {route: counts[route] for route in ROUTES}
        count = sum(calls.values())
        every_unet = self._services.networks.values()
        return Totals(
            vram=self._look().vram, budget=holdings.allowed(self._services.settings.memory_budget),
            disk=self._services.history.size_bytes(), calls=calls, hit_rate=calls[GRAPH] / count if count else None,
            low_bit=sum(held.bytes for held in self._low_bit()), low_bit_layers=self._low_bit_layers(),
            offloaded=sum(one.copied() for network in every_unet if (one := network.bound.streaming) is not None),
            low_bit_errors=self._low_bit_errors(),
        )

    def _low_bit(self) -> list[LowBitWeights]:
        """The weights in eight bits of every UNet that uses some."""
        return [held for network in self._services.networks.values() if (held := network.low_bit) is not None]

    def _low_bit_layers(self) -> int:
        return sum(len(held.names()) for held in self._low_bit())

    def _low_bit_errors(self) -> list[LowBitErrors]:
        """Of every checkpoint once: a second GPU's copy has the same."""
        choices = [
            choice for network in self._services.networks.values() if (choice := network.low_bit_choice) is not None
        ]
        return list(dict.fromkeys(LowBitErrors(one.model, one.budget, one.error, one.errors) for one in choices))

    def status(self) -> dict[str, Any]:
        """How the last image was made, as plain values for a page or JSON; see CallStats.status."""
        # What fails says so among the faults, and costs no other part.
        part: Any = functools.partial(self._services.guard.attempt, "the status")
        run = part(lambda: self._services.generations.run_settings)
        settings = self._services.settings if run is None else run[0]
        image = part(lambda: self._services.call_stats.image) or ImageRecord()
        status = part(lambda: self._services.call_stats.status(image), self._unknown)
        return {
            "enabled": settings.enabled, **status,
            **{policy.name: policy_status(policy, image) for policy in self._stepping.policies},
            "backend": status["backend"] or ("" if status["route"] == HOST else settings.backend),
            "vae": {**part(self._vae.status, {}), **({} if image.state == UNTOLD else decode_of(image))},
            "second_gpu": part(self._two_gpus.status, {}),
            "low_bit": part(lambda: [asdict(errors) for errors in self._low_bit_errors()], []),
            "low_bit_layers": part(self._low_bit_layers, 0),
            "faults": part(lambda: self._services.guard.faults, []),
        }

    # --- to keep --------------------------------------------------------------------------------------------------

    def open_cache(self, folder: Path | None = None) -> None:
        """Know what is remembered in a folder, and remember there from now on; safe to call again with the same one.
        By default, in the one that the environment names, if it does."""
        folder = folder or chosen_folder()
        if folder is None:
            return
        machine = Fingerprint.of()
        self._services.history.open(folder, machine.gpu, machine.digest)
        self._services.tuning_cache.attach(self._services.history.tuned, self._services.history.tune)

    def pin(self, resolution: str, model: str, pinned: bool) -> bool:
        """Let the graphs of a resolution ("512x512") stay when others make room, or no longer, also in later
        processes. Returns whether such a row, or pin, is known; what is not known is not pinned. Raises NotKept where
        later processes will not know."""
        known = any((row.resolution, row.model) == (resolution, model) for row in self.rows())
        known = known or (not pinned and (model, resolution) in self._services.history.pins())
        if known:
            self._services.history.pin(model, resolution, pinned)
        return known

    def keep_history(self) -> None:
        """Remember on the disk what was used; call it between images."""
        with self._services.lock:
            entries = self._services.table.entries()
        self._services.call_stats.settle()
        self._services.history.keep(entries)
        self._services.pressure.watch()

    # --- to throw away --------------------------------------------------------------------------------------------

    def purge(self, resolutions: Collection[str] | None = None, model: str | None = None) -> int:
        """Forget these resolutions ("512x512"), or all, of this model ("SD1"), or of all: graphs, verdicts, timings,
        and what is on the disk.

        Returns the bytes of GPU memory that were given back. Where a large graph goes, those that stay may be captured
        again in less memory; so it is best called while no image is being made (hosts.contract.WebUI.exclusively):
        torch lets nobody empty its cache during a capture. Raises NotKept where the disk keeps it.
        """
        wanted = None if resolutions is None else set(resolutions)
        with self._services.lock:
            doomed = [
                entry for entry in self._services.table.entries()
                if (wanted is None or entry.key.resolution in wanted) and model in (None, entry.model)
            ]
            freed = self._services.graphs.forget({entry.key for entry in doomed})
        self._services.history.forget(wanted, model, {entry.key.architecture for entry in doomed})
        return freed

    def purge_disk(self) -> int:
        """Forget what is on the disk, and what was measured to be best: it is measured again when it is needed. Graphs
        and pins stay. Returns the bytes of disk that came back. Raises NotKept."""
        before = self._services.history.size_bytes()
        self._services.history.forget()
        self._services.tuning_cache.clear()
        self._services.devices.measure_anew()
        return max(0, before - self._services.history.size_bytes())

    def _look(self) -> MemorySnapshot:
        """What the graphs hold: now, or, while a UNet call keeps the lock, when somebody last looked."""
        if self._services.lock.acquire(timeout=SECONDS_A_PAGE_WAITS):
            try:
                self._services.graphs.note_lost()
                self._seen = self._services.holdings.memory()
            finally:
                self._services.lock.release()
        return self._seen


def policy_status(policy: StepPolicy, image: ImageRecord) -> dict[str, Any]:
    """What a step policy did in an image: its counts, and as "reason" why it did not apply to some calls. Where nobody
    tells of images, the counts are of all calls and the reason is the last one's."""
    if image.state == UNTOLD:
        return policy.status.copy()
    nothing = {name: 0 for name, value in policy.status.items() if isinstance(value, int)}
    inactive = image.inactive.get(policy.name)
    calls = sum(image.steps.values())
    reason = ""
    if inactive is not None:
        some = f" (at {inactive.calls} of {calls} steps)" if inactive.calls < calls else ""
        reason = f"{inactive.reason}{some}"
    return {**nothing, **image.policies.get(policy.name, {}), "reason": reason}


def decode_of(image: ImageRecord) -> dict[str, Any]:
    """The route of an image's last decode, and the reason; None where nothing of it came to OneDiff."""
    route, reason = image.vae
    return {"route": route or None, "reason": reason}
