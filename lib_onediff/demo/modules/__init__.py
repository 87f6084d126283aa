"""The part of the WebUI's `modules` API that scripts/onediff.py and this host use, in A1111 1.10.1's names and shapes.

The host imports these modules as a part of lib_onediff; registration.py makes the same objects importable as top-level
`modules`, which is how scripts know them. Scripts read and set attributes of these modules (shared.opts,
shared.sd_model, scripts.scripts_txt2img), so the host's state lives in them: the API leaves no other place.
"""
