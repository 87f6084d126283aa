"""How is one layer computed?

Each set of operators implements model.operators.Operators: torch_ops (the reference), triton/ (our kernels),
quantized/ (eight bits). Imports model/ only.
"""
