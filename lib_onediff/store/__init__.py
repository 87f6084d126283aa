"""What outlives the process?

store: one SQLite file in the cache folder, named by ONEDIFF_CACHE. connection: how it is opened, and what its errors
mean. history: what was used, found and chosen. machine: the fingerprint under which findings hold. compiler_caches:
files that compilers keep. private_folder: where compiled code lies if others can write into the cache folder. Imports
ops/ and shapes/.
"""
