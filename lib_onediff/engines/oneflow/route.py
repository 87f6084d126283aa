"""How calls come to OneFlow: whether it can be used, the graph of a shape, and what it is told of precision."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...model.call import UNetCall
from ...ops.precision import oneflow_variables
from ...options.settings import Settings
from ...shapes.key import ShapeKey
from .. import ONEFLOW, Candidates
from ..managed_unet import CachedRunner, ManagedUNet
from .gate import OneFlowGate, Verdict
from .graphs import OneFlowGraphs, OneFlowRunner

TRYING = "OneFlow is being tried, in the background"
COMPILING_ANOTHER = "OneFlow is compiling for another shape, in the background, and runs nothing meanwhile"


class OneFlowRoute:
    """One for the process: OneFlow's graphs outlive models. Whoever calls holds the runtime's lock."""

    def __init__(self, gate: OneFlowGate | None = None, graphs: OneFlowGraphs | None = None) -> None:
        self._gate = gate or OneFlowGate()
        self._graphs = graphs or OneFlowGraphs()
        self._variables: Mapping[str, str] = {}
        self._fused_attention: dict[tuple[torch.device, torch.dtype], bool] = {}

    @property
    def count(self) -> dict[str, int]:
        """How many graphs there are, and how many there may be."""
        return {"graphs": len(self._graphs), "most": self._graphs.most}

    def candidates(
        self, settings: Settings, others: Candidates, without: Candidates, call: UNetCall, waits_for_compile: bool
    ) -> Candidates:
        """OneFlow before the others, or what serves without it, and why. For calls by these settings."""
        device, dtype = call.latent.device, call.latent.dtype
        verdict = self._gate.verdict(device, dtype) if waits_for_compile else self._gate.verdict_soon(device, dtype)
        verdict = verdict or Verdict(TRYING)
        if verdict.reason is not None:
            return Candidates(without.backends, verdict.reason)
        self._variables = oneflow_variables(settings)
        self._fused_attention[device, dtype] = verdict.fused_attention
        return Candidates((ONEFLOW, *others.backends), "")

    def runner(
        self, managed: ManagedUNet, key: ShapeKey, call: UNetCall,
        waits_for_compile: bool,
    ) -> OneFlowRunner | str:
        """What runs a call, or why OneFlow does not, in one line for the user."""
        kept = managed.oneflow.get(key)
        if kept is not None and managed.serves(kept, call.cut):
            if self._graphs.is_compiling and not waits_for_compile:
                return COMPILING_ANOTHER
            # Settings change, and graphs do not know them.
            serving: Any = kept.runner
            return replace(serving, variables=self._variables)
        runner = self._graphs.runner(
            replace(key, precision=()), managed.bound.binding, call, self._variables,
            self._fused_attention.get((call.latent.device, call.latent.dtype), False), waits_for_compile,
        )
        if not isinstance(runner, str):
            managed.oneflow[key] = CachedRunner(managed.bound.generation, runner)
        return runner
