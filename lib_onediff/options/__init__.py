"""How are options written? As presets, in an infotext, as axes of a grid; core.settings defines each of them once."""
