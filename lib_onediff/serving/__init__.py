"""How do many users get images from many cards?

groups: which requests are made together, and by whom; knows no Ray. ray_serve: replicas that start warm, and HTTP.
"""
