"""Whether OneFlow works here: run as a program of its own, because where it does not, it may end its process.

Given a device and a dtype such as cuda:0 float16. Writes a line of JSON when it begins something, and one at the end.
"""
from __future__ import annotations

import json
import sys
import traceback
from importlib import metadata
from typing import Any

IMPORTING, SHARING, COMPUTING, DONE = "importing", "sharing", "computing", "done"
# Of the largest value: ten times what rounding explains.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}


def main(device: str, dtype_name: str) -> None:
    say(at=IMPORTING, numpy=version("numpy"), protobuf=version("protobuf"))
    # Not above: its names are read on every system.
    import resource

    # What ends by itself shall leave no memory image behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import torch

    # Before OneFlow, as in the WebUI.
    dtype = getattr(torch, dtype_name)
    torch.zeros(1, device=device)
    import oneflow as flow
    from oneflow.utils.tensor import from_torch, to_torch

    say(at=SHARING)
    weight = torch.ones(64, 64, device=device, dtype=dtype)
    storage = torch._C._construct_storage_from_data_pointer(weight.data_ptr(), weight.device, weight.nbytes)
    same = torch.empty(0, device=device, dtype=dtype).set_(storage, 0, weight.shape, weight.stride())
    if to_torch(from_torch(same)).data_ptr() != weight.data_ptr():
        raise RuntimeError("a tensor was copied on its way to OneFlow and back")

    say(at=COMPUTING)
    shared, kernel = from_torch(same), torch.randn(8, 4, 3, 3, device=device, dtype=dtype)
    shared_kernel = from_torch(kernel)

    class Graph(flow.nn.Graph):
        def build(self, tokens: Any, image: Any) -> Any:
            convolved = flow.nn.functional.conv2d(image, shared_kernel, None, 1, 1)
            return flow.matmul(tokens, shared), flow.nn.functional.silu(convolved)

    graph = Graph()
    for factor in (1.0, 2.0):
        weight.fill_(factor)
        tokens = torch.randn(2, 64, device=device, dtype=dtype)
        image = torch.randn(2, 4, 8, 8, device=device, dtype=dtype)
        expected = [tokens @ weight, torch.nn.functional.silu(torch.nn.functional.conv2d(image, kernel, padding=1))]
        wait(torch, device)
        results = graph(from_torch(tokens), from_torch(image))
        flow._oneflow_internal.eager.Sync()
        for result, exact in zip(map(to_torch, results), expected, strict=True):
            refuse_difference(result, exact, dtype_name)
    say(at=DONE, fused_attention=has_fused_attention(device, dtype_name))


def has_fused_attention(device: str, dtype_name: str) -> bool:
    """Whether OneFlow's own attention, which it has for GPUs alone, computes what torch's does."""
    if not device.startswith("cuda") or dtype_name != "float16":
        return False
    import oneflow as flow
    import torch
    from oneflow.utils.tensor import from_torch, to_torch

    query, key, value = torch.randn(3, 2, 77, 4 * 64, device=device, dtype=torch.float16)
    heads = [part.unflatten(2, (4, 64)).transpose(1, 2) for part in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    wait(torch, device)
    try:
        mixed = flow._C.fused_multi_head_attention_inference(*map(from_torch, (query, key, value)), num_heads=4)
        flow._oneflow_internal.eager.Sync()
        refuse_difference(to_torch(mixed), expected, dtype_name)
    except Exception:
        traceback.print_exc()
        # It is there for some GPUs only, and what is written out serves as well.
        return False
    return True


def refuse_difference(result: Any, exact: Any, dtype_name: str) -> None:
    error = float((result.float() - exact.float()).abs().max() / exact.float().abs().max())
    if not error <= TOLERANCE[dtype_name]:
        raise RuntimeError(f"it computes something else than torch (relative error {error:.0e})")


def version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def wait(torch: Any, device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {error}")
