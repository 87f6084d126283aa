"""Which options are there, and what does each do?

settings holds every option once; the settings tab, infotext, API, XYZ axes and docs derive from it. Imports no other
room.
"""
