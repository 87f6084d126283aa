"""A training that stops in time and goes on from its files: optimizer, running average, learning rate, loss curve."""
from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WARMUP_STEPS = 100
LONGEST_AVERAGE = 0.9995
PROGRESS_FILE = "progress.json"
EVERY = 25


class Clock:
    """How long a stage has run, in this call and in those before it, and what its losses were.

    seconds, steps: at most in this call. total: seconds of the whole stage, over all calls. until: the time of day at
    which it must end, in seconds since 1970.
    """

    def __init__(
        self, folder: Path, stage: str, seconds: float, total: float, steps: int | None = None,
        until: float | None = None,
    ) -> None:
        self._folder, self._stage, self._until = folder, stage, until
        self._seconds, self._total, self._most_steps = seconds, max(total, seconds), steps
        before = read_progress(folder).get(stage, {})
        self.steps, self._before = int(before.get("steps", 0)), float(before.get("seconds", 0.0))
        self._first_step, self._start = self.steps, time.monotonic()

    def start(self) -> None:
        """Count from now on: what came before was preparation. The stage's last call ends at `until` at the latest, and
        the learning rate with it."""
        self._start = time.monotonic()
        if self._until is not None and self._before + self._seconds >= self._total:
            self._total = min(self._total, self._before + max(1.0, self._until - time.time()))

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def progress(self) -> float:
        """From 0 to 1, over the whole stage."""
        by_time = (self._before + self.elapsed) / self._total
        return min(1.0, by_time)

    def goes_on(self) -> bool:
        taken = self.steps - self._first_step
        if self._until is not None and time.time() > self._until:
            return False
        return self.elapsed < self._seconds and (self._most_steps is None or taken < self._most_steps)

    def rate(self, peak: float) -> float:
        """The learning rate: up in WARMUP_STEPS of each call, level until half of the time, then down to a fiftieth."""
        rise = min(1.0, (self.steps - self._first_step + 1) / WARMUP_STEPS)
        fall = max(0.0, (self.progress - 0.5) / 0.5)
        return peak * rise * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * fall)))

    def step(self, rate: float, losses: Mapping[str, Tensor]) -> None:
        """A step is done; every EVERY steps its losses go to the stage's curve."""
        self.steps += 1
        if self.steps % EVERY == 0 or self.steps == 1:
            self._record({"rate": rate, **{name: loss.item() for name, loss in losses.items()}})

    def _record(self, values: Mapping[str, float]) -> None:
        row = {"step": self.steps, "seconds": round(self._before + self.elapsed, 1)}
        row.update({name: float(f"{value:.5g}") for name, value in values.items()})
        file = self._folder / f"{self._stage}.csv"
        new = not file.exists()
        with file.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)
        print(self._stage, *(f"{name} {value}" for name, value in row.items()), flush=True)

    def save(self) -> None:
        progress = read_progress(self._folder)
        progress[self._stage] = {"steps": self.steps, "seconds": round(self._before + self.elapsed, 1)}
        (self._folder / PROGRESS_FILE).write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")


def read_progress(folder: Path) -> dict[str, Any]:
    file = folder / PROGRESS_FILE
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


class Learner:
    """AdamW over networks, with a running average of their parameters. networks: by the names in the files."""

    def __init__(self, networks: Mapping[str, nn.Module], decay: float = 0.01) -> None:
        self._parameters = {
            f"{name}.{path}": parameter for name, network in networks.items()
            for path, parameter in network.named_parameters()
        }
        self._values = list(self._parameters.values())
        self._average = [value.detach().clone() for value in self._values]
        device, fused = self._values[0].device, self._values[0].is_cuda
        # Tensors on a GPU, so that update can be part of a CUDA graph.
        self._rate, self._share = torch.zeros((), device=device), torch.zeros((), device=device)
        self._optimizer = torch.optim.AdamW(
            self._values, lr=self._rate if fused else 0.0, betas=(0.9, 0.99), weight_decay=decay, fused=fused,
            capturable=fused,
        )
        self._steps = 0

    def step(self, loss: Tensor, rate: float) -> None:
        self.schedule(rate)
        self.update(loss)

    def schedule(self, rate: float) -> None:
        """What the next update does: its learning rate, and how much of the average it renews."""
        self._steps += 1
        self._set(rate, 1 - min(LONGEST_AVERAGE, (1 + self._steps) / (10 + self._steps)))

    def hold(self) -> None:
        """Updates until the next schedule change no weights: they only warm up."""
        self._set(0.0, 0.0)

    def _set(self, rate: float, share: float) -> None:
        self._rate.fill_(rate)
        self._share.fill_(share)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate if self._rate.is_cuda else rate

    def update(self, loss: Tensor) -> None:
        """One step of the optimizer. It waits for nothing on a GPU, and reads no number from Python."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._values, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            change = torch._foreach_sub([value.detach() for value in self._values], self._average)
            torch._foreach_mul_(change, self._share)
            torch._foreach_add_(self._average, change)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the networks hold the average."""
        own = [value.detach().clone() for value in self._values]
        self._fill(self._average)
        try:
            yield
        finally:
            self._fill(own)

    @torch.no_grad()
    def _fill(self, tensors: list[Tensor]) -> None:
        for value, tensor in zip(self._values, tensors, strict=True):
            value.copy_(tensor)

    def save(self, folder: Path, stage: str) -> None:
        """Three files of halves: weights, their average, and the optimizer's second moments. Its first moments come
        back within ten steps, so they are left out."""
        from safetensors.torch import save_file

        names = list(self._parameters)
        squares = [self._optimizer.state.get(value, {}).get("exp_avg_sq") for value in self._values]
        kinds: dict[str, list[Any]] = {"weights": self._values, "average": self._average, "squares": squares}
        for kind, tensors in kinds.items():
            dtype = torch.bfloat16 if kind == "squares" else torch.float16
            stored = {
                name: tensor.detach().to(dtype).contiguous().cpu()
                for name, tensor in zip(names, tensors, strict=True) if tensor is not None
            }
            save_file(stored, folder / f"{stage}_{kind}.safetensors", {"steps": str(self._steps)})

    def load(self, folder: Path, stage: str) -> bool:
        """Go on from the files of save, where there are any; those of the second moments may be missing."""
        from safetensors import safe_open

        stored: dict[str, dict[str, Tensor]] = {}
        for kind in ("weights", "average", "squares"):
            file = folder / f"{stage}_{kind}.safetensors"
            if not file.is_file():
                continue
            with safe_open(file, "pt") as read:
                stored[kind] = {name: read.get_tensor(name) for name in read.keys()}
                self._steps = int(read.metadata()["steps"])
        if not {"weights", "average"} <= set(stored):
            self._steps = 0
            return False
        self._fill([stored["weights"][name] for name in self._parameters])
        for tensor, name in zip(self._average, self._parameters, strict=True):
            tensor.copy_(stored["average"][name])
        for name, value in self._parameters.items():
            square = stored.get("squares", {}).get(name)
            if square is not None:
                # Kept by so many steps: the correction of the second moments' bias is over.
                self._optimizer.state[value] = {
                    "step": torch.tensor(float(max(self._steps, 1)), device=value.device if value.is_cuda else None),
                    # With the value's strides: the fused step asks for them.
                    "exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.empty_like(value).copy_(square),
                }
        return True
