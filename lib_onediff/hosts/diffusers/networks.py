"""The classes of diffusers' networks that OneDiff serves: how a call becomes ours, and our output its answer."""
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

OUTPUT_OF_TRANSFORMERS = "diffusers.models.modeling_outputs", "Transformer2DModelOutput"


@dataclass(frozen=True)
class DiffusersNetwork:
    """One of diffusers' classes.

    name: of the class. is_one: returns whether a module is of this class, and of none derived from it. output: the
    Python module and the class of the object in which its forward returns its sample. call_of: makes our call of a
    module and the arguments of its forward by name, or raises Refusal; None where it takes more than these
    (DiffusersForward). caller: makes such a function for one network, which keeps something from call to call.
    tensor_of: returns its sample of a call as one tensor, of the shape of our output. sample_of: returns the sample for
    such a tensor. None for both where the sample is the tensor.
    """

    name: str
    is_one: Callable[[nn.Module], bool]
    output: tuple[str, str] = OUTPUT_OF_TRANSFORMERS
    call_of: Callable[..., Call] | None = None
    caller: Callable[[], Callable[..., Call]] | None = None
    tensor_of: Callable[[Any, Call], Tensor] | None = None
    sample_of: Callable[[Tensor], Any] | None = None


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
