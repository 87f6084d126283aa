"""Chooses the dtype of a decode: the one in the settings, or a wider one if that gives NaN.

Some VAEs overflow in float16. Their image is decoded again in float32, and later decodes with the same weights begin
with float32: the history keeps it.
"""
from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...core.attempt import Outcome, attempted
from ...core.refusal import Refusal
from .decode import Decode, Decoded, HostNotFinite, is_finite, short_name

log = logging.getLogger("onediff")
# The values of the option vae_precision: AUTO, and those that name a dtype. On a CPU, SLOW_ON_CPU count as AUTO.
AUTO = "auto"
NAMED: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SLOW_ON_CPU = frozenset({"fp16"})
WIDEST = torch.float32
# The value in the tuning cache of weights that overflow.
NOT_FINITE = "not finite"
# Completes "its image is ..." in messages.
BROKEN = "broken (NaN or infinite values)"
# The reason of a refusal, of a decode or an encode.
BAD_INPUT = (
    "the VAE's input has NaN or infinite values already, so no VAE precision helps; if the image is black without "
    "OneDiff too, the model needs float32 (in a WebUI: --no-half)"
)


class NoTypeHelps(Refusal):
    """No dtype gives a finite image, or the latent itself is not finite, so the host's own image is used."""


@dataclass(frozen=True)
class WiderType:
    """Decodes one latent (or encodes one image), in a wider dtype than the wanted one if that overflows. serve() and
    repeat() raise Refusal if the host's own image must be used, and torch.cuda.OutOfMemoryError.

    decode: computes our image in any dtype, and compares it with the host's own.
    """

    decode: Decode

    def serve(self) -> Decoded:
        """Our image in the wanted dtype, compared with the host's own at a shape's first use. If our image is not
        finite, our image in a wider dtype, uncompared; that these weights overflow is remembered and logged, and later
        decodes with them compute the image in the wider dtype at once. For a host's image that is not finite, see
        _checked.

        Raises NoTypeHelps if our image is not finite in the widest dtype that fits in memory, or the latent is not
        finite; and what Decode.in_type and Decode.checked raise, except HostNotFinite.
        """
        overflows = f"this VAE overflows in {short_name(self.wanted)}"
        if self.wanted != WIDEST and self._is_known:
            return self._wider(self._done, overflows)
        made = self.decode.in_type(self.wanted)
        if made.is_finite:
            return self._checked(made)
        # Free its memory for the next decode.
        del made
        self._refuse_bad_input()
        if self.wanted == WIDEST:
            raise NoTypeHelps(f"its image is {BROKEN} in {short_name(WIDEST)}")
        wider = self._wider(f"{self._done} again", overflows)
        self.decode.services.guard.attempt("remembering a VAE", self._remember)
        log.warning(
            "VAE: %s. From now on, OneDiff does not use this VAE in %s.", wider.reason, short_name(self.wanted)
        )
        return wider

    def repeat(self) -> Decoded:
        """Our image in a wider dtype, uncompared. Called when the host's own image was not finite; logs that, and
        remembers nothing. Raises NoTypeHelps if our image is not finite either, or the latent is not."""
        self._refuse_bad_input()
        made = self._wider(f"{self._done} again", f"the VAE's own image is {BROKEN}")
        log.warning("VAE: %s.", made.reason)
        return made

    def _checked(self, made: Decoded) -> Decoded:
        """Our finite image `made`, after its comparison with the host's at a shape's first use. If the host's image is
        not finite, nothing can be compared. Then, if the wanted dtype is the widest, `made` is returned uncompared;
        otherwise the image of repeat(), and these weights are remembered as overflowing. Raises Refusal if the two
        images differ by more than rounding explains."""
        checked = attempted(lambda: self.decode.checked(made))
        if not isinstance(checked.error, HostNotFinite):
            return checked.given()
        # The host's image is not finite, and ours is: ours cannot be compared, and is still the better one.
        if self.wanted == WIDEST:
            return made._replace(reason=f"the VAE's own image is {BROKEN}")
        self._remember()
        return self.repeat()

    def _wider(self, done: str, why: str) -> Decoded:
        """The image in float32; if the memory is too small for that, in bfloat16, which has the same range and fewer
        digits. It is not compared with the host's. Raises NoTypeHelps if it is not finite, and OutOfMemoryError if the
        memory is too small for bfloat16 too, or bfloat16 is the wanted dtype.

        done, why: for users, the words of Decoded.reason, "{done} in float32, because {why}".
        """
        tried = attempted(lambda: self.decode.in_type(WIDEST, uncompared=True))
        if tried.outcome is Outcome.OUT_OF_MEMORY and self.wanted != torch.bfloat16:
            made = self.decode.in_type(torch.bfloat16, uncompared=True)
            why = f"{why}, and there is too little GPU memory for {short_name(WIDEST)}"
        else:
            made = tried.given()
        name = short_name(made.entry.key.dtype)
        if not made.is_finite:
            self._refuse_bad_input()
            raise NoTypeHelps(f"{why}, and its image in {name} is {BROKEN} too")
        return made._replace(reason=f"{done} in {name}, because {why}")

    @property
    def wanted(self) -> torch.dtype:
        """The dtype in the settings. It is the latent's dtype, which the host's own options decide, with AUTO, and with
        fp16 on a CPU, where fp16 is slow (ui.effects tells the user so)."""
        choice = self.decode.settings.vae_precision
        latent = self.decode.host.latent
        is_slow = choice in SLOW_ON_CPU and latent.device.type == "cpu"
        return latent.dtype if choice == AUTO or is_slow else NAMED[choice]

    @property
    def _done(self) -> str:
        """The participle "decoded" or "encoded", for messages to users."""
        return "encoded" if self.decode.layout.encodes else "decoded"

    @property
    def _name(self) -> str:
        """The name in the tuning cache under which it is kept that these weights overflow in the wanted dtype."""
        return f"VAE {self.decode.identity}, {short_name(self.wanted)}"

    @property
    def _is_known(self) -> bool:
        """Whether our image or the host's was not finite with these weights in the wanted dtype before, in this process
        or an earlier one."""
        return bool(self.decode.services.tuning_cache.get(self._name) == NOT_FINITE)

    def _remember(self) -> None:
        """Keep in the tuning cache, and so on the disk, that these weights overflow in the wanted dtype: see
        _is_known."""
        self.decode.services.tuning_cache.set(self._name, NOT_FINITE)

    def _refuse_bad_input(self) -> None:
        """Raise NoTypeHelps if the latent itself (in an encode, the image) is not finite, so that no dtype gives a
        finite result."""
        if not is_finite(self.decode.host.latent):
            raise NoTypeHelps(BAD_INPUT)
