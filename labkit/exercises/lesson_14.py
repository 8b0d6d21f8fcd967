"""Lesson 14's exercises: the bytes of block-wise states, and states in 8 bits of small tensors."""

import torch

import labkit as lab
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

STEPS, MOST_PEAK, NOISE = 20, 0.7, 0.02
heavy = from_notebook("14", "heavy", globals())


def state_bytes(sizes):
    small = sum(size for size in sizes if size < 4096)  # both moments in 32 bits
    large = [size for size in sizes if size >= 4096]
    blocks = sum(-(-size // 256) for size in large)  # rounded up: the last may be shorter
    return 8 * small + 2 * (sum(large) + 4 * blocks)  # each moment: its bytes, and its scales


def _slips(sizes):
    right, every = state_bytes(sizes), sum(sizes)
    blocks = sum(-(-size // 256) for size in sizes if size >= 4096)
    whole = sum(size // 256 for size in sizes if size >= 4096)
    return {
        8 * every: "That is 32-bit AdamW.",
        right - 8 * blocks: "The scales are missing: each block has one for each moment.",
        right - 4 * blocks: "Each of the two moments has scales of its own.",
        right - 8 * (blocks - whole): "The last block of a tensor may be shorter, and has a scale.",
        2 * every + 8 * sum(-(-size // 256) for size in sizes): "Which tensors keep 32 bits?",
    }


@check_of("14-1", state_bytes)
def check_bytes(answer):
    jobs = (([1_048_576],), ([1_048_576, 3000, 4095],), ([4096, 4097, 5000],))
    return checks.expect_results(answer, state_bytes, jobs, slips=_slips, rel_tolerance=1e-6)


def light(device, steps=20):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    shape = {"vocab_size": 256, "layers": 12, "hidden_size": 48, "intermediate_size": 80}
    model = lab.model("SmolLM2-tiny", device=device, **shape)
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=1024)
    for ids in lab.batches(device=device, batch_size=1, seq_len=16, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@check_of("14-2", light)
def check_light(answer):
    run, reference = checks.run_both(answer, heavy, mode="measure", steps=STEPS)
    if problem := checks.memory_target(run, int(MOST_PEAK * reference.peak_bytes)):
        return problem
    if problem := checks.same_start(run.losses[0], reference.losses[0]):
        return problem
    ours, theirs = (sum(each.losses[-5:]) / 5 for each in (run, reference))
    if not ours / theirs - 1 <= NOISE:  # also true of NaN
        return f"Your last losses are {ours:.4g} on average, the original's {theirs:.4g}."
    return None
