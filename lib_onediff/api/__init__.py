"""The REST API, /onediff/v1/...: what the OneDiff tab shows and does, for programs. And who may send a request at all.

routes: add_routes; it needs gradio, as auth does, and nothing else here.
"""
