"""What launches our kernels, a file for each family of them, and the operators of the native backend."""
