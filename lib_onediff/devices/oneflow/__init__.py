"""The engine that runs our forward as OneFlow graphs (Linux, Python 3.10).

route: the one way in for the runtime. gate: whether OneFlow works here. operators: ours in OneFlow, and its graphs.
"""
