"""Every way to cut a product in int8, at SDXL's shapes: python tests/gpu/tune_int8.py. For those who choose candidates.
"""
from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product as combinations
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib_onediff.model.low_bit import NORMED
from lib_onediff.ops.attention_tuning import time_on_gpu
from lib_onediff.ops.quantized import int8_mm
from lib_onediff.ops.quantized.gains import Product
from lib_onediff.ops.quantized.tuning import factors
from lib_onediff.ops.triton.launch_config import INT8_PRODUCT_HOPPER, PORTABLE_PRODUCTS

SHAPES = [
    (2048, 1280, 10240), (2048, 5120, 1280), (2048, 1280, 3840), (2048, 1280, 1280), (8192, 640, 5120),
    (8192, 2560, 640), (8192, 640, 1920),
]
# Sums of the largest values stay in the range of float16.
SCALE = 1e-4
# Beside the candidates.
FURTHER = [
    *((1, 128, 256, 128, group, 8, stages, 1) for group, stages in combinations((1, 4, 16), (3,))),
    (1, 128, 256, 128, 8, 8, 4, 1), (2, 128, 256, 128, 8, 8, 4, 1), (2, 256, 128, 128, 8, 8, 3, 1),
    (1, 128, 256, 64, 8, 8, 4, 1), (1, 128, 128, 64, 8, 4, 4, 2),
    (1, 128, 128, 128, 8, 8, 2, 2), (1, 128, 128, 256, 8, 8, 2, 1), (2, 128, 128, 128, 8, 8, 3, 1),
    (1, 64, 128, 128, 8, 4, 3, 2), (1, 64, 256, 128, 8, 4, 2, 2), (0, 128, 256, 128, 8, 8, 4, 1),
    (0, 128, 128, 128, 8, 4, 2, 1), (0, 64, 128, 128, 8, 4, 3, 1), (0, 64, 256, 128, 8, 4, 3, 1),
    (0, 128, 256, 64, 8, 8, 4, 1), (0, 256, 128, 128, 8, 8, 3, 1),
]


def main() -> None:
    device, dtype = torch.device("cuda"), torch.float16
    configs = list(dict.fromkeys((*INT8_PRODUCT_HOPPER.candidates, *PORTABLE_PRODUCTS, *FURTHER)))
    works, problems = [], {}

    def compiled(config: tuple[int, ...]) -> None:
        try:
            with torch.cuda.device(device):
                int8_mm.product(*factors(Product(256, 256, 256, NORMED), device), None, dtype, config)
                torch.cuda.synchronize()
            works.append(config)
        except Exception as error:
            problems[config] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"

    compiled(configs[0])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compiled, configs[1:]))
    for config, problem in problems.items():
        print(config, problem)
    for rows, width, out in SHAPES:
        tokens, weight, bias = (
            torch.randn(shape, device=device, dtype=dtype) for shape in ((rows, width), (out, width), (out,))
        )
        library = time_on_gpu(partial(torch.nn.functional.linear, tokens, weight, bias)) * 1e3
        pair, found, wrong = factors(Product(rows, width, out, NORMED), device), [], []
        pair[0].scales.fill_(SCALE)
        expected = (pair[0].values.double() @ pair[1].values.double().t() * SCALE).float()
        for config in configs:
            if config in works:
                try:
                    output = int8_mm.product(*pair, None, dtype, config)
                    error = float((output.float() - expected).norm() / expected.norm())
                    if not error < 1e-3:
                        wrong.append((config, error))
                    found.append((time_on_gpu(partial(int8_mm.product, *pair, bias, dtype, config)) * 1e3, config))
                except Exception as problem:
                    wrong.append((config, str(problem)[:100]))
        print(f"\n{rows}x{width}x{out}: library {library:.1f} us; int8", *(
            f"{us:.1f} {config}" for us, config in sorted(found)[:14]
        ), "wrong:", wrong, sep="\n  ")
        print("  slowest", max(found))


if __name__ == "__main__":
    main()
