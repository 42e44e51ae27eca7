"""What doors are asked for: their own settings, checked without torch. Those of `fit` and
`evaluate` are in these rooms."""
