"""Prompts, conversations that a target wrote, and training batches of them.

The sets and the folders in which they grow are written and read here; no model is needed.
"""
