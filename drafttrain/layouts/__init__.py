"""Directories that inference engines load: one file a layout, which says how it is written, checked
and read; one record an engine (`engines.py`), which says what it loads and how it is started.

Each layout's file says what it was read from. An engine decides by names and numbers in these
files, and most of what is wrong there goes unnoticed until hardly a draft is accepted; so
everything written is checked before it is put in its place.
"""
