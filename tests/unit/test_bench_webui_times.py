"""What the benchmark of a running WebUI says of times that spread."""
from __future__ import annotations

from typing import Any

import pytest

from lib_onediff.bench.webui import NO_DIFFERENCE, ImageTimes, WebUIRow, measure_images


class WebUI:
    """Answers as one whose images take base seconds and step for each step, and some more or less in turn."""

    def __init__(self, steps: dict[bool, float], noise: list[float]) -> None:
        self.steps, self.noise, self.asked = steps, noise, 0

    def ask(self, path: str) -> dict[str, Any]:
        return {"model": "SD1"}

    def calls(self) -> dict[str, int]:
        return {"graph": self.asked}

    def seconds(self, size: tuple[int, int], steps: int, enabled: bool) -> float:
        self.asked += 1
        return 1.0 + steps * self.steps[enabled] + self.noise[self.asked % len(self.noise)]


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_no_time_is_below_zero_where_images_spread_more_than_their_steps_cost(runs: int) -> None:
    webui: Any = WebUI({False: 1e-3, True: 1e-3}, [0.4, 0.0, 0.31, -0.4, 0.23, -0.1, 0.05])
    cells = measure_images(webui, (64, 64), 2, runs).cells()
    assert not any(cell.startswith("-") for cell in cells)
    assert runs == 1 or cells[7] == NO_DIFFERENCE


def test_a_slow_first_image_makes_no_step_cost_less_than_nothing() -> None:
    slow = ImageTimes(20, single=[1.3, 1.29, 1.31], double=[1.01, 1.0, 1.02])
    cells = WebUIRow("SD1", "64x64", slow, ImageTimes(20, [1.0, 1.0, 1.0], [1.2, 1.2, 1.2]), {}).cells()
    assert cells[4:8] == ["1.30", "", "10.0", NO_DIFFERENCE]


def test_what_is_clear_is_told() -> None:
    webui: Any = WebUI({False: 0.1, True: 0.05}, [0.0, 0.01, -0.01])
    cells = measure_images(webui, (512, 512), 20, 5).cells()
    assert float(cells[4]) == pytest.approx(1.5, abs=0.02)
    assert [float(cell) for cell in cells[5:8]] == pytest.approx([100, 50, 2], abs=1)
