"""How do shapes become ready between generations?

queue: what was asked for. worker: makes one after the other. idle: only while nobody generates. presets: what to
ask for. Imports runtime/ and everything below.
"""
