"""The comparison page: the same images with two settings, how far they are apart, and how long they take."""
