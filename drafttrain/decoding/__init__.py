"""Propose, verify, accept, emit, commit: the loop that decodes with drafts, its acceptance rules,
and what is measured of it: tau, speed, costs, and whether the text is the target's own."""
