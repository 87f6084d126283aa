"""A card too full for the model: Neo leaves weights in RAM. Then what we serve, and what is right afterwards."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...runtime.verify import relative_error
from ..clock import MIB, give_back_memory
from .generation import generate
from .host import Checkpoint
from .variants import NeoVariant, switched_on

GIB = 2**30
# Neo keeps more than one of them free for the image: SD1.5's 1.6 GiB of weights fit into four.
FREE_GIB = {"sdxl": 4.0, "sd15": 2.0}
# So little that weights which are on the card have to leave it.
FREE_UNDER_GIB = 0.5
IMAGES = 2
# Every step moves gigabytes to the card.
MOST_STEPS = 8


@dataclass(frozen=True)
class Stage:
    """Images made one after the other. loaded_mib: weights on the card. distance: of the last latent from the host's
    under the same conditions (equal: bit for bit), and from the host's with room (from_room)."""

    model: str
    stage: str
    free_gib: float | None
    loaded_mib: float
    seconds: list[float]
    routes: dict[str, int]
    reason: str
    equal: bool | None = None
    distance: float | None = None
    from_room: float | None = None

    def line(self) -> str:
        told = ", ".join(f"{count} {route}" for route, count in self.routes.items()) or "host alone"
        parts = [
            f"{self.model}, {self.stage}: {self.loaded_mib:.0f} MiB of weights loaded",
            "" if self.free_gib is None else f"{self.free_gib:.2f} GiB were free",
            ", ".join(f"{taken:.2f} s" for taken in self.seconds), told, self.reason,
            "" if self.equal is None else "the host's latent bit for bit" if self.equal else
            f"latent {self.distance:.1e} from the host's",
            "" if self.from_room is None else "the host's with room bit for bit" if self.from_room == 0 else
            f"{self.from_room:.1e} from the host's with room",
        ]
        return "; ".join(filter(None, parts))


def measure_partial(
    checkpoint: Checkpoint, host: NeoVariant, ours: NeoVariant, steps: int, free_gib: float,
) -> Iterator[Stage]:
    """The host with room and with the card full; ours with room, full in two ways, and with room again, in one go."""
    room: Tensor | None = None

    def stage(name: str, variant: NeoVariant, same: Tensor | None, free: float | None = None) -> tuple[Stage, Tensor]:
        before, seconds = variant.routes(), []
        for _ in range(IMAGES):
            image = generate(checkpoint, variant, checkpoint.sizes[0], min(steps, MOST_STEPS))
            seconds.append(image.seconds)
        return Stage(
            checkpoint.name, name, free, checkpoint.forge_objects.unet.loaded_size() / MIB, seconds,
            dict(variant.routes() - before), variant.note(),
            None if same is None else torch.equal(image.latent, same),
            None if same is None else relative_error(image.latent, same),
            None if room is None else relative_error(image.latent, room),
        ), image.latent

    with switched_on(host, checkpoint):
        found, room = stage("host, with room", host, None)
        yield found
    with switched_on(host, checkpoint):
        filler, free = fill(checkpoint.device, free_gib)
        found, full = stage("host, card full", host, None, free)
        yield found
        del filler
    give_back_memory()
    with switched_on(ours, checkpoint):
        yield stage("ours, with room", ours, room)[0]
        filler, free = fill(checkpoint.device, FREE_UNDER_GIB)
        yield stage("ours, card filled while loaded", ours, full, free)[0]
        del filler
        checkpoint.unload()
        filler, free = fill(checkpoint.device, free_gib)
        yield stage("ours, card full", ours, full, free)[0]
        del filler
        give_back_memory()
        yield stage("ours, with room again", ours, room)[0]
    with switched_on(host, checkpoint):
        yield stage("host, fresh", host, room)[0]


def fill(device: torch.device, free_gib: float) -> tuple[Tensor | None, float | None]:
    """Take the card's memory by a plain allocation until so much is free. Returns it, and what is free now."""
    give_back_memory()
    if device.type != "cuda":
        return None, None
    free, _ = torch.cuda.mem_get_info(device)
    filler = torch.empty(max(0, free - int(free_gib * GIB)), dtype=torch.uint8, device=device)
    return filler, torch.cuda.mem_get_info(device)[0] / GIB
