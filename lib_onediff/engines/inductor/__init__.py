"""The engine that has torch.compile's Inductor compile regions of our forward, in helper processes.

plan: which regions at which sizes. compiler: what is compiled and what is still missing. helper: the child process.
disk: compiled code in the cache folder. Imported by engines/operator_sets and runtime/.
"""
