"""AUTOMATIC1111's WebUI.

adapter: the hook. lora: its lazy merge. controlnet_loop: our blocks inside the loop of sd-webui-controlnet.
"""
