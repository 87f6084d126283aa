"""DeepCache (Ma et al. 2023): most steps compute the outer stages alone, around a deep feature of an earlier step."""
