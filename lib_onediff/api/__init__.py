"""The REST API, /onediff/v1/...: the OneDiff tab's data and actions for programs, and the checks on who may use it.

Use routes.add_routes. Only routes and auth need gradio.
"""
