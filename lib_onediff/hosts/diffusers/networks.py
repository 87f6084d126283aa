"""The table of diffusers' classes of networks that OneDiff serves: how to convert a call of each to ours, and our
output to the host's."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...core.call import Call
from . import krea2, z_image
from .cosmos import cosmos_call
from .read_cosmos import is_cosmos
from .read_krea2 import is_krea2
from .read_unet import is_diffusers_unet
from .read_z_image import is_z_image

# DiffusersNetwork.output of transformers.
OUTPUT_OF_TRANSFORMERS = "diffusers.models.modeling_outputs", "Transformer2DModelOutput"


@dataclass(frozen=True)
class DiffusersNetwork:
    """One of diffusers' classes of networks: a row of the table NETWORKS.

    name: the class's name.
    is_one: returns whether a module is of this class, and not of a derived one.
    output: the Python module and the name of the class in which its forward returns the sample.
    call_of: call_of(module, **arguments) returns our Call for these arguments of the forward, or raises Refusal. The
        field is None for UNets, whose calls unet.DiffusersForward converts itself, and for networks that have a caller.
    caller: makes a call_of for one module that keeps something from call to call. The field is None for networks that
        keep nothing.
    tensor_of: tensor_of(sample, call) returns the sample of the host's forward as one tensor in the shape of our
        output, to compare the two. The field is None if the sample has that shape already.
    sample_of: sample_of(output) returns our output in the form of the host's sample. The field is None if it has that
        form already.
    """

    name: str
    is_one: Callable[[nn.Module], bool]
    output: tuple[str, str] = OUTPUT_OF_TRANSFORMERS
    call_of: Callable[..., Call] | None = None
    caller: Callable[[], Callable[..., Call]] | None = None
    tensor_of: Callable[[Any, Call], Tensor] | None = None
    sample_of: Callable[[Tensor], Any] | None = None


# The classes that OneDiff serves, found by is_one.
NETWORKS = (
    DiffusersNetwork(
        "UNet2DConditionModel", is_diffusers_unet,
        ("diffusers.models.unets.unet_2d_condition", "UNet2DConditionOutput"),
    ),
    DiffusersNetwork("CosmosTransformer3DModel", is_cosmos, call_of=cosmos_call),
    DiffusersNetwork(
        "ZImageTransformer2DModel", is_z_image, call_of=z_image.z_image_call, tensor_of=z_image.tensor_of,
        sample_of=z_image.sample_of,
    ),
    DiffusersNetwork(
        "Krea2Transformer2DModel", is_krea2, caller=krea2.Krea2Calls, tensor_of=krea2.tensor_of,
        sample_of=krea2.sample_of,
    ),
)
