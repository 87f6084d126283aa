"""Say what was measured: tables and JSON."""
from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    facts: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for package in ("triton", "diffusers"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        facts["threads"] = torch.get_num_threads()
    return facts


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def write_json(path: Path, facts: dict[str, Any], sections: dict[str, list[Any]]) -> None:
    """machine, and every section's rows under its name."""
    document = {"machine": facts, **{name: [asdict(row) for row in rows] for name, rows in sections.items()}}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
