"""Checkpoints: the folder format, saving and loading, Hugging Face export.

Order of imports, lowest first: `durable` (new files), `writer_process`, `host_copy`, `background`, `pending`
and `saves` (saves beside the training), `elements` (bytes), `rng`, `folders`, `safetensors_io` (one file),
`records` (of the index), `extra` (the user's own state), `own_files` (names that saves write), `manifest`
(the index of a folder), `staging` (how a folder gets into its place), `tags` (several in one), `format`
(reading a folder by name and range), `inspection` (a folder as a table), `hf`
(what a Hugging Face folder needs), `full_weights` (whole weights of a running engine), `parts` (what of an
engine goes into a checkpoint), `averages`, `stored_weights`, `fits`, `comparing`, `reading` and `opened`
(loading), `save`. Whole weights for others: `streamed` (a tensor chunk by chunk), `output_file`,
`torch_archive`, `export_selection` (names), `weight_files`, `export_target` (the folder), `export`,
`consolidate`, `sixteen_bit`. Files of others: `restricted_pickle`, `importers`. Up to `format` nothing knows
what a bucket is.
"""
