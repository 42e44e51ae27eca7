"""Directories that inference engines load: one file a layout (`layout.py` says what is in it),
one record an engine (`engines.py`), and every export is checked before it is put in its place."""
