"""GPUs by name, this machine, CUDA's memory functions."""

#: Set in the environment of a process whose GPU is not there: see `phantom_gpu`.
PHANTOM_VARIABLE = "LABKIT_PHANTOM"
