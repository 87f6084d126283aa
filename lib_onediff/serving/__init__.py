"""Serves images to many users from many GPUs.

queue.py: a first-come, first-served queue with retries, which needs no Ray. ray_serve.py: the service over HTTP, with
processes that make images (replicas), by Ray Serve.
"""
