"""PyTorch's caching allocator: a model of it, replays of traces through it, library workspaces."""
