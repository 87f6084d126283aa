"""Which type a VAE decodes in: the one that the settings ask for, or a wider one where that gives NaN.

A policy around a decode (see decode.Decode). Some VAEs overflow in float16: their image is decoded again in float32,
and this machine remembers that of their weights.
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
AUTO = "auto"
NAMED: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SLOW_ON_CPU = frozenset({"fp16"})
WIDEST = torch.float32
# Said of an image, after "its image is".
NOT_FINITE = "not finite"
# An image that was encoded by a damaged VAE looks the same here as a UNet's overflow.
BAD_LATENT = (
    "the latent has NaN or infinite values: they come from the UNet or, where an image was encoded before, from the "
    "VAE's encoder, and not from this decode"
)


class NoTypeHelps(Refusal):
    """The image is not finite in the widest type either: the host's own stays as it is."""


@dataclass(frozen=True)
class WiderType:
    """Decodes in a wider type where the wanted one overflows. Both methods raise Refusal where the host is to decode,
    and torch.cuda.OutOfMemoryError."""

    decode: Decode

    def serve(self) -> Decoded:
        """Our image in the wanted type, compared with the host's own; in a wider type where it is not finite."""
        overflows = f"this VAE overflows in {short_name(self.wanted)}"
        if self.wanted != WIDEST and self._is_known:
            return self._wider(self._done, overflows)
        made = self.decode.in_type(self.wanted)
        if made.is_finite:
            return self._checked(made)
        # Its memory is needed now.
        del made
        self._refuse_bad_latent()
        if self.wanted == WIDEST:
            raise NoTypeHelps(f"its image is {NOT_FINITE} in {short_name(WIDEST)}")
        wider = self._wider(f"{self._done} again", overflows)
        self.decode.services.guard.attempt("remembering a VAE", self._remember)
        log.warning(
            "VAE: %s. From now on, it is not %s in %s.", wider.reason, self._done, short_name(self.wanted)
        )
        return wider

    def repeat(self) -> Decoded:
        """Our image in place of the host's own, which is not finite."""
        self._refuse_bad_latent()
        made = self._wider(f"{self._done} again", f"the VAE's own image is {NOT_FINITE}")
        log.warning("VAE: %s.", made.reason)
        return made

    def _checked(self, made: Decoded) -> Decoded:
        checked = attempted(lambda: self.decode.checked(made))
        if not isinstance(checked.error, HostNotFinite):
            return checked.given()
        # A host's image that cannot be shown proves nothing, and ours can be shown.
        if self.wanted == WIDEST:
            return made._replace(reason=f"the VAE's own image is {NOT_FINITE}")
        self._remember()
        return self.repeat()

    def _wider(self, done: str, why: str) -> Decoded:
        """The image in float32, or in bfloat16 where there is no memory for that: it has the range, and fewer digits.
        """
        tried = attempted(lambda: self.decode.in_type(WIDEST, uncompared=True))
        if tried.outcome is Outcome.OUT_OF_MEMORY and self.wanted != torch.bfloat16:
            made = self.decode.in_type(torch.bfloat16, uncompared=True)
            why = f"{why}, and there is no memory for {short_name(WIDEST)}"
        else:
            made = tried.given()
        name = short_name(made.entry.key.dtype)
        if not made.is_finite:
            self._refuse_bad_latent()
            raise NoTypeHelps(f"{why}, and its image in {name} is {NOT_FINITE} too")
        return made._replace(reason=f"{done} in {name}, because {why}")

    @property
    def wanted(self) -> torch.dtype:
        """The type to decode in. Auto keeps the type of the host's own VAE: its options have decided that. So does a
        type that this CPU is too slow for, of which ui.effects tells."""
        choice = self.decode.settings.vae_precision
        latent = self.decode.host.latent
        is_slow = choice in SLOW_ON_CPU and latent.device.type == "cpu"
        return latent.dtype if choice == AUTO or is_slow else NAMED[choice]

    @property
    def _done(self) -> str:
        return "encoded" if self.decode.layout.encodes else "decoded"

    @property
    def _name(self) -> str:
        """Under which the overflow is remembered, on this machine and for later processes."""
        return f"VAE {self.decode.identity}, {short_name(self.wanted)}"

    @property
    def _is_known(self) -> bool:
        return bool(self.decode.services.tuning_cache.get(self._name) == NOT_FINITE)

    def _remember(self) -> None:
        self.decode.services.tuning_cache.set(self._name, NOT_FINITE)

    def _refuse_bad_latent(self) -> None:
        if not is_finite(self.decode.host.latent):
            raise NoTypeHelps(BAD_LATENT)
