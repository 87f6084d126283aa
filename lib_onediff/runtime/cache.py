"""What pages and the API call: shows, pins and purges the resolutions of each model that OneDiff has computed.

Data on the disk is valid for one machine and one version of our sources (Fingerprint).
"""
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

from ..core.image import GRAPH, HOST, ROUTES, UNTOLD, ImageRecord
from ..core.policy import StepPolicy
from ..core.version import __version__
from ..store.history import chosen_folder
from ..weights.low_bit import LowBitWeights
from .call_stats import CallStats
from .graphs.accounting import MemorySnapshot
from .rows import LowBitErrors, ResolutionRow, Totals, rows_of
from .services import Services
from .stepping import Stepping
from .two_gpus import TwoGpusRoute
from .vae.route import DecoderRoute

PACKAGE = Path(__file__).resolve().parents[1]
# Folders of our package that cannot affect an output. A change of a file in any other folder makes all verdicts
# invalid.
COMPUTES_NOTHING = {"api", "bench", "ui"}
# If a call holds the runtime's lock for longer than this, a page shows the numbers that were read before.
SECONDS_A_PAGE_WAITS = 0.05


@dataclass(frozen=True)
class Fingerprint:
    """The properties of a machine that verdicts, times and tuned choices depend on.

    gpu: the name of the GPU; "cpu" if torch can use none.
    driver: the version of NVIDIA's driver, or "hip" and the version of HIP on AMD; "none" on a CPU.
    torch: the version of torch.
    onediff: our version, and the digest of our sources.
    """

    gpu: str
    driver: str
    torch: str
    onediff: str

    @property
    def digest(self) -> str:
        """A digest of all fields, 16 hexadecimal digits. The store uses only data that was kept with the same
        digest."""
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:16]

    @classmethod
    def of(cls) -> Fingerprint:
        """The fingerprint of torch's current GPU; of the CPU if torch can use no GPU."""
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
    """A digest of the files of our package that can affect an output: the sources and compiled kernels (.py, .zip) in
    all folders but COMPUTES_NOTHING. The files are read once, in milliseconds, and not imported."""
    digest = hashlib.sha256()
    for folder, inside, names in os.walk(package):
        inside[:] = sorted(name for name in inside if name != "__pycache__" and name not in COMPUTES_NOTHING)
        for name in sorted(name for name in names if name.endswith((".py", ".zip"))):
            source = Path(folder, name)
            digest.update(f"{source.relative_to(package).as_posix()}\0".encode() + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def nvidia_driver() -> str:
    """The NVIDIA driver's version, such as "580.95.05"; "unknown" without a driver. Calls NVML (NVIDIA's management
    library) once, which takes milliseconds."""
    version = ctypes.create_string_buffer(96)
    with contextlib.suppress(OSError):
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlSystemGetDriverVersion(version, len(version))
            nvml.nvmlShutdown()
    return version.value.decode("ascii", "replace") or "unknown"


class Cache:
    """Shows, pins and purges resolutions ("512x512") of models, for pages and the API. Every method may be called from
    any thread."""

    def __init__(
        self, services: Services, stepping: Stepping, vae: DecoderRoute, two_gpus: TwoGpusRoute
    ) -> None:
        self._services = services
        self._stepping = stepping
        self._vae = vae
        self._two_gpus = two_gpus
        self._seen = MemorySnapshot()
        # Used if CallStats.status fails, so that readers find every key.
        self._unknown = CallStats().status()

    # --- showing --------------------------------------------------------------------------------------------------

    def rows(self) -> list[ResolutionRow]:
        """A row for each resolution of each model that was used in this process, or by earlier processes with the same
        Fingerprint; the most recently used first. A pin alone makes no row. If a call holds the lock, the graphs'
        memory in the rows may be of an earlier time (see _look)."""
        services = self._services
        return rows_of(
            services.table.entries(), services.history.rows(), services.history.pins(), self._look().gives_back,
            services.call_stats.parts, services.call_stats.images,
        )

    def totals(self) -> Totals:
        """The sums over all resolutions and models: GPU memory of graphs and its budget, disk space, calls by route,
        8-bit weights, and the bytes of weights that are streamed from main memory."""
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
        """The 8-bit weights of every network that has some."""
        return [held for network in self._services.networks.values() if (held := network.low_bit) is not None]

    def _low_bit_layers(self) -> int:
        """The number of layers with 8-bit weights, in all networks."""
        return sum(len(held.names()) for held in self._low_bit())

    def _low_bit_errors(self) -> list[LowBitErrors]:
        """The measured 8-bit errors of each checkpoint, each once: a network's copy on a second GPU has the same
        errors."""
        choices = [
            choice for network in self._services.networks.values() if (choice := network.low_bit_choice) is not None
        ]
        return list(dict.fromkeys(LowBitErrors(one.model, one.budget, one.error, one.errors) for one in choices))

    def status(self) -> dict[str, Any]:
        """How the last image was made, and the present state of OneDiff's parts, as plain values for a page or JSON.
        Raises nothing: a part that fails has its empty value, and the failure is in "faults".

        Has all keys of CallStats.status; the name of each step policy (see policy_status); "vae", "second_gpu",
        "low_bit" (see LowBitErrors), "low_bit_layers" and "faults"; and "enabled" and "backend", by the settings of the
        generation in progress if it has some of its own.
        """
        # A part that fails adds a fault, and does not affect the other parts.
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

    # --- pinning and saving ---------------------------------------------------------------------------------------

    def open_cache(self, folder: Path | None = None) -> None:
        """Load the history (times, verdicts, pins and tuned choices) from a folder, and write to it from now on. Safe
        to call again with the same folder.

        folder: None for the folder that the user has chosen by an environment variable (store.history.chosen_folder);
        if none is chosen, this does nothing, and nothing is kept on the disk.
        """
        folder = folder or chosen_folder()
        if folder is None:
            return
        machine = Fingerprint.of()
        self._services.history.open(folder, machine.gpu, machine.digest)
        self._services.tuning_cache.attach(self._services.history.tuned, self._services.history.tune)

    def pin(self, resolution: str, model: str, pinned: bool) -> bool:
        """Pin a resolution ("512x512") of a model, so that its graphs are dropped last, also in later processes; or, if
        `pinned` is False, unpin it.

        Returns True if that was done; False, with nothing changed, for a resolution without a row in rows(), unless it
        is pinned and is to be unpinned. Raises NotKept if the pin could not be written to the disk.
        """
        known = any((row.resolution, row.model) == (resolution, model) for row in self.rows())
        known = known or (not pinned and (model, resolution) in self._services.history.pins())
        if known:
            self._services.history.pin(model, resolution, pinned)
        return known

    def keep_history(self) -> None:
        """Write the resolutions' last uses and times to the history, and start freeing the memory of graphs whose
        network the host has unloaded (MemoryPressure.watch). Call it between images, because it takes the runtime's
        lock."""
        with self._services.lock:
            entries = self._services.table.entries()
        self._services.call_stats.settle()
        self._services.history.keep(entries)
        self._services.pressure.watch()

    # --- purging --------------------------------------------------------------------------------------------------

    def purge(self, resolutions: Collection[str] | None = None, model: str | None = None) -> int:
        """Forget these resolutions ("512x512") of this model ("SD1"): graphs, verdicts, times, and their data on the
        disk. resolutions None: all resolutions. model None: all models. If resolutions and model are None, the tuned
        choices on the disk are deleted too (History.forget). Returns the number of bytes of GPU memory that this frees.
        Waits for a call in progress.

        If a large graph is dropped, all other graphs of its memory pool are dropped too, and are captured again later,
        into less memory. Call it while no image is being made (hosts.contract.WebUI.exclusively), because torch cannot
        free memory during a capture. Raises NotKept if the data on the disk could not be deleted.
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
        """Delete the history on the disk, and all tuned choices of kernels, in memory too; the kernels are measured
        again when they are needed. Graphs and pins stay. Returns the number of bytes of disk space that this frees.
        Raises NotKept if the data could not be deleted."""
        before = self._services.history.size_bytes()
        self._services.history.forget()
        self._services.tuning_cache.clear()
        self._services.devices.forget_measurements()
        return max(0, before - self._services.history.size_bytes())

    def _look(self) -> MemorySnapshot:
        """The GPU memory of the graphs now; if a call holds the lock for longer than SECONDS_A_PAGE_WAITS, the result
        of the last _look, at first without any graph. Takes the graphs of deleted networks out of the count."""
        if self._services.lock.acquire(timeout=SECONDS_A_PAGE_WAITS):
            try:
                self._services.graphs.note_lost()
                self._seen = self._services.holdings.memory()
            finally:
                self._services.lock.release()
        return self._seen


def policy_status(policy: StepPolicy, image: ImageRecord) -> dict[str, Any]:
    """A step policy's counts in an image by their names, 0 if nothing was counted; and as "reason", for users, why the
    policy was inactive, and at how many of the image's calls unless at every one; "" if it was never inactive. If the
    image is UNTOLD, its calls belong to no generation: then the counts are of all calls of this process, and the reason
    is the last call's."""
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
    """The last decode of an image, for users: under "route" its route, None if OneDiff saw no decode; under "reason"
    why it took no better route, "" if it took the best."""
    route, reason = image.vae
    return {"route": route or None, "reason": reason}
