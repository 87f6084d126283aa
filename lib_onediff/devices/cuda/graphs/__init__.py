"""How launches become CUDA graphs, and how much GPU memory the graphs may keep.

capture: one graph. segments: graphs between functions of other extensions. recapture: the same graph after its memory
was given back. cache: all graphs, the least recently used go first. accounting: what each one costs. memory_pressure:
who needs GPU memory besides us asks here. Imported by runtime/ only.
"""
