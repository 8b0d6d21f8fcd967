"""The phantom GPU: PyTorch's own CUDA code on a GPU that is not there."""
