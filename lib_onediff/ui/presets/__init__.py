"""The presets page: settings under a name."""
