"""Say what was measured: a table, JSON and a plot."""
from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from .measure import Row

HEADINGS = ("model", "size", "variant", "median ms", "x host", "rel. error", "first call s", "peak MiB", "held MiB")


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    facts: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        facts["threads"] = torch.get_num_threads()
    return facts


def table(rows: list[Row]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| " + " | ".join("---" for _ in HEADINGS) + " |"]
    for row in rows:
        if row.problem:
            cells = [row.model, row.size, row.variant, row.problem, *[""] * 5]
        else:
            cells = [
                row.model, row.size, row.variant, number(row.median_ms, ".2f"), number(row.ratio, ".2f"),
                number(row.relative_error, ".1e"), number(row.first_call_s, ".2f"), number(row.peak_mib, ".0f"),
                number(row.held_mib, ".0f"),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def cold_start_table(seconds: dict[str, dict[str, float | None]]) -> str:
    """Markdown: seconds from a fresh process's first call to its output, by model and variant."""
    lines = ["| model | variant | cold start s |", "| --- | --- | --- |"]
    for model, by_variant in seconds.items():
        for variant, value in by_variant.items():
            lines.append(f"| {model} | {variant} | {number(value, '.2f') or 'failed'} |")
    return "\n".join(lines)


def write_json(path: Path, rows: list[Row], facts: dict[str, Any], cold: dict[str, dict[str, float | None]]) -> None:
    document = {"machine": facts, "rows": [row.as_dict() for row in rows], "cold_start_s": cold}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, rows: list[Row], facts: dict[str, Any]) -> None:
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
