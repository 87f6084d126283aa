"""Captures launches as CUDA graphs in shared memory pools. capture: the GraphMaker. segments: graphs of one forward."""
