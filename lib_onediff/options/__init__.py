"""Which options are there, what does each do, and what may be combined?

settings holds every option once; the settings tab, infotext, API, XYZ axes and docs derive from it. Imports shapes/,
ops/ and model/.
"""
