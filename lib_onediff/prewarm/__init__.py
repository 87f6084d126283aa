"""Pre-warming: makes shapes ready between generations, before an image needs them. worker: the jobs of sizes, which
are done one after the other."""
