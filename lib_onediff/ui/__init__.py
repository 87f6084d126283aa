"""OneDiff's parts of the WebUI's page. Works with gradio 3.41.2, 4.40 and 6."""
