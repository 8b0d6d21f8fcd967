"""Exercises of lesson 25: pages for conversations of many lengths, a loop that does not grow."""

import torch

import labkit as lab
from gpumem.units import MIB, format_bytes
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

PAGE_TOKENS = 16
STEPS, LOSS_STEPS, MOST_RESERVED_BYTES = 40, 4, 320 * MIB
growing = from_notebook("25", "growing", globals())


def conversations(lengths, free_bytes, bytes_per_token):
    free = free_bytes // (PAGE_TOKENS * bytes_per_token)
    served = 0
    for length in sorted(lengths):  # the shortest leave most room for others
        free -= -(-length // PAGE_TOKENS)
        if free < 0:
            break
        served += 1
    return served


def _first_come(lengths, free, pages):
    served = 0
    for length in lengths:
        if pages(length) <= free:
            free -= pages(length)
            served += 1
    return served


def _slips(lengths, free_bytes, bytes_per_token):
    free = free_bytes // (PAGE_TOKENS * bytes_per_token)
    tokens, shortest = free * PAGE_TOKENS, sorted(lengths)
    return {
        _first_come(lengths, free, lambda n: -(-n // 16)): "Who comes first takes a long one?",
        _first_come(shortest, tokens, lambda n: n): "A page that is begun is taken whole.",
        _first_come(shortest, free, lambda n: n // 16): "The last page of each is begun, too.",
        _first_come(shortest, free, lambda n: n // 16 + 1): "16 tokens fill one page, not two.",
    }


@check_of("25-1", conversations)
def check_conversations(answer):
    kib = 32 * 1024  # a token of Llama-3.2-1B
    jobs = (
        ([1600, 160, 160, 160], 110 * 16 * kib, kib),
        ([16, 16, 16], 3 * 16 * kib, kib),
        ([17] * 9, 9 * 17 * kib, kib),
        ([500, 20, 3000, 33, 900, 47], 100 * 16 * kib + 5, kib),
        ([64], 0, kib),
    )
    return checks.expect_results(answer, conversations, jobs, slips=_slips)


def steady(device, users=1024, prompt=8, steps=40):
    from transformers import StaticCache

    torch.manual_seed(0)
    model = lab.model("SmolLM2-tiny", device=device).eval()
    ids = torch.arange(users * prompt, device=device).reshape(users, prompt) % 1000
    cache = StaticCache(config=model.config, max_cache_len=prompt + steps - 1)
    with torch.inference_mode():
        for _ in range(steps):
            logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(dim=-1)
            yield torch.logsumexp(logits, dim=-1).mean()


@check_of("25-2", steady)
def check_steady(answer):
    run, reference = checks.run_both(answer, growing, mode="measure", steps=LOSS_STEPS)
    if problem := checks.same_losses(run, reference):
        return problem.replace("loss", "number")
    run = checks.run_experiment(answer, mode="simulate", gpu="t4", steps=STEPS)
    reserved = format_bytes(run.reserved_bytes)
    if run.reserved_bytes > MOST_RESERVED_BYTES:
        most = format_bytes(MOST_RESERVED_BYTES)
        return f"With {STEPS} tokens your loop reserves {reserved}; {most} are enough."
    return checks.Correct(f"With {STEPS} tokens it reserves {reserved} on a T4.")
