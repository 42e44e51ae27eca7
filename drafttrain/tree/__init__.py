"""Token trees: their shapes, how a drafter's candidates fill them, the search for the best one, and
merging those of several drafters."""
