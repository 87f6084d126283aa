"""Serves images to many users from many cards.

queue: a first-come, first-served queue with retries, without Ray. ray_serve: warm replicas and HTTP, by Ray Serve.
"""
