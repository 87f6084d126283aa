"""What a generation may ask for; everything else is refused with a sentence before anything is computed."""
from __future__ import annotations

from typing import Any

from ..core.refusal import Refusal

SIZE_STEP, SIDES = 8, ("width", "height")
SIDE = (64, 2048)
# The least and the most.
WHOLE = {
    "width": SIDE, "height": SIDE, "steps": (1, 150), "batch_size": (1, 8), "n_iter": (1, 100),
    "seed": (-1, 2**53 - 1),
}
NUMBERS = {**WHOLE, "cfg_scale": (1, 30), "denoising_strength": (0, 1)}
# A tokenizer compares all parts of a word with each other again and again.
LONGEST_PROMPT = 2000


def checked(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a StableDiffusionProcessing, whole numbers as int. Raises Refusal."""
    found = dict(fields)
    for name, (least, most) in NUMBERS.items():
        value = fields.get(name, least)
        if value is None or not least <= value <= most:
            raise Refusal(f"{name} is {value}; it must be between {least} and {most}.")
        if name in WHOLE and value != int(value):
            raise Refusal(f"{name} is {value}; it must be a whole number.")
        if name in SIDES and value % SIZE_STEP:
            below = int(value) - int(value) % SIZE_STEP
            raise Refusal(
                f"{name} is {value}; it must be a multiple of {SIZE_STEP}, for example {below} or {below + SIZE_STEP}."
            )
        if name in fields:
            found[name] = int(value) if name in WHOLE else value
    for name in ("prompt", "negative_prompt"):
        if len(found[name]) > LONGEST_PROMPT:
            raise Refusal(f"{name} has {len(found[name])} characters; it must have {LONGEST_PROMPT} at most.")
    return found
