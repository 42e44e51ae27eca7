"""Packages, the folders that runs make for decoding: written, checked, read, compared.
`manifest.py` lists their files; `hf_generate.py` decodes with one from inside transformers."""
