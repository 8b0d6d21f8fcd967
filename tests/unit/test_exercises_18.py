"""Lesson 18's exercises: the stub, the solution, and the mistakes people make."""

import pytest
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_18 import by_layer, cut

FEWEST = 96  # what the solution finds

test_stub_and_solution = stub_and_solution("18")


def refused(id, answer):
    outcome = lab.exercise(id).check(answer)
    assert outcome.status is Status.NOT_YET
    return outcome.message


# --- 1: the fewest GPUs --------------------------------------------------------------------------


def test_too_few_are_told_what_each_needs():
    assert "23.5 GiB, and 23.0 GiB can be had" in refused("18-1", FEWEST - 8)  # tensors would fit
    assert "more are needed" in refused("18-1", 64)


def test_too_many_are_told_so():
    assert "one machine less" in refused("18-1", FEWEST + 8)
    assert "far too many" in refused("18-1", 4096)


@pytest.mark.parametrize("answer", ["96", 0, -8, 95.5, True, [96], float("nan"), "many"])
def test_what_is_no_number_of_gpus(answer):
    assert "A number of GPUs is asked for" in refused("18-1", answer)


def test_machines_are_full():
    assert "do not fill machines of 8" in refused("18-1", FEWEST - 1)


# --- 2: smaller units ----------------------------------------------------------------------------


def all_layers_at_once(net, **options):
    from torch.distributed.fsdp import fully_shard

    fully_shard(net.model, **options)


def each_layer_and_the_embedding(net, **options):
    from torch.distributed.fsdp import fully_shard

    by_layer(net, **options)
    fully_shard(net.model.embed_tokens, **options)


def never_dropped(net, **options):
    cut(net, **options | {"reshard_after_forward": False})


def every_matrix(net, **options):
    import torch
    from torch.distributed.fsdp import fully_shard

    for part in net.modules():
        if isinstance(part, torch.nn.Linear | torch.nn.Embedding):
            fully_shard(part, **options)


def test_stub():
    assert lab.exercise("18-2").check(lambda net, **options: None).status is Status.NOT_ATTEMPTED


def test_one_unit_gathers_all():
    assert "a unit that holds all layers" in refused("18-2", all_layers_at_once)


@pytest.mark.parametrize("answer", [by_layer, each_layer_and_the_embedding, never_dropped])
def test_units_that_are_too_large(answer):
    assert "the target at most 5.50 GiB" in refused("18-2", answer)


def test_other_small_units_are_right_too():
    assert lab.exercise("18-2").check(every_matrix).status is Status.CORRECT


def test_an_error_of_the_answer_is_shown():
    def broken(net, **options):
        raise KeyError("layers")

    assert "KeyError" in refused("18-2", broken)
