"""Answers to lesson 19's exercises."""

from torch.distributed.fsdp import fully_shard

from labkit.exercises.lesson_19 import by_layer

FEWEST = 96  # the right answer to 18-1


def all_layers_at_once(net, **options):
    fully_shard(net.model, **options)


MISTAKES = [
    ("19-1", FEWEST - 8, "23.5 GiB reserved; there are 23.0 GiB"),  # the tensors would fit
    ("19-1", FEWEST + 8, "But 96 GPUs fit, too"),
    ("19-1", FEWEST - 1, "no multiple of 8"),
    ("19-2", all_layers_at_once, "a unit that holds all layers"),
    ("19-2", by_layer, "the target at most 5.50 GiB"),
]
