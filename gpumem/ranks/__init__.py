"""One experiment on several ranks, each in its own process."""
