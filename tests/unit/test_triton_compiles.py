"""Our kernels are compiled for real GPUs, as Triton does it without one: each once for a network, none for a size."""
from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from grid import first

pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("diffusers")


from lib_onediff.devices.cuda.kernels.launch_config import INT8_PRODUCT, INT8_PRODUCT_HOPPER
from lib_onediff.devices.cuda.low_bit.float8 import too_old
from lib_onediff.devices.cuda.requirements import triton_here
from lib_onediff.weights.low_bit import INT8

REPOSITORY = Path(__file__).parents[2]
# More rows than one axis of a launch holds, one picture, sides that are odd when halved, a small one; then the rest of
# the twelve of the benchmark.
SDXL_SIZES = first(3, [
    (2048, 2048, 16), (1152, 896, 1), (960, 720, 2), (72, 88, 3), (1024, 1024, 2), (832, 1216, 2), (1216, 832, 2),
    (896, 1152, 2), (768, 1344, 2), (1344, 768, 2), (640, 1536, 2), (1536, 640, 2), (1280, 1280, 2), (512, 512, 8),
])
SD1_SIZES = first(2, [(960, 720, 1), (72, 88, 2), (1024, 1024, 8), (512, 512, 2), (64, 64, 2)])
needs_int8_of_turing = pytest.mark.skipif(
    too_old(INT8, (7, 5), "RTX 20", triton_here()) is not None, reason="this Triton does not reach its INT8 units"
)
NETWORKS = [
    pytest.param("sdxl", 90, "float16", SDXL_SIZES, "", 8, id="SDXL on an H100"),
    pytest.param("sd15", 75, "bfloat16", SD1_SIZES, "", 8, id="SD1.5 in bfloat16 on an RTX 20"),
    pytest.param("sdxl", 89, "float16", SDXL_SIZES[:2], "fp8", 8 + 6, id="fp8 on an RTX 40"),
    pytest.param(
        "sdxl", 90, "float16", SDXL_SIZES[:2], "int8", 8 + len(INT8_PRODUCT_HOPPER.candidates), id="int8 on an H100"
    ),
    pytest.param(
        "sd15", 75, "float16", SD1_SIZES[:2], "int8", 8 + len(INT8_PRODUCT.candidates), id="int8 on an RTX 20",
        marks=needs_int8_of_turing,
    ),
]


@pytest.mark.skipif(sys.platform == "win32", reason="Triton for Windows is not asked to compile for another machine")
@pytest.mark.parametrize(("name", "capability", "dtype", "sizes", "kind", "least"), first(1, NETWORKS))
def test_the_kernels_of_a_network_serve_every_size(
    name: str, capability: int, dtype: str, sizes: list[tuple[int, int, int]], kind: str, least: int,
    tmp_path: Path,
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))
    environment |= {"PYTHONPATH": found, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, Path(__file__).with_name("compile_without_gpu.py"), name, str(capability), dtype]
    command += [json.dumps(sizes), kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts.pop("beforehand") >= least, "every kernel was compiled for the first time"
    assert len(counts) == len(sizes) and set(counts.values()) == {0}, counts


KERNELS = REPOSITORY / "lib_onediff" / "devices" / "cuda"


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.name)
def test_what_is_not_to_be_specialised_is_a_parameter(path: Path) -> None:
    """Triton ignores a name that is none, and compiles the kernel anew for the numbers that it finds special."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            calls = [decorator for decorator in function.decorator_list if isinstance(decorator, ast.Call)]
            given = [word.value for call in calls for word in call.keywords if word.arg == "do_not_specialize"]
            names = {name for value in given for name in ast.literal_eval(value)}
            assert names <= {argument.arg for argument in function.args.args}, function.name
