"""The backend that runs our forwards as OneFlow graphs (Linux, Python 3.10).

route: the backend. gate: finds out whether OneFlow works here. operators: the operators in OneFlow, and its graphs.
"""
