"""CIELAB: lightness and colour as people see them."""
from __future__ import annotations

import torch
from torch import Tensor

# IEC 61966-2-1 (sRGB): the matrix from linear sRGB to CIE XYZ under D65, and D65's own XYZ (CIE 15, 2 degrees).
TO_XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))
WHITE_XYZ = (0.95047, 1.0, 1.08883)
# CIE 15: where L* changes from a cube root to a straight line.
KNEE, SLOPE, OFFSET = 0.008856, 7.787, 16 / 116


def lab_of(pixels: Tensor) -> Tensor:
    """sRGB from 0 to 1 as CIELAB under D65 (CIE 1976): L* from 0 to 100, then a* and b*, in the last dimension."""
    linear = torch.where(pixels > 0.04045, ((pixels + 0.055) / 1.055).pow(2.4), pixels / 12.92)
    xyz = linear @ pixels.new_tensor(TO_XYZ).T / pixels.new_tensor(WHITE_XYZ)
    x, y, z = torch.where(xyz > KNEE, xyz.clamp_min(KNEE).pow(1 / 3), SLOPE * xyz + OFFSET).unbind(-1)
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), dim=-1)
