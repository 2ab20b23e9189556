"""Checkpoints of other programs, turned into checkpoint folders.

`imported` is what every source is turned into, and writes it; `deepspeed_*` read DeepSpeed's folders, from
the names of files to the whole (`deepspeed`); `detect` finds out what a folder is, the one place to add a
source to; `run` is the command. Every file of a source is only read, and never by running what it names.
"""
