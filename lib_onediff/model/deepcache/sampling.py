"""What a host says of a sampling before its first UNet call: each adapter says it, and knows no more of DeepCache."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def nothing_known() -> None:
    return None


def time_of(timestep: Tensor) -> float | None:
    """The timestep of a call, (batch,), as a number; None where the batch has several. Waits for a GPU."""
    if timestep.dim() and timestep.stride(0) == 0:
        return float(timestep[0])
    times = timestep.flatten().tolist()
    return float(times[0]) if times and min(times) == max(times) else None


class Sampling:
    """One sampling. Another object: another sampling.

    second_pass: whether it is the second pass of hires fix. times: asked at the first UNet call for the timesteps, as
    the UNet gets them, at which the steps begin, in any order; None where nobody knows. count: asked likewise for the
    number of different timesteps that will come, where times are not known and each step has one. why_not: why no step
    of it may be cut short, in one line for the user. read: as time_of, by somebody who need not ask the GPU.
    """

    def __init__(
        self, second_pass: bool = False, times: Callable[[], Sequence[float] | None] = nothing_known,
        count: Callable[[], int | None] = nothing_known, why_not: str = "",
        read: Callable[[Tensor], float | None] = time_of,
    ) -> None:
        self.second_pass = second_pass
        self.times = times
        self.count = count
        self.why_not = why_not
        self.read = read
