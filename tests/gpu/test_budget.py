"""The memory of graphs on a real GPU: within the budget whatever is used, as rows say, and given up in time."""
from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

from lib_onediff import status
from lib_onediff.bench.models import inputs, random_unet
from lib_onediff.hosts.diffusers.unet import attach
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.graphs.accounting import PoolKey
from lib_onediff.runtime.graphs.cache import CARD_IS_FULL
from lib_onediff.runtime.graphs.pool_size import memory_of
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import relative_error

pytestmark = pytest.mark.gpu
MIB = 2**20
CLOSE = 1e-2
SMALL, MIDDLE, LARGE = (512, 512), (768, 512), (960, 720)
NEEDS_A_LIMIT = pytest.mark.skipif(
    not hasattr(torch.cuda, "get_per_process_memory_fraction"), reason="this torch does not tell its own limit"
)


@torch.no_grad()
def use(unet: nn.Module, size: tuple[int, int], calls: int = 3) -> None:
    """Several calls; the last must have the right output."""
    given = inputs(unet, *size, 2, 77, torch.float16)
    for _ in range(calls):
        output = unet(**given).sample
    assert relative_error(output, host(unet, given)) < CLOSE, status()


@torch.no_grad()
def host(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    return type(unet).forward(unet, **given).sample


def reserved() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def row(size: tuple[int, int]) -> Any:
    [found] = [row for row in runtime.rows() if row.resolution == f"{size[0]}x{size[1]}"]
    return found


def states() -> dict[str, str]:
    return {row.resolution: row.state for row in runtime.rows()}


@contextlib.contextmanager
def at_most(size: int) -> Iterator[None]:
    """torch gets no more than so many bytes of the card."""
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextlib.contextmanager
def full_but_for(left: int) -> Iterator[None]:
    """A card of which so many bytes are left: also what torch holds unused, between the weights, is taken."""
    taken = []
    with at_most(reserved()):
        for size in (256 * MIB, 64 * MIB, 16 * MIB, 4 * MIB, MIB):
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    with at_most(torch.cuda.memory_reserved() + left):
        yield
    del taken


@pytest.mark.parametrize("order", [(SMALL, MIDDLE, LARGE), (LARGE, SMALL, MIDDLE)])
def test_purging_a_row_frees_what_it_said(unet: nn.Module, order: tuple[tuple[int, int], ...]) -> None:
    for size in order:
        use(unet, size)
    for largest, rest in ((LARGE, ("512x512", "768x512")), (MIDDLE, ("512x512",)), (SMALL, ())):
        before, said = reserved(), row(largest).bytes
        freed = runtime.purge([row(largest).resolution])
        fell = before - reserved()
        assert said > MIB and abs(fell - said) <= 0.1 * said, f"{said / MIB:.1f} MiB said, {fell / MIB:.1f} fell"
        assert abs(freed - fell) <= 4 * MIB
        assert states() == dict.fromkeys(rest, "ready")
    assert runtime.totals().vram == 0


def test_what_stays_after_a_purge_is_replayed_and_right(unet: nn.Module) -> None:
    for size in (LARGE, SMALL, MIDDLE):
        use(unet, size)
    runtime.purge(["960x720"])
    for size in (SMALL, MIDDLE):
        use(unet, size, 1)
        assert states()[f"{size[0]}x{size[1]}"] == "ready"


def test_a_new_memory_holds_what_its_largest_graph_needs(unet: nn.Module) -> None:
    for size in (LARGE, SMALL, MIDDLE):
        use(unet, size)
    assert runtime.totals().vram <= memory_of([row(LARGE).needs]) + 8 * MIB


def test_many_sizes_within_a_budget(unet: nn.Module) -> None:
    use(unet, LARGE)
    needs = row(LARGE).needs
    runtime.purge()
    allowed = memory_of([needs]) // MIB + 4
    runtime.configure(replace(Settings(), memory_budget=allowed))
    model = ""
    for count, size in enumerate([(512 + 32 * (i % 8), 512 + 32 * (i % 5)) for i in range(16)] + [LARGE]):
        use(unet, size)
        assert status()["route"] == "graph", status()["reason"]
        assert runtime.totals().vram <= allowed * MIB
        if not count:
            model = row(size).model
            assert runtime.pin("512x512", model, True)
    assert states()["512x512"] == "ready" and row(SMALL).pinned


@torch.no_grad()
def test_a_hundred_crops_of_random_sizes(unet: nn.Module) -> None:
    """As ADetailer inpaints faces: a new size for each, which is hardly ever met again."""
    use(unet, LARGE)
    needs = row(LARGE).needs
    runtime.purge()
    allowed = memory_of([needs]) // MIB + 4
    runtime.configure(replace(Settings(), memory_budget=allowed))
    use(unet, SMALL)
    assert runtime.pin("512x512", row(SMALL).model, True)
    before, chance = reserved(), random.Random(0)
    for _ in range(100):
        width, height = (8 * chance.randint(32, 90) for _ in range(2))
        given = inputs(unet, width, height, 2, 77, torch.float16)
        for _ in range(3):
            unet(**given)
        assert status()["route"] in ("graph", "plain"), status()["reason"]
        assert runtime.totals().vram <= allowed * MIB
    assert states()["512x512"] == "ready" and row(SMALL).pinned
    assert reserved() - before <= (allowed + 64) * MIB
    use(unet, SMALL, 1)
    assert status()["route"] == "graph"


@NEEDS_A_LIMIT
def test_graphs_wait_while_the_card_is_full(unet: nn.Module) -> None:
    use(unet, SMALL, 2)
    runtime.release_memory()
    # What the plain forward needs, and less than what should be left of the card besides.
    with full_but_for(600 * MIB):
        use(unet, SMALL, 2)
        assert status()["route"] == "plain" and status()["reason"] == CARD_IS_FULL
    use(unet, SMALL)
    assert status()["route"] == "graph"


@NEEDS_A_LIMIT
def test_before_a_sampling_on_a_full_card_graphs_are_given_up(unet: nn.Module) -> None:
    use(unet, LARGE)
    use(unet, SMALL)
    with full_but_for(200 * MIB):
        runtime.begin_sampling(unet)
        assert set(states().values()) == {"proved"} and runtime.totals().vram == 0
    runtime.begin_sampling(unet)
    use(unet, SMALL, 3)
    assert status()["route"] == "graph"


def test_a_host_that_runs_out_beside_our_graphs_is_served(unet: nn.Module) -> None:
    use(unet, LARGE)
    held = runtime.totals().vram
    attempts = []

    def host_work() -> int:
        attempts.append(True)
        # More than is left beside the graphs, and not more than is left without them.
        return torch.empty(held // 2 + 20 * MIB, dtype=torch.uint8, device="cuda").numel()

    with full_but_for(40 * MIB):
        assert runtime.pressure.run_host(host_work) > 0
    assert len(attempts) == 2 and states() == {"960x720": "proved"}


def test_another_architecture_gives_its_memory_at_once(unet: nn.Module) -> None:
    use(unet, LARGE)
    other = random_unet("sd21", torch.device("cuda")).half()
    attach(other)
    use(other, SMALL)
    both, alone = runtime.totals().vram, runtime.services.graphs.held_by(PoolKey.of(key_of(LARGE)))
    runtime.configure(replace(Settings(), memory_budget=(both - alone) // MIB + 160))
    before = reserved()
    use(other, MIDDLE)
    assert states()["960x720"] == "proved" and status()["route"] == "graph"
    assert before - reserved() > alone // 2


def key_of(size: tuple[int, int]) -> Any:
    [entry] = [entry for entry in runtime.table.entries() if entry.key.resolution == f"{size[0]}x{size[1]}"]
    return entry.key
