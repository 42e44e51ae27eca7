"""Directories that inference engines load: one file a layout, in which writing, checking and
reading stand beside each other.

Each layout's file says what it was read from. An engine decides by names and numbers in these
files, and most of what is wrong there goes unnoticed until hardly a draft is accepted; so
everything written is checked before it is put in its place.
"""
