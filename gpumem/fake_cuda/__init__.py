"""Fake tensors that behave as tensors on a CUDA device do."""
