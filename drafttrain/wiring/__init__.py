"""Settings: composed, checked, built. Hydra is imported in this room and in the doors, nowhere
deeper."""
