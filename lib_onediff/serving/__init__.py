"""How do many users get images from many cards?

queue: who is served next, and how often it is tried; knows no Ray. ray_serve: replicas that start warm, and HTTP.
"""
