"""How is one layer computed?

Each set of operators implements model.operators.Operators: torch_ops (the reference), triton/ (our kernels),
quantized/ (eight bits), inductor/ (regions compiled by torch). Imports model/ only.
"""
