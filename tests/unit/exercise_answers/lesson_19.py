"""Answers to lesson 19's exercises."""

from torch.distributed.fsdp import fully_shard

from labkit.exercises.lesson_19 import by_layer, cut

FEWEST = 104  # the right answer to 19-1; what streams keep apart counts


def all_layers_at_once(net, **options):
    fully_shard(net.model, **options)


def root_by_layer(net, **options):
    by_layer(net, **options)
    fully_shard(net, **options)


def root_as_well(net, **options):
    cut(net, **options)
    fully_shard(net, **options)


RIGHT = [("19-2", root_as_well)]
MISTAKES = [
    ("19-1", FEWEST - 8, "23.8 GiB reserved; there are 23.0 GiB"),  # the tensors would fit
    ("19-1", FEWEST + 8, "it is not the fewest"),
    ("19-1", FEWEST - 1, "no multiple of 8"),
    ("19-2", all_layers_at_once, "a unit that holds all layers"),
    ("19-2", by_layer, "the target at most 5.50 GiB"),
    ("19-2", root_by_layer, "the target at most 5.50 GiB"),
]
