"""TRL: its trainers on sharded models. They are transformers' Trainers, so little is left to do here.

Modules, in the order in which they may import one another:
    upstream     every name of TRL's that is rebound
    bodies       what stands in for them
    rebinding    puts ours under TRL's names, when one of its trainers makes an Accelerator of ours
"""
