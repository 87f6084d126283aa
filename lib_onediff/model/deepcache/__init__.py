"""DeepCache (Ma et al. 2023): most sampling steps compute the outer stages alone, around an earlier deep feature."""
