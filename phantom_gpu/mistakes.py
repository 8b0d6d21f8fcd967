"""Name what a program does by mistake, with the line and what to write there instead.

`found` asks one function for each kind once the program has ended.

Limits: a mistake that costs less than `WORTH` of the peak is not named where its price is known.
What a program keeps is judged by the steps and batches that it ran.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from gpumem.trace import Category, Phase
from gpumem.units import format_bytes
from phantom_gpu.allocator_history import (
    LEAST_KEPT_BYTES,
    Block,
    FailedEntry,
    History,
    is_librarys,
)
from phantom_gpu.evidence import LEAST_STEPS, Cost, Evidence, keep
from phantom_gpu.report_records import ENDED_WELL, Mistake, module_name

#: The part of a GPU's peak from which on a mistake is worth a sentence.
WORTH = 1 / 100
_MODULES = torch.nn.modules.module.__file__


@dataclass(frozen=True)
class Run:
    """What `found` is asked about.

    Attributes:
        evidence: what was noted.
        histories: what each GPU's allocator did.
        peak_bytes: the most that was allocated on one GPU.
        ended: as in `phantom_gpu.report_records.ProcessReport`.
        untrained: whether a trainable weight got no gradient.
        recomputes: whether a backward pass has called a module again.
        steps: optimizer steps.
        most_passes: of each class of models, the most that one backward pass has ended.
        rank, local_rank: of a distributed job.
    """

    evidence: Evidence
    histories: Mapping[int, History]
    peak_bytes: int
    ended: str
    untrained: bool
    recomputes: bool
    steps: int
    most_passes: Mapping[str, int]
    rank: int
    local_rank: int

    def worth(self, costs: Mapping[str, Cost]) -> Iterator[tuple[str, str, str]]:
        """Yield line, bytes in words, and text of what costs enough."""
        for line, cost in costs.items():
            if cost.nbytes >= WORTH * self.peak_bytes:
                yield line, format_bytes(cost.nbytes), cost.text


def found(run: Run) -> list[Mistake]:
    """Return the mistakes of a program that has ended."""
    return [mistake for kind in KINDS for mistake in kind(run)]


def evaluates_with_gradients(run: Run) -> Iterator[Mistake]:
    """A pass in evaluation mode, or below `generate`, whose graph no backward pass used."""
    costs: dict[str, Cost] = {}
    for each in run.evidence.passes:
        if not each.used and (each.trained or run.ended in ENDED_WELL):
            what = "Generation" if each.generates else "Evaluation"
            keep(costs, each.line, each.graph_bytes, what)
    for line, nbytes, what in run.worth(costs):
        says = f"{what} stores {nbytes} for a backward pass that never comes."
        yield Mistake("gradients", f"{says} Put it under torch.no_grad().", line)


def keeps_from_step_to_step(run: Run) -> Iterator[Mistake]:
    """A loss whose graph lives on, or what forward passes made, more with each step."""
    grown = [block for history in run.histories.values() for block in history.grown]
    kept = [b for b in grown if b.tag.phase is Phase.FORWARD and b.tag.step < LEAST_STEPS]
    largest = max(kept, key=lambda block: block.nbytes, default=None)
    if sum(block.nbytes for block in kept) >= LEAST_KEPT_BYTES:
        nbytes = format_bytes(sum(block.nbytes for block in kept))
        says = f"Each step keeps {nbytes} that its forward pass made."
        write = "Keep loss.item(), or what you need as .detach().cpu()."
        yield Mistake("kept", f"{says} {write}", _called_at(largest))
    elif run.evidence.kept_losses:
        says = "Each step keeps its loss with its graph"
        nbytes = sum(block.nbytes for block in grown)
        says += f": {format_bytes(nbytes)} on the GPU, and more on the host." if nbytes else "."
        line = _called_at(largest) if largest else run.evidence.kept_losses
        yield Mistake("kept", f"{says} Keep loss.item(), or loss.detach().", line)
    else:
        yield from _keeps_graphs(run)


def _keeps_graphs(run: Run) -> Iterator[Mistake]:
    """Many more passes' graphs at the peak than a backward pass of that model ever ends."""
    costs: dict[str, Cost] = {}
    for history in run.histories.values():
        for (model, phase), held in history.passes_alive().items():
            most = run.most_passes.get(model)
            if phase is Phase.FORWARD and most and len(held) > 2 * most + 1:
                blocks = (b for b in history.peak_blocks if b.kind is Category.ACTIVATIONS)
                block = next(b for b in blocks if (b.tag.model, b.tag.phase) == (model, phase))
                keep(costs, _called_at(block), sum(held), f"{len(held)} forward passes")
    for line, nbytes, passes in run.worth(costs):
        says = f"The graphs of {passes} are alive, {nbytes}, and no backward pass frees them."
        yield Mistake("kept", f"{says} Put them under torch.no_grad().", line)


def collects_in_evaluation(run: Run) -> Iterator[Mistake]:
    """Results of an evaluation's batches that stay on the GPU."""
    costs: dict[str, Cost] = {}
    for history in run.histories.values():
        nbytes, passes, block = history.collected
        if block is not None and block.tag.model not in run.evidence.trains_while_evaluating:
            keep(costs, _called_at(block), nbytes, f" of {passes} batches")
    for line, nbytes, batches in run.worth(costs):
        says = f"Evaluation keeps {nbytes}{batches} on the GPU."
        yield Mistake("collected", f"{says} Move each result to the host: .cpu().", line)
    for line, nbytes, trainer in run.worth(run.evidence.concatenated):
        write = (
            "Give Trainer eval_accumulation_steps=1, or" if trainer else "Move each to the host:"
        )
        write += " preprocess_logits_for_metrics." if trainer else " .cpu()."
        says = f"Evaluation joins its batches' results to {nbytes} on the GPU. {write}"
        yield Mistake("collected", says, line)


def copies_logits(run: Run) -> Iterator[Mistake]:
    """Logits of a whole batch in FP32 beside those in 16 bits."""
    for line, nbytes, shape in run.worth(run.evidence.fp32_logits):
        says = f"The logits {shape} are copied to FP32: {nbytes} more."
        write = "Compute the loss a thousand tokens at a time, each piece under a checkpoint."
        yield Mistake("fp32-logits", f"{says} {write}", line)


def masks_attention(run: Run) -> Iterator[Mistake]:
    """A mask that keeps fused attention away, or that each head has for itself."""
    for line, nbytes, shape in run.worth(run.evidence.scores):
        says = f"With this mask no fused attention runs: all scores {shape} are stored, {nbytes}."
        write = "Repeat keys and values per head, without enable_gqa, and call mask.contiguous()."
        yield Mistake("attention-mask", f"{says} {write}", line)
    for line, nbytes, shape in run.worth(run.evidence.masks):
        says = f"The mask of attention is stored for each row and head, {shape}: {nbytes}."
        write = "Give it as [batch, 1, length, length]: attention itself spreads it over the heads."
        yield Mistake("attention-mask", f"{says} {write}", line)


def optimizes_frozen_weights(run: Run) -> Iterator[Mistake]:
    """States and gradients of weights that are frozen now; weights that never get a gradient."""
    costs: dict[str, Cost] = {}
    for nbytes, line in run.evidence.frozen.values():
        keep(costs, line, nbytes)
    for line, nbytes, _ in run.worth(costs):
        says = f"The optimizer holds {nbytes} of gradients and states of frozen weights."
        write = "Freeze them before it is made, and give it only those with requires_grad."
        yield Mistake("frozen", f"{says} {write}", line)
    if run.evidence.without_gradients:
        return  # which is why
    costs = {}
    for nbytes, count, owner, line in run.evidence.unused.values():
        keep(costs, line, nbytes, f"{count} weights, such as those of {module_name(owner)}")
    for line, nbytes, which in run.worth(costs):
        says = f"The optimizer has {which}, that never get a gradient: {nbytes} for nothing."
        yield Mistake("unused", f"{says} Leave them out, or use them in the loss.", line)


def checkpoints_in_vain(run: Run) -> Iterator[Mistake]:
    """Checkpointing that saves nothing."""
    line, trained = run.evidence.switched_on
    if run.evidence.without_gradients and run.untrained:
        says = "This checkpoint's input wants no gradient: the weights inside get none."
        place = run.evidence.without_gradients
        yield Mistake("checkpointing", f"{says} Write use_reentrant=False.", place)
    elif line and not trained and run.steps and not run.recomputes:
        says = (
            "Checkpointing is switched on, but the model is in evaluation mode: nothing is saved."
        )
        yield Mistake("checkpointing", f"{says} Call model.train() before you train.", line)
    for line, nbytes, _ in run.worth(run.evidence.whole_model):
        says = f"One checkpoint holds the whole model: backward has all of it again, {nbytes}."
        yield Mistake("checkpointing", f"{says} Checkpoint each layer by itself.", line)


def repeats_an_error(run: Run) -> Iterator[Mistake]:
    """A request that failed, was caught by the script, and was made again no smaller. A library may
    catch one, too, and go on in the same call: transformers loads the next weight, FSDP saves it.
    """
    for history in run.histories.values():
        tried: dict[tuple, list[FailedEntry]] = {}
        for entry in history.failures:
            stack = tuple((frame["filename"], frame["line"]) for frame in entry.frames)
            earlier = tried.setdefault(stack, [])
            if not earlier or (
                entry.nbytes >= earlier[0].nbytes  # a smaller batch asks for less
                and (entry.is_scripts or entry.tag.number > earlier[-1].tag.number)
            ):
                earlier.append(entry)
        for entries in tried.values():
            if len(entries) > 1:
                times, asked = len(entries), format_bytes(entries[0].nbytes)
                says = f"An out-of-memory error is caught and repeated: {times} times for {asked}."
                write = "Leave the except block, which holds the failed step, and make it smaller."
                yield Mistake("repeated-error", f"{says} {write}", entries[0].users_line)


def shards_nothing(run: Run) -> Iterator[Mistake]:
    """FSDP with all layers in one unit."""
    for line, nbytes, layer in run.worth(run.evidence.one_unit):
        says = f"FSDP has one unit: each pass gathers all {nbytes} of weights at once."
        write = f"Wrap each {layer}: fully_shard(layer), or FSDP's auto_wrap_policy."
        yield Mistake("one-unit", f"{says} {write}", line)


def fills_the_first_gpu(run: Run) -> Iterator[Mistake]:
    """A rank that takes memory of GPU 0, which is another's."""
    history = run.histories.get(0)
    if not run.local_rank or torch.cuda.device_count() < 2 or history is None:
        return
    blocks = history.peak_blocks
    if blocks:
        largest = max(blocks, key=lambda block: block.nbytes)
        says = f"Rank {run.rank} takes {format_bytes(history.peak.nbytes)} of GPU 0, and a context."
        write = "Call torch.cuda.set_device(local_rank) first, and torch.load with map_location."
        yield Mistake("first-gpu", f"{says} {write}", largest.users_line)


def gathers_a_checkpoint(run: Run) -> Iterator[Mistake]:
    """A full state dict of a sharded model that lies on the GPU."""
    for line, nbytes, _ in run.worth(run.evidence.gathered):
        says = f"The full state dict is gathered on the GPU: {nbytes}."
        write = "Ask for cpu_offload=True (FSDP1: offload_to_cpu=True), or save the shards."
        yield Mistake("full-state-dict", f"{says} {write}", line)


KINDS = (
    evaluates_with_gradients,
    keeps_from_step_to_step,
    collects_in_evaluation,
    copies_logits,
    masks_attention,
    optimizes_frozen_weights,
    checkpoints_in_vain,
    repeats_an_error,
    shards_nothing,
    fills_the_first_gpu,
    gathers_a_checkpoint,
)


def _called_at(block: Block) -> str:
    """Return the line that called the outermost module in which a block was made, if one was."""
    inner = ""
    for frame in reversed(block.frames):
        if frame["filename"] == _MODULES and inner:
            return inner
        if not is_librarys(frame["filename"]):
            inner = f"{frame['filename']}:{frame['line']}"
    return block.users_line
