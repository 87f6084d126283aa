"""How launches become CUDA graphs, and in which memory. Imported by runtime/ only."""
