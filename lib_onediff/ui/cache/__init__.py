"""The cache page: a table of shapes with chart and totals, pre-warm and purge."""
