"""In every WebUI, caches rest in samplings of few-step models: the generation's CFG scale tells, with its steps."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from contract_hosts import Host
from test_forecasts import Euler
from test_guided_samplings import Guided

from lib_onediff.core.timeline import FEW_STEP_MODEL
from lib_onediff.runtime.runtime import runtime
from lib_onediff.steps.registry import step_policies

CACHES: dict[str, dict[str, Any]] = {
    "deepcache": {"deepcache_interval": 3, "guidance_end": 1.0}, "guidance": {"guidance_end": 0.5},
    "forecast": {"deepcache_interval": 3, "deepcache_depth": 0, "guidance_end": 1.0},
}


def rests(host: Host, cache: str, **generation: Any) -> bool:
    """Whether a cache rests in a sampling of 12 steps, because of the few steps. generation: attributes of p."""
    guided = Guided(host)
    guided.sampler, guided.generation = Euler, generation
    guided.start(**CACHES[cache])
    runtime.stepping.policies = step_policies()
    left_out = runtime.status()["guidance"]["without_negative"], runtime.status()["forecast"]["calls"]
    list(guided.steps())
    assert runtime.guard.faults == []
    spared = (runtime.status()["guidance"]["without_negative"], runtime.status()["forecast"]["calls"]) != left_out
    spared = spared or bool(runtime.status()["deepcache"]["cached"])
    reason = runtime.status()[cache]["reason"]
    assert spared is (reason == "")
    assert reason.partition(" rests: ")[2] in ("", FEW_STEP_MODEL)
    return not spared


@pytest.mark.parametrize("cache", CACHES)
def test_little_guidance_and_twelve_steps(host: Host, cache: str) -> None:
    assert rests(host, cache, cfg_scale=1.5)
    assert not rests(host, cache, cfg_scale=7.0)


def test_the_scale_of_the_hires_pass_tells_of_its_own_checkpoint_only(host: Host) -> None:
    """Forge's hires pass has a CFG scale of 1 unless somebody sets it."""
    second: dict[str, Any] = {"is_hr_pass": True, "cfg_scale": 7.0, "hr_cfg": 1.0}
    assert not rests(host, "deepcache", hr_checkpoint_info=None, **second)
    assert rests(host, "deepcache", hr_checkpoint_info=SimpleNamespace(name="a lightning checkpoint"), **second)
    assert rests(host, "deepcache", **{**second, "cfg_scale": 1.0, "hr_cfg": 7.0})
