"""The comparison page: the same generation by two sides, with how far the images are apart."""
