"""Exercises of lesson 07: a factor that corrects the mean of means, 64 rows in little memory."""

import torch

import labkit as lab
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

MOST_PEAK = 0.25
ragged = from_notebook("07", "ragged", globals())
all_rows = from_notebook("07", "all_rows", globals())


def factor(piece_tokens, batch_tokens, pieces):
    return pieces * piece_tokens / batch_tokens


def _slips(piece_tokens, batch_tokens, pieces):
    """Sentences by the number that a mistake gives; the right number wins over them."""
    return {
        piece_tokens / batch_tokens: "accelerate divides by the number of pieces after you.",
        batch_tokens / (pieces * piece_tokens): "Upside down: should a long piece count less?",
        piece_tokens / (pieces * batch_tokens): "That divides by the number of pieces twice.",
        1: "That leaves the mean of means.",
        pieces: "Now every piece counts fully, whatever it holds.",
    }


@check_of("07-1", factor)
def check_factor(answer):
    jobs = [(1000, 1030, 4), (10, 1030, 4), (256, 512, 2), (96, 1024, 8)]
    return checks.expect_results(answer, factor, jobs, slips=_slips)


def in_pieces(device, batch_size=64, steps=3):
    torch.manual_seed(0)
    model = lab.model("SmolLM2-tiny", device=device, vocab_size=256, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids in lab.batches(device=device, batch_size=batch_size, seq_len=64, steps=steps):
        labels = ragged(ids)  # of the whole batch: pieces would be told other lengths
        n = (labels[:, 1:] != -100).sum()
        total = 0.0
        for some, theirs in zip(ids.split(4), labels.split(4), strict=True):
            loss = model(input_ids=some, labels=theirs, num_items_in_batch=n).loss
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        yield total


@check_of("07-2", in_pieces)
def check_in_pieces(answer):
    run, reference = checks.run_both(answer, all_rows, mode="measure", batch_size=64, steps=2)
    if problem := checks.same_losses(run, reference):
        return (
            f"{problem} Are the labels made before the batch is cut, is each piece weighted by its "
            "own, and is there one single step?"
        )
    if problem := checks.memory_target(run, int(MOST_PEAK * reference.peak_bytes)):
        if run.bytes_of("activations") <= 0.75 * reference.bytes_of("activations"):
            return f"{problem} The piece sets the peak."
        return f"{problem} A sum of losses keeps every piece's graph alive, unless it is detached."
    share = run.peak_bytes / reference.peak_bytes
    return checks.Correct(
        f"That is right: {share:.0%} of the peak, and the same losses after every update."
    )
