"""How do shapes become ready between generations?

worker: the queue, of which one after the other is made.
"""
