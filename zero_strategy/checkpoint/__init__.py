"""Checkpoints: the folder format, saving and loading, Hugging Face export.

Order of imports, lowest first: `elements` (bytes), `safetensors_io` (one file), `records` and `manifest` (the
index of a folder), `extra` (the user's own state), `format` (reading a folder by name and range; the names
of all of the above), `save_load`, `hf`, `consolidate`. Nothing here knows what a bucket or a gradient is.
"""
