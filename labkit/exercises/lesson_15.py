"""Exercises of lesson 15: what adapters cost on paper, and the real model adapted in 1 GiB."""

import torch

from gpumem.models.catalogue import checkpointing, pretrained
from gpumem.models.text import batches
from gpumem.runs import Run
from gpumem.units import GIB, format_bytes
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

GPU, MOST_BYTES = "l4", GIB
LLAMA_WEIGHTS = 8_030_261_248  # of Llama-3.1-8B
LONG = {"batch_size": 8, "seq_len": 512, "dtype": torch.bfloat16}
# The real run, for its losses: the learner's own step on a CPU, in seconds.
SHORT = {"batch_size": 8, "seq_len": 16, "dtype": torch.float32}
roomy = from_notebook("15", "roomy", globals())


def adapter_bytes():
    width, narrow, rank, layers = 4096, 8 * 128, 16, 32
    q = o = rank * (width + width)  # A is rank × inputs, B is outputs × rank
    k = v = rank * (width + narrow)
    trained = layers * (q + k + v + o)
    return 16 * trained  # weight 4, gradient 4, AdamW's two moments 8


@check_of("15-1", adapter_bytes)
def check_adapter_bytes(answer):
    right = adapter_bytes()
    all_wide = right * 4 * 8192 // 26624  # as if k and v had 4096 outputs
    slips = {
        right // 16: "That is how many numbers are trained. How many bytes does each cost?",
        right // 4: "Those are the adapters themselves. Training needs gradients and states too.",
        right // 2: "That is AdamW's state alone, or weights and gradients alone. Add the rest.",
        all_wide: "Keys and values have 8 heads of 128, so k and v have 1024 outputs, not 4096.",
    }
    if problem := checks.expect_number(
        answer, right, rel_tolerance=0.01, unit="bytes", slips=slips
    ):
        return problem
    return checks.Correct(
        f"That is right: {format_bytes(right)}, beside {format_bytes(2 * LLAMA_WEIGHTS)} of frozen "
        f"weights in BF16. Training them all takes {format_bytes(8 * LLAMA_WEIGHTS)}, activations "
        "not counted."
    )


def thrifty(device, batch_size=8, seq_len=512, dtype=torch.bfloat16, steps=2):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model, tokenizer = pretrained("SmolLM2-135M", device=device, dtype=dtype)
    checkpointing(model)  # takes the layers' activations
    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    rows = {"batch_size": batch_size, "seq_len": seq_len, "tokenizer": tokenizer}
    for ids in batches(device=device, steps=steps, **rows):
        total = 0
        for part in ids.chunk(4):  # a quarter of the logits; the gradients that wait are tiny
            loss = model(input_ids=part, labels=part).loss / 4
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        yield total


@check_of("15-2", thrifty)
def check_thrifty(answer):
    run = checks.run_experiment(answer, mode="simulate", gpu=GPU, steps=1, **LONG)
    if problem := checks.memory_target(run, MOST_BYTES):
        return f"{problem} {next_step(run)}"
    problem = checks.same_losses(*checks.run_both(answer, roomy, mode="measure", steps=2, **SHORT))
    return problem or checks.Correct(f"That is right: {format_bytes(run.peak_bytes)}, same losses.")


def next_step(run: Run) -> str:
    """What to look at next, by what the peak is made of."""
    if run.bytes_of("activations") > 2 * run.bytes_of("temporary"):  # else they are mostly logits
        return (
            "Much of that is the adapters' inputs, copied to FP32. Does every layer have to keep "
            "all of it until backward?"
        )
    if run.bytes_of("gradients") + run.bytes_of("optimizer") > GIB // 4:
        return "Freeze the pretrained weights: their gradients and states need not exist."
    return "A good part belongs to the loss: must the logits of all rows be there at once?"
