"""Prepares residuals (core.operators.Residual) for kernels that do not take residuals of every form."""
from __future__ import annotations

from torch import Tensor

from ....core.operators import Residual
from ...torch import operators as torch_ops
from . import rounding


def contiguous(residual: Residual) -> Residual:
    """The same residual with contiguous tokens and a contiguous update, each copied only if it is not contiguous. The
    update may be None."""
    update = None if residual.update is None else residual.update.contiguous()
    return residual._replace(tokens=residual.tokens.contiguous(), update=update)


def updated(residual: Residual) -> Residual:
    """The residual with its update added to the tokens, after the update's scales, norm and gate were applied. The
    biases are not added, and stay. Adds to the tokens in place, so the given residual must not be used afterwards;
    tokens that are not contiguous are copied. A residual without an update is returned as it is."""
    update = residual.update
    if update is None:
        return residual
    tokens = residual.tokens.contiguous()
    factor = residual.update_scales
    if residual.norm is not None:
        unbiased = Residual(tokens, None, None, update.contiguous(), *residual[4:])
        dtype = update.dtype if residual.gate is None else residual.gate.dtype
        if rounding.has_norm_kernel(unbiased, None, None, None, dtype):
            rounding.add_update(unbiased, dtype)
        else:
            tokens.copy_(torch_ops.materialize(unbiased))
        return without_update(residual, tokens)
    if residual.gate is not None:
        if factor is not None:
            update = update * factor
        factor = residual.gate[:, None]
    if factor is None:
        tokens.add_(update)
    else:
        tokens.addcmul_(update, factor)
    return without_update(residual, tokens)


def without_update(residual: Residual, tokens: Tensor) -> Residual:
    """A residual with these tokens and the biases of the given residual, without update, scales, gate and norm."""
    return residual._replace(tokens=tokens, update=None, update_scales=None, gate=None, norm=None)
