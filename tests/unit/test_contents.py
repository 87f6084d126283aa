"""Checksums of weights depend on every number, cover several devices, and are the same by torch's operators as by the
CUDA kernel."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_unet, served

import lib_onediff
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.contents import CHUNKS, PART, Contents, MemorySpan, is_dense


def on_device(span: MemorySpan, device: str) -> MemorySpan:
    """The same memory, with another device in its layout."""
    return span._replace(layout=(*span.layout[:-1], torch.device(device)))


def test_the_checksum_by_torch_operators_follows_the_formula_of_the_cuda_kernel() -> None:
    """source/contents.py, the kernel, computes the sum of word * (2 * index + 1) over 32-bit words. Here there are more
    words than torch's operators process at once (CHUNKS)."""
    count = CHUNKS["cpu"] * 2 + 5
    numbers = torch.randint(-2**31, 2**31 - 1, (count,), dtype=torch.int32)
    expected = (numbers * torch.arange(1, 2 * count, 2)).sum()
    assert torch.equal(Contents([MemorySpan.of(numbers)]).known, expected[None])


@pytest.mark.parametrize("devices", [("cpu", "cpu:0", "cpu"), ("cpu:0", "cpu", "cpu"), ("cpu", "cpu", "cpu")])
def test_checksums_of_spans_on_several_devices_keep_the_order_of_the_spans(devices: tuple[str, ...]) -> None:
    """Each device computes the checksums of its own spans; "cpu" and "cpu:0" stand for two devices. known: the
    checksums of all spans. begin() starts a comparison, and its result, called, says whether a value has changed since
    the last one."""
    tensors = [torch.randn(50 + number) for number in range(3)]
    spans = [on_device(MemorySpan.of(tensor), device) for tensor, device in zip(tensors, devices, strict=True)]
    contents = Contents(spans)
    assert torch.equal(contents.known, torch.cat([Contents([MemorySpan.of(tensor)]).known for tensor in tensors]))
    assert not contents.begin()()
    for tensor in tensors:
        tensor[-1] += 1
        assert contents.begin()() and not contents.begin()()


def test_a_partial_reading_finds_the_change_of_a_row() -> None:
    """A partial reading sums 1 in PART of a matrix's words, some in every row. The test changes the first row, one in
    the middle, and the last."""
    matrix = torch.randn(512, 1024)
    contents = Contents([MemorySpan.of(matrix)], PART)
    for row in (0, 255, 511):
        matrix[row] *= 2
        assert contents.begin()()


@pytest.mark.parametrize(("tensor", "dense"), [
    (torch.ones(4, 6), True), (torch.ones(4, 6).t(), True), (torch.ones(8, 6)[::2], False),
    (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True), (torch.ones(1, 6).expand(4, 6), False),
    (torch.tensor(1.0), True), (torch.ones(4, 9)[:, :6], False),
], ids=str)
def test_a_tensor_is_dense_if_it_fills_its_memory_in_any_order(tensor: torch.Tensor, dense: bool) -> None:
    """The strides may be in any order, but there must be no gaps between numbers, and no two may share memory."""
    assert is_dense(tensor) is dense


PATH = "mid_block.attentions.0.transformer_blocks.0.ff.net.2"


def one_number(weight: Any) -> None:
    weight.data[-1, -1] += 0.5


def two_rows(weight: Any) -> None:
    weight.data[[0, 1]] = weight.data[[1, 0]]


def two_columns(weight: Any) -> None:
    weight.data[:, [0, 1]] = weight.data[:, [1, 0]]


@pytest.mark.parametrize("edit", [one_number, two_rows, two_columns])
def test_every_number_of_the_weights_is_in_their_identity(edit: Any) -> None:
    """identity() is the digest under which a verdict, the result of a check against the host, is stored. The edits keep
    the weight's shape and address; all but one_number keep the sum of its numbers, too."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
    bound = lambda: runtime.services.networks[unet].bound  # noqa: E731
    with lib_onediff.sampling(unet):
        served(unet, a_call(unet))
        before = bound().identity()
    with lib_onediff.sampling(unet):
        served(unet, a_call(unet))
        assert bound().identity() == before
    edit(unet.get_submodule(PATH).weight)
    with lib_onediff.sampling(unet):
        served(unet, a_call(unet))
        assert bound().identity() != before


def test_each_change_is_reported_by_one_comparison_only() -> None:
    """The first comparison after an edit reports it, and the second does not. The edits are made through .data, so
    torch does not count them in Tensor._version."""
    tensors = [torch.arange(12.0).reshape(3, 4), torch.ones(5), torch.ones(3, dtype=torch.uint8)]
    contents = Contents([MemorySpan.of(tensor) for tensor in tensors])
    assert not contents.begin()()
    for tensor in tensors:
        for row in tensor:
            row.data += 1
            assert contents.begin()() and not contents.begin()()


@pytest.mark.parametrize("index", range(3))
def test_a_tensor_that_was_freed_counts_as_changed_for_ever(index: int) -> None:
    """The tensor is freed between the begin and the end of a comparison. This comparison and the next one report a
    change. index: the index of the freed tensor."""
    tensors = [torch.ones(4), torch.ones(5), torch.ones(6)]
    contents = Contents([MemorySpan.of(tensor) for tensor in tensors])
    begun = contents.begin()
    del tensors[index]
    assert begun() is True
    assert contents.begin()() is True, "and it stays so"


def test_swapping_two_numbers_of_a_tensor_is_a_change() -> None:
    """The sum of the numbers stays the same, but the checksum does not."""
    tensor = torch.tensor([1.0, 2.0, 3.0, 4.0])
    contents = Contents([MemorySpan.of(tensor)])
    tensor.data[:2] = tensor[:2].flip(0).clone()
    assert contents.begin()()


def test_contents_without_memory_never_change() -> None:
    """A tensor on the meta device has no memory to sum."""
    contents = Contents([MemorySpan.of(torch.ones(2, device="meta"))])
    assert contents.begin()() is False
