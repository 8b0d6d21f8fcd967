"""Answers to lesson 11's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_11 import frugal, roomy

KEEP_NOTHING = ("budget = 0.5", "budget = 0")
NO_PRODUCT_TWICE = ("budget = 0.5", "budget = 0.75")
NOT_COMPILED = ('        block.compile(backend="aot_eager_decomp_partition")\n', "        pass\n")
CHECKPOINTED = ("block(x)", "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)")
NO_BACKWARD = ("        loss.backward()\n", "")

RIGHT = [
    ("11-2", changed(frugal, ("budget = 0.5", "budget = 0.3"))),
    ("11-2", changed(frugal, ('backend="aot_eager_decomp_partition"', "dynamic=False"))),
]
MISTAKES = [
    ("11-1", 18, "two bytes, not four"),
    ("11-1", 4.5, "one row"),
    ("11-1", 9 / 32, "one layer"),
    ("11-1", 7, "The norm drops a tensor, too"),
    ("11-1", 16, "stays at the default"),
    ("11-1", 9.664, "in GB"),
    ("11-2", changed(frugal, NOT_COMPILED), "what does backward still find"),
    ("11-2", changed(frugal, NO_PRODUCT_TWICE), "what does backward still find"),
    ("11-2", changed(frugal, KEEP_NOTHING), "what is computed twice"),
    ("11-2", changed(roomy, CHECKPOINTED), "what is computed twice"),
    ("11-2", changed(roomy, NO_BACKWARD), "it should still be"),
]
