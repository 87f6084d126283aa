"""Say what was measured: tables, JSON and a plot."""
from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch


def machine(device: torch.device, packages: Sequence[str] = ("triton", "diffusers")) -> dict[str, Any]:
    """What the numbers depend on."""
    facts: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for package in packages:
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


def write_plot(path: Path, rows: Sequence[Any], facts: dict[str, Any]) -> None:
    """A bar chart of the medians, one panel per model and size. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in rows if row.median_ms is not None]
    panels = list(dict.fromkeys((row.model, row.size) for row in measured))
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, 0.6 + 2.2 * len(panels)), squeeze=False)
    for (model, size), axis in zip(panels, axes[:, 0], strict=True):
        bars = [row for row in measured if (row.model, row.size) == (model, size)]
        colours = ["#2f6fb2" if row.variant.startswith("onediff") else "#a9b4c0" for row in bars]
        drawn = axis.barh([row.variant for row in bars], [row.median_ms or 0.0 for row in bars], color=colours)
        labels = [f"{row.median_ms:.1f} ms" + (f"  ({row.ratio:.2f}x)" if row.ratio else "") for row in bars]
        axis.bar_label(drawn, labels=labels, padding=4, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.25)
        axis.set_title(f"{model} {size}", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel(f"ms per UNet call, median; {facts['device']}, torch {facts['torch']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
