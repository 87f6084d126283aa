"""Which rows of a call the Forge family means for the prompt: transformer_options say it."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...model.rows import APART, OTHER_ROWS, half_of, rows_within

COND, UNCOND = 0, 1
NOT_TOLD = "the call does not say which rows are the negative prompt's"
SEVERAL_PROMPTS = "several prompts, areas or other predictions share the call"


def prompt_rows(latent: Tensor, options: Mapping[str, Any]) -> slice | str:
    """The prompts' rows of a call, or why they are not known. options: its transformer_options, in which the noise
    levels have one value for each image."""
    marks, levels = options.get("cond_or_uncond"), options.get("sigmas")
    if not isinstance(marks, (list, tuple)) or not isinstance(levels, Tensor) or levels.dim() != 1:
        return NOT_TOLD
    if sorted(marks) != [COND, UNCOND]:
        return APART if len(marks) == 1 else SEVERAL_PROMPTS
    if latent.shape[0] != 2 * levels.shape[0]:
        return OTHER_ROWS
    return half_of(latent.shape[0], is_first=marks[0] == COND)


def options_of_prompt(options: Mapping[str, Any], rows: slice, batch: int) -> dict[str, Any]:
    """transformer_options for a call of these rows alone, as the host itself makes it without guidance."""
    alone = {**options, "cond_or_uncond": [COND]}
    if isinstance(options.get("cond_mark"), Tensor):
        alone["cond_mark"] = options["cond_mark"][rows]
    if "cond_indices" in options:
        alone |= {"cond_indices": list(range(batch // 2)), "uncond_indices": []}
    if isinstance(options.get("uuids"), list):
        alone["uuids"] = options["uuids"][1:] if rows.start else options["uuids"][:1]
    return alone


def control_of_prompt(control: Mapping[str, Any] | None, rows: slice, batch: int) -> dict[str, Any] | None:
    """The residuals of these rows, in lists that the host may empty."""
    return None if control is None else rows_within(dict(control), rows, batch)
