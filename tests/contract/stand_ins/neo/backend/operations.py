"""Neo's layers are torch's, and each has lists of functions for its weight and its bias; there is one norm more."""
from __future__ import annotations

from stand_in_engine import code_of

RMS_NORM = """    class RMSNorm(torch.nn.RMSNorm):
        bias = None
        add = False

        def forward(self, x: Tensor) -> Tensor:
            weight = parameters_of(self, x)[0]
            return functional.rms_norm(x, self.normalized_shape, weight + 1.0 if self.add else weight, self.eps)

"""
code_of(
    "forge/backend/operations.py", globals(), ("Linear(torch.nn.Module)", "Linear(torch.nn.Linear)"),
    ("    class LayerNorm", f"{RMS_NORM}    class LayerNorm"),
    ("        def forward", "        weight_function = bias_function = ()\n\n        def forward"),
)
