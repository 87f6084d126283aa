"""What the WebUI's user sees of OneDiff. Works with gradio 3.41.2, 4.40 and 6."""
