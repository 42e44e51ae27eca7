"""Settings: composed, checked, built, and kept as they were composed. Hydra is imported only in
this room."""
