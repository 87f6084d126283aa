"""What all rooms speak: refusals, samplings, and the protocols of what can be added."""
