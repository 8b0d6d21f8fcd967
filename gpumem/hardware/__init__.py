"""GPUs by name, this machine, CUDA's memory functions."""
