"""The REST API, /onediff/v1/...: what the OneDiff tab shows and does, for programs."""
from .routes import add_routes

__all__ = ["add_routes"]
