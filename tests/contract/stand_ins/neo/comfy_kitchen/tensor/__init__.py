"""comfy-kitchen's quantized tensors."""
