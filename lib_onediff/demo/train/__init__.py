"""How is emoji-sd made, the small model that the demo draws with?

Run it with `python -m lib_onediff.demo.train`; README.md beside this file has the plan of a whole training.
"""
