"""Forge Neo with a checkpoint whose weights are stored in few bits."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from builders import relative_error
from contract_hosts import FamilyHost
from torch import Tensor, nn
from transformer_hosts import AnimaHost, Krea2Host, ZImageHost

# The rotation's groups, in networks with layers of 48 and of 64 inputs.
GROUP = 16
# Rounded inputs: where one goes up instead of down, a network shows it.
MOVED_BY = 2e-7
# What a card before Blackwell has no units for.
DISABLED = ("mxfp8", "nvfp4")
INT8, E4M3, E5M2 = "int8_tensorwise", "float8_e4m3fn", "float8_e5m2"


class FileFormat(NamedTuple):
    """kind: as a file calls it, or a class of GGUF. options: how its weights are made."""

    kind: str
    options: dict[str, Any]


ROWS = {"per_channel": True}
# By what users read.
FORMATS = {
    "INT8": FileFormat(INT8, {}),
    "INT8 by rows": FileFormat(INT8, ROWS),
    "INT8 (ConvRot)": FileFormat(INT8, {**ROWS, "convrot": True, "group": GROUP}),
    "FP8 (e4m3, scaled)": FileFormat(E4M3, {"scale": "recalculate"}),
    "FP8 (e5m2, scaled)": FileFormat(E5M2, {"scale": "recalculate"}),
    "MXFP8": FileFormat("mxfp8", {}),
    "NVFP4": FileFormat("nvfp4", {}),
    "GGUF Q8_0": FileFormat("Q8_0", {}),
    "GGUF Q4_K": FileFormat("Q4_K", {}),
}


class StoredNeo(FamilyHost):
    """Its layers of few bits. plain: the layers that a file leaves as they are, by the beginning of their paths."""

    plain: tuple[str, ...] = ("x_embedder", "final_layer.linear", "input_blocks.0", "out.", "time_embed")

    def store(
        self, name: str, disabled: tuple[str, ...] = DISABLED, only: tuple[str, ...] = ("",), **options: Any
    ) -> None:
        """Let the checkpoint be one whose linear layers are stored in this format. disabled: see the host's
        mixed_precision_ops. only: the beginnings of the paths of layers that are; the others have plain numbers."""
        file_format = FORMATS[name]
        is_gguf = name.startswith("GGUF")
        layers = self.gguf.Linear if is_gguf else self.mixed(disabled)
        for path, layer in self.unet.named_modules():
            if not isinstance(layer, nn.Linear) and type(layer).__name__ != "Linear":
                layer.parameters_manual_cast = True
                continue
            layer.__class__ = layers
            fits = layer.weight.shape[1] % (32 if is_gguf else GROUP) == 0
            is_stored = fits and path.startswith(only) and not path.startswith(self.plain)
            if is_gguf:
                layer.read(getattr(self.module("backend.operations_gguf"), file_format.kind) if is_stored else None)
            elif is_stored:
                layer.read(file_format.kind, **{**file_format.options, **options})
        mixed_precision = self.module("backend.operations_mixed_precision")
        dtype = "gguf" if is_gguf else mixed_precision.torch_dtype_of(file_format.kind)
        self.unet.storage_dtype = self.checkpoint.forge_objects.unet.model.storage_dtype = dtype

    @property
    def gguf(self) -> Any:
        return self.module("backend.operations").ForgeOperationsGGUF

    @property
    def tensors(self) -> Any:
        return self.module("comfy_kitchen.tensor.base")

    @contextlib.contextmanager
    def as_stored(self) -> Iterator[None]:
        """Inside, the host computes with the numbers in the file: INT8 as it multiplies them, else without rounding
        what layers read."""
        decodes = {layer: layer._full_precision_mm for layer in self.unet.modules() if hasattr(layer, "quant_format")}
        try:
            for layer in decodes:
                layer._full_precision_mm = True
            yield
        finally:
            for layer, before in decodes.items():
                layer._full_precision_mm = before

    def mixed(self, disabled: tuple[str, ...]) -> Any:
        return self.module("backend.operations_mixed_precision").mixed_precision_ops(disabled).Linear


class Moved(StoredNeo):
    """moved: what the latents of its calls are multiplied by."""

    moved = 1.0

    def noise_and_prompts(self) -> tuple[Tensor, Tensor]:
        image, context = super().noise_and_prompts()
        return self.moved * image, context


class StoredAnima(Moved, AnimaHost):
    def theirs(self, as_stored: bool = True) -> Tensor:
        """The output of one call by the host's own code, while OneDiff is on."""
        with self.as_stored() if as_stored else contextlib.nullcontext():
            return self.own_output()


class StoredKrea2(Moved, Krea2Host):
    plain = ("first", "last.")


class StoredZImage(Moved, ZImageHost):
    pass


class StoredUNet(Moved):
    pass


def sensitivity(host: Any) -> float:
    """How far the host's own latent moves where what it begins with moves by MOVED_BY."""
    expected = host.generate().latent
    found = 0.0
    for step in (-2, -1, 1, 2):
        host.moved = 1.0 + step * MOVED_BY
        found = max(found, relative_error(host.generate().latent, expected))
    host.moved = 1.0
    return found


def stored_bits(host: Any) -> dict[str, Tensor]:
    """A copy of all numbers of the network, as bytes."""
    return {name: one.clone().reshape(-1).view(torch.uint8) for name, one in tensors_of(host)}


def tensors_of(host: Any) -> list[tuple[str, Tensor]]:
    """The tensors that the network computes with, by name: of a weight in few bits, its numbers and scales."""
    found: list[tuple[str, Tensor]] = []
    for name, parameter in host.unet.named_parameters():
        if isinstance(parameter, host.tensors.QuantizedTensor):
            scales = vars(parameter._params).items()
            found.append((f"{name} numbers", parameter._qdata))
            found += [(f"{name} {field}", value) for field, value in scales if isinstance(value, Tensor)]
        else:
            found.append((name, parameter.data))
    return found
