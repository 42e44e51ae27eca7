"""A report as one HTML page without scripts: its parts, and their drawings as SVG.
`document.py` puts it together; `run.py` has the part of one run."""
