"""The optimizer side: the user's own optimizer, run on this rank's slices."""
