"""Forge Neo with checkpoints whose weights are quantized to 4 or 8 bits."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from builders import relative_error
from contract_hosts import FamilyHost
from torch import Tensor, nn
from transformer_hosts import AnimaHost, Krea2Host, ZImageHost

# The width of ConvRot's rotation; the layers have 48 and 64 inputs.
GROUP = 16
# The relative change of the latent in sensitivity(): enough to round some inputs up instead of down.
MOVED_BY = 2e-7
# The formats in which GPUs before Blackwell do not multiply.
DISABLED = ("mxfp8", "nvfp4")
INT8 = "int8_tensorwise"
E4M3 = "float8_e4m3fn"
E5M2 = "float8_e5m2"


class FileFormat(NamedTuple):
    """kind: the format's name in a file; for GGUF, the name of its class. options: arguments of the layer's read(),
    which quantizes a weight."""

    kind: str
    options: dict[str, Any]


ROWS = {"per_channel": True}
# By the format's name for users.
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
    """Forge Neo with a checkpoint that store() quantizes. plain: path prefixes of the layers that checkpoint files
    leave in 16 or 32 bits."""

    plain: tuple[str, ...] = ("x_embedder", "final_layer.linear", "input_blocks.0", "out.", "time_embed")

    def store(
        self, name: str, disabled: tuple[str, ...] = DISABLED, only: tuple[str, ...] = ("",), **options: Any
    ) -> None:
        """Quantize the weights of the checkpoint's linear layers.

        name: a key of FORMATS. disabled: formats in which the GPU cannot multiply, so that layers decode their weights.
        only: path prefixes of the layers to quantize. options: replace those of the format.
        """
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
        """A context in which the WebUI multiplies inputs by decoded weights, and does not quantize the inputs. INT8 is
        the exception: its inputs are quantized as usual."""
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
    """A WebUI whose generations begin with a latent that was multiplied by `moved`."""

    moved = 1.0

    def noise_and_prompts(self) -> tuple[Tensor, Tensor]:
        image, context = super().noise_and_prompts()
        return self.moved * image, context


class StoredAnima(Moved, AnimaHost):
    def theirs(self, as_stored: bool = True) -> Tensor:
        """The output of one call by the WebUI's own code, while OneDiff is on. as_stored: see StoredNeo.as_stored."""
        with self.as_stored() if as_stored else contextlib.nullcontext():
            return self.own_output()


class StoredKrea2(Moved, Krea2Host):
    plain = ("first", "last.")


class StoredZImage(Moved, ZImageHost):
    pass


class StoredUNet(Moved):
    pass


def sensitivity(host: Any) -> float:
    """How far rounding may change the final latent: its largest relative difference if the initial latent is made up to
    2 * MOVED_BY larger or smaller. Call it with OneDiff off, for the WebUI's own sensitivity."""
    expected = host.generate().latent
    found = 0.0
    for step in (-2, -1, 1, 2):
        host.moved = 1.0 + step * MOVED_BY
        found = max(found, relative_error(host.generate().latent, expected))
    host.moved = 1.0
    return found


def stored_bits(host: Any) -> dict[str, Tensor]:
    """Copies of all tensors of the network (tensors_of) as bytes, by name."""
    return {name: one.clone().reshape(-1).view(torch.uint8) for name, one in tensors_of(host)}


def tensors_of(host: Any) -> list[tuple[str, Tensor]]:
    """(name, tensor) for each tensor that the network computes with. A quantized weight has one for its stored numbers,
    and one for each of its scales."""
    found: list[tuple[str, Tensor]] = []
    for name, parameter in host.unet.named_parameters():
        if isinstance(parameter, host.tensors.QuantizedTensor):
            scales = vars(parameter._params).items()
            found.append((f"{name} numbers", parameter._qdata))
            found += [(f"{name} {field}", value) for field, value in scales if isinstance(value, Tensor)]
        else:
            found.append((name, parameter.data))
    return found
