"""Compiles OneDiff's kernels: lib_onediff/devices/cuda/kernels/source to the archive kernels.zip beside it.

.ci/kernels runs these steps in order:

    build_kernels.py specify           print the list of variants to compile, as JSON; does not need Triton
    build_kernels.py compile           read that list from stdin, compile those variants that this Python's version of
                                       Triton is for, and print the results as JSON
    build_kernels.py pack FILE ...     write the results in these files to the archive
    build_kernels.py compare FILE ...  compare the results with the archive; the exit status is 1 if they differ

For people:

    build_kernels.py table CARD ...    print the registers, spills and shared memory of the archive's kernels, measured
                                       by NVIDIA's assembler ptxas, for cards such as 75 and 90
"""
from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
KERNELS = REPOSITORY / "lib_onediff" / "devices" / "cuda" / "kernels"
# Compute capability 7.5 (Turing) without the point; the last Triton that uses its matrix units; and the Triton for
# everything else.
TURING, TRITON_OF_TURING, TRITON = 75, "3.2", "3.8"
# The PTX version of each architecture, without the point.
PTX_OF = {75: 80, 80: 80, 89: 84, 90: 86}
# The instruction of each architecture's matrix units. The PTX of a kernel with matrix products must contain it.
MATRIX_UNITS = {75: "mma.sync", 80: "mma.sync", 89: "mma.sync", 90: "wgmma"}
# kernels.rounding.Rule: rows are rotated by sums before compute capability 8.0, and by matrix products from 8.0 on.
BUTTERFLIES, MATRIX = 2, 3
# The shared memory of a block in KB, by compute capability.
SHARED_OF_CARD = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# The widths of tokens, and the numbers of channels, of the networks that we serve, and of small ones in tests.
TOKEN_WIDTHS = (32, 64, 96, 128, 256, 320, 384, 640, 768, 1280, 1536)
NORM_CHANNELS = (32, 64, 128, 256, 320, 384, 512, 640, 768, 960, 1280, 1536, 1920, 2304, 2560, 3072)
# (number of heads, head width) of the transformers with normed heads that are not single streams: Anima and emoji-dit.
NORMED_HEADS = ((16, 128), (4, 64))
# The widths of tokens between the linear layers of a feed-forward with GELU, where they are not four times the width of
# the network's tokens: emoji-dit's.
GELU_WIDTHS = (512,)
# Of the single-stream transformers Z-Image and Krea 2, and of Krea 2's transformer for the prompt: the widths of
# tokens, of the outputs of SwiGLUs, of tokens with a sigmoid gate, and of heads.
STREAM_WIDTHS = (3840, 6144)
SWIGLU_WIDTHS = (10240, 16384, 6912)
SIGMOID_WIDTHS = (6144, 2560)
STREAM_HEAD = 128
# The widths of rows that are quantized by kernels of their own.
ROUNDED_WIDTHS = tuple(1 << power for power in range(5, 16))


# --- what is to be compiled -------------------------------------------------------------------------------------------


def specifications() -> list[dict[str, Any]]:
    """All variants to compile: every launch with every launch config, once for each architecture."""
    sys.path.insert(0, str(REPOSITORY))
    import torch

    from lib_onediff.devices.cuda.kernels import archive, launching

    found: dict[str, dict[str, Any]] = {}

    def collect(
        kernel: str, grid: Any, arguments: Any, warps: int, stages: int, constants: dict[str, int]
    ) -> None:
        key = archive.key_name(archive.key_of(kernel, arguments, warps, stages, constants))
        types = [type_of(argument, archive.TYPE_NAMES) for argument in arguments]
        found[key] = {
            "key": key, "kernel": kernel, "types": types, "warps": warps, "stages": stages, "constants": constants
        }

    launching.launch_source = collect
    for work in every_launch((torch.float16, torch.bfloat16, torch.float32), torch.device("meta")):
        work()
    return [{**one, "architecture": arch} for _, one in sorted(found.items()) for arch in architectures(one)]


def every_launch(dtypes: tuple[Any, ...], meta: Any) -> Iterator[Any]:
    """Functions that together launch every variant of every kernel. meta: torch's meta device, on which tensors have no
    memory."""
    import torch

    from lib_onediff.core.layer_weights import QuantizedWeight
    from lib_onediff.core.leaves import (
        GATED,
        PLAIN_INPUT,
        AdaptiveNorm,
        CrossAttention,
        GroupNorm,
        LayerNorm,
        Linear,
        NormedHeads,
        RMSNorm,
        SigmoidGate,
        SwiGLU,
    )
    from lib_onediff.core.operators import QuantizedTokens
    from lib_onediff.devices.cuda import loading, native, tuning
    from lib_onediff.devices.cuda.kernels import launch_config, products, rounding, tokens
    from lib_onediff.weights.contents import MemorySpan
    from lib_onediff.weights.low_bit import ALIGNED, FP8, GROUP_NORMED, INT8, KERNEL, Product

    others: list[Any] = [
        *(GroupNorm("", channels, 32, 1e-5) for channels in NORM_CHANNELS),
        *(CrossAttention(Linear("", 0, 8 * width), None, None, 8) for width in tokens.ATTENTION_WIDTHS),
    ]
    networks: list[list[Any]] = [[LayerNorm("", width, 1e-5), *others] for width in TOKEN_WIDTHS]
    networks += [[AdaptiveNorm(heads * width, 1e-6), NormedHeads(heads, width)] for heads, width in NORMED_HEADS]

    networks.append([
        *(RMSNorm("", width, 1e-5) for width in STREAM_WIDTHS), AdaptiveNorm(STREAM_WIDTHS[0], 1e-6),
        NormedHeads(tokens.HEADS, STREAM_HEAD, interleaved=True), *map(SwiGLU, SWIGLU_WIDTHS),
        *map(SigmoidGate, SIGMOID_WIDTHS),
    ])

    class Nth:
        """Chooses the candidate with this number for every kernel, in place of launch_config.Launches."""

        def __init__(self, number: int) -> None:
            self.number = number

        def of(self, kernel: Any, *given: Any) -> Any:
            return kernel.candidates[self.number % len(kernel.candidates)]

    yield native.sums_of([MemorySpan.of(torch.empty(1 << 10, device=meta))], 1)
    tunable = [one for one in vars(launch_config).values() if isinstance(one, launch_config.Kernel)]
    for dtype in dtypes:
        make = lambda *shape: torch.empty(shape, device=meta, dtype=dtype)  # noqa: B023, E731
        for number in range(max(len(kernel.candidates) for kernel in tunable)):
            for users in networks:
                yield from loading.exact_launches(users, dtype, meta, Nth(number))
                for kind in (FP8, INT8) if dtype != torch.float32 else ():
                    yield from loading.low_bit_launches(users, dtype, meta, Nth(number), kind)
        if dtype == torch.float32:
            continue
        for width in GELU_WIDTHS:
            for kind in (FP8, INT8):
                yield partial(rounding.rounded, make(4, width), kind, gelu=True)
        for rule in rounding.Rule:
            if rule != rounding.Rule.OURS:
                for width in GELU_WIDTHS:
                    if rule == rounding.Rule.HOSTS or width % rounding.GROUP == 0:
                        yield partial(rounding.rounded, make(4, width), INT8, gelu=True, rule=rule)
                        yield partial(rounding.gelu_and_rounded, make(4, width), rule)
                for users in networks:
                    yield from loading.stored_launches(users, dtype, meta, rule)
                for width in ROUNDED_WIDTHS:
                    if rule == rounding.Rule.HOSTS or width % rounding.GROUP == 0:
                        yield partial(rounding.rounded, make(4, width), INT8, rule=rule)
        for width in ROUNDED_WIDTHS:
            # Weights of linear layers and convolutions.
            for kind in (FP8, INT8):
                yield partial(rounding.rounded, make(4, width), kind)
            yield partial(rounding.rounded_rows, make(4, width), make(4, width).to(FP8.dtype), make(1, 1).float())
        factors = make(16, products.RANKS), make(ALIGNED, products.RANKS)
        tokens_of_int8 = QuantizedTokens(make(16, ALIGNED).to(INT8.dtype), make(16, 1).float(), (16,))
        weight_of_int8 = QuantizedWeight(make(ALIGNED, ALIGNED).to(INT8.dtype), make(1, ALIGNED).float())
        for config in launch_config.INT8_PRODUCT.candidates:
            # A product with LoRAs.
            yield partial(products.int8_product, tokens_of_int8, weight_of_int8, None, dtype, config, factors)
        trials = [
            tuning.product_trial(Product(16, ALIGNED, ALIGNED, PLAIN_INPUT), make, meta, dtype, INT8, dtype),
            tuning.product_trial(Product(16, ALIGNED, ALIGNED, GATED), make, meta, dtype, FP8, dtype),
            *(
                tuning.product_trial(
                    Product(16, KERNEL**2 * ALIGNED, ALIGNED, GROUP_NORMED, (4, 4)), make, meta, dtype, kind, dtype
                ) for kind in (FP8, INT8)
            ),
            tuning.gated_trial(make, 16, ALIGNED, meta),
            tuning.down_trial(make, 16, products.RANKS, ALIGNED),
            *([tuning.half_sums_trial(make, (1, 4, 4, ALIGNED, ALIGNED), meta)] if dtype == torch.float16 else []),
        ]
        yield from (
            partial(trial.run, config) for trial in trials for config in trial.kernel.candidates
            if config != launch_config.LIBRARY
        )


def type_of(argument: Any, names: dict[Any, str]) -> str:
    """The type of an argument in Triton's notation. All integers have the same type."""
    if hasattr(argument, "block"):
        return f"tensordesc<{names[argument.tensor.dtype]}{list(argument.block)}>"
    if hasattr(argument, "dtype"):
        return f"*{names[argument.dtype]}"
    return "fp32" if isinstance(argument, float) else "i32"


def architectures(one: dict[str, Any]) -> tuple[int, ...]:
    """The architectures to compile a variant for."""
    constants = one["constants"]
    if constants.get("COPIED"):
        return (90,)
    if any("fp8" in name for name in one["types"]):
        return (89,)
    if "SCALED" in constants:
        return (80,)
    if constants.get("RULE") == MATRIX:
        return (80,)
    if constants.get("RULE") == BUTTERFLIES:
        return () if "*bf16" in one["types"] else (75,)
    # Turing has no bfloat16. PTX for 8.0 makes a step of SDXL on an H100 1 % faster than PTX for 7.5, and not in
    # float32.
    older = () if "*bf16" in one["types"] else (75,)
    newer = (80,) if {"*bf16", "*fp16"} & set(one["types"]) else ()
    return older + newer + ((90,) if multiplies(one) and "COPIED" not in constants else ())


def architecture_name(number: int) -> str:
    """An architecture's name in PTX. The "a" of 90a allows instructions that only 9.0 has."""
    return f"{number}a" if number == 90 else str(number)


def multiplies(one: dict[str, Any]) -> bool:
    """Whether a variant computes matrix products."""
    return one["kernel"].startswith(("products.", "attention."))


# --- compiling --------------------------------------------------------------------------------------------------------


def compiled(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results for those variants that this version of Triton is for. Each is compiled in a process of its own:
    otherwise, names in its PTX would depend on what was compiled before."""
    import triton

    is_old = triton.__version__.startswith(TRITON_OF_TURING)
    mine = [one for one in specs if (multiplies(one) and one["architecture"] == TURING) == is_old]
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, "TRITON_DISABLE_LINE_INFO": "1"}
        pool = ProcessPoolExecutor(os.cpu_count(), get_context("fork"), max_tasks_per_child=None)
        with pool:
            return list(pool.map(one_compiled, mine, chunksize=4))


def one_compiled(one: dict[str, Any]) -> dict[str, Any]:
    """The result for a variant, compiled in a new process that is forked from this one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            done = json.dumps(by_triton(one)).encode()
        except BaseException as error:
            done = json.dumps({**one, "failure": f"{type(error).__name__}: {str(error)[:300]}"}).encode()
        with os.fdopen(write, "wb") as out:
            out.write(done)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as back:
        text = back.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {**one, "failure": "Triton ended its process"}


def by_triton(one: dict[str, Any]) -> dict[str, Any]:
    """The result for a variant: see archive.Variant, and its PTX. Raises AssertionError if Triton compiled it in a way
    that the driver cannot launch as we do."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sys.path.insert(0, str(KERNELS))
    file, name = one["kernel"].split(".")
    function = getattr(__import__(f"source.{file}", fromlist=[name]), name)
    arch, constants = one["architecture"], one["constants"]
    signature, aligned = {}, []
    names = [parameter for parameter in function.arg_names if parameter not in constants]
    for parameter, kind in zip(names, one["types"], strict=True):
        index = function.arg_names.index(parameter)
        whole = kind == "i32" and not function.params[index].do_not_specialize
        if kind.startswith("*") or whole:
            aligned.append(index)
        signature[parameter] = kind
    letters = [
        "T" if kind.startswith("tensordesc") else "P" if kind.startswith("*") else "F" if kind == "fp32"
        else "A" if function.arg_names.index(parameter) in aligned else "I" for parameter, kind in signature.items()
    ]
    source = ASTSource(function, *specialised(function, signature, constants, aligned))
    options = {"num_warps": one["warps"], "num_stages": one["stages"], "ptx_version": PTX_OF[arch]}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    meta, ptx = kernel.metadata, kernel.asm["ptx"]
    ptx = re.sub(r"(?m)^\s*//.*\n|\s*//[^\n]*$", "", ptx if isinstance(ptx, str) else ptx.decode())
    assert not getattr(meta, "global_scratch_size", 0) and not getattr(meta, "profile_scratch_size", 0), one["key"]
    if multiplies(one):
        assert MATRIX_UNITS[arch] in ptx or MATRIX_UNITS[80] in ptx, f"{one['key']} does not use the matrix units"
    maps = [
        [m["elem_size"], host_type(m["elem_type"]), m["swizzle"], m["block_size"]]
        for m in getattr(meta, "tensordesc_meta", None) or ()
    ]
    expected, boxes = [], [box for *_, box in maps]
    for letter in letters:
        rank = len(boxes.pop(0)) if letter == "T" else 0
        expected += [128, *[4] * rank, *[8] * rank] if rank else [8] if letter == "P" else [4]
    parameters = parameter_sizes(ptx)
    scratch = len(parameters) - len(expected)
    assert parameters == expected + [8] * scratch, (one["key"], parameters, expected)
    return {
        "key": one["key"], "kernel": one["kernel"], "architecture": architecture_name(arch),
        "name": meta.name, "threads": 32 * meta.num_warps, "shared": meta.shared,
        "arguments": "".join(letters) + "S" * scratch, "maps": maps, "ptx": ptx,
    }


def specialised(function: Any, signature: dict[str, str], constants: dict[str, Any], aligned: list[int]) -> Any:
    """The arguments of ASTSource after the function. Versions of Triton differ in them."""
    try:
        from triton.backends.compiler import AttrsDescriptor
    except ImportError:
        ordered = {name: signature.get(name, "constexpr") for name in function.arg_names}
        return ordered, constants, {(index,): [["tt.divisibility", 16]] for index in aligned}
    data = {"arg_properties": {"tt.divisibility": tuple(aligned), "tt.equal_to": ()}, "cls": "AttrsDescriptor"}
    return signature, constants, AttrsDescriptor.from_dict(data)


def host_type(number: int) -> int:
    """The driver's number of a tile's dtype. Triton's compiler uses other numbers for three of them."""
    return {8: 10, 9: 8, 10: 9}.get(number, number)


def parameter_sizes(ptx: str) -> list[int]:
    """The bytes of each parameter of the kernel in a PTX text, which has one kernel."""
    head = ptx[ptx.index(".entry"):ptx.index("{", ptx.index(".entry"))]
    bits = {"u64": 8, "u32": 4, "s32": 4, "f32": 4, "u8": 1, "s8": 1, "b64": 8, "b32": 4, "s64": 8, "u16": 2, "b8": 1}
    return [
        int(match[3]) if match[3] else bits[match[1]]
        for match in re.finditer(r"\.param(?: \.align \d+)? \.(\w+)(?: \.ptr[^,\n]*?)? (\w+)(?:\[(\d+)\])?", head)
    ]


# --- the archive ------------------------------------------------------------------------------------------------------


def digest() -> str:
    """The digest of the sources: see archive.digest_of_sources."""
    files = sorted((KERNELS / "source").glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes().replace(b"\r\n", b"\n") for path in files)).hexdigest()


def results(files: list[str]) -> list[dict[str, Any]]:
    """The results in these files, in a fixed order. Ends the process with the reasons if any variant failed."""
    found = [one for file in files for one in json.loads(Path(file).read_text())]
    failures = [f"{one['key']} for {one['architecture']}: {one['failure']}" for one in found if "failure" in one]
    if failures:
        sys.exit("\n".join([*failures, f"{len(failures)} of {len(found)} kernels cannot be compiled"]))
    return sorted(found, key=lambda one: (one["architecture"], one["kernel"], one["key"]))


def members(found: list[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the archive's members. The PTX of all variants of a kernel for an architecture is one
    member, which compresses to a fifth of the size of separate ones."""
    texts: dict[str, bytes] = {}
    kernels: dict[str, dict[str, Any]] = {}
    for one in found:
        file, text = f"{one['architecture']}/{one['kernel']}", one["ptx"].encode()
        start = len(texts.setdefault(file, b""))
        texts[file] += text
        kernels.setdefault(one["key"], {})[one["architecture"]] = [
            file, start, len(text), one["name"], one["threads"], one["shared"], one["arguments"], one["maps"]
        ]
    yield "manifest.json", json.dumps({"digest": digest(), "kernels": kernels}, separators=(",", ":")).encode()
    yield from sorted(texts.items())


def pack(files: list[str]) -> None:
    """Write the archive."""
    with zipfile.ZipFile(KERNELS / "kernels.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in members(results(files)):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)
    print(f"{KERNELS / 'kernels.zip'}: {(KERNELS / 'kernels.zip').stat().st_size:,} bytes")


def compare(files: list[str]) -> None:
    """End the process: with status 0 if the archive has these results, otherwise with the names of the members that
    differ."""
    with zipfile.ZipFile(KERNELS / "kernels.zip") as archive:
        there = {name: archive.read(name) for name in archive.namelist()}
    new = dict(members(results(files)))
    different = sorted(name for name in new.keys() | there.keys() if new.get(name) != there.get(name))
    sys.exit(f"kernels.zip differs from its compiled sources in: {', '.join(different)}" if different else 0)


def table(cards: list[str]) -> None:
    """Print a Markdown table for each compute capability, such as "86": the largest numbers of registers, spills and
    shared memory of every kernel, by ptxas."""
    sys.path.insert(0, str(REPOSITORY))
    import triton

    from lib_onediff.devices.cuda.kernels import archive

    tools, total = Path(triton.__file__).parent / "backends" / "nvidia" / "bin", Counter[str]()
    for card in map(int, cards):
        worst: dict[str, list[int]] = {}
        capability = divmod(card, 10)
        for key, by_architecture in archive.manifest().kernels.items():
            serving = [one for one in by_architecture if archive.serves(one, capability)]
            if not serving:
                continue
            found = by_architecture[max(serving, key=archive.number)]
            with tempfile.NamedTemporaryFile(suffix=".ptx") as ptx:
                Path(ptx.name).write_bytes(archive.text_of(found.file)[found.start:found.start + found.bytes])
                command = [tools / ("ptxas-blackwell" if card >= 100 else "ptxas"), "-v", "-o", os.devnull, ptx.name]
                command.append(f"-arch=sm_{card}{'a' if card == 90 else ''}")
                said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            registers = int(re.search(r"Used (\d+) registers", said)[1])
            spills = int(re.search(r"(\d+) bytes spill stores", said)[1])
            row = worst.setdefault(key.split()[0], [0, 0, 0, 0, 0])
            row[:] = [row[0] + 1, max(row[1], registers), row[2] + (spills > 0), max(row[3], spills),
                      max(row[4], found.shared)]
            total["spilling"] += spills > 0
        print(f"\nsm_{card}, {SHARED_OF_CARD[card]} KB of shared memory for a block\n| kernel | variants | registers | "
              "that spill | most spilled, bytes | shared, KB |\n| --- | --- | --- | --- | --- | --- |")
        for name, (count, registers, spilling, spills, shared) in sorted(worst.items()):
            print(f"| {name} | {count} | {registers} | {spilling} | {spills} | {shared / 1024:.0f} |")


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "specify":
        print(json.dumps(specifications()))
    elif command == "compile":
        print(json.dumps(compiled(json.load(sys.stdin))))
    else:
        {"pack": pack, "compare": compare, "table": table}[command](rest)
