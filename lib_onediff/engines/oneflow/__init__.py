"""The engine that runs our forward as OneFlow graphs (Linux, Python 3.10 and older).

route: the one way in for the runtime. gate: whether OneFlow works here; probe is the child process that tries.
graphs: one compiled graph a shape. operators: our operators in OneFlow.
"""
