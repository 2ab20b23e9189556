"""The only callers of `torch.distributed` collectives, and the count of what they send."""
