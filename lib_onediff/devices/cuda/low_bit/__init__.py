"""Linear layers and self attention in eight bits.

scaled_mm, int8_mm: the matrix products. support: which GPUs have them. kernels: what quantizes tokens. gains: for which
layers it is faster, measured on this GPU; tuning: how int8's are cut. operators: the set that uses them.
int8_attention, attention_gains: attention, and where it is faster.
"""
