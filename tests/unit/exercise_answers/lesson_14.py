"""Answers to lesson 14's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_14 import light, state_bytes

ALL_LARGE = [("size < 4096", "False"), ("size >= 4096", "True")]
FLOOR = ("-(-size // 256)", "size // 256")
ADAFACTOR = "torch.optim.Adafactor(model.parameters(), lr=0.1)"
EIGHT_BITS = "bnb.optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=1024)"
RIGHT = [
    ("14-2", changed(light, ("=1024", "=2304"))),
    ("14-2", changed(light, (EIGHT_BITS, ADAFACTOR))),  # another optimizer, a lower loss
]
MISTAKES = [
    ("14-1", changed(state_bytes, ("4 * blocks", "0 * blocks")), "scales are missing"),
    ("14-1", changed(state_bytes, ("4 * blocks", "2 * blocks")), "Each of the two moments"),
    ("14-1", lambda sizes: 8 * sum(sizes), "32-bit AdamW"),
    ("14-1", changed(state_bytes, *ALL_LARGE), "Which tensors keep 32 bits"),
    ("14-1", changed(state_bytes, FLOOR), "may be shorter"),
    ("14-2", changed(light, ("lr=1e-3", "lr=1e-5")), "Your last losses are"),
    (
        "14-2",
        changed(light, (", min_8bit_size=1024", "")),
        "largest part of your peak is optimizer",
    ),
    ("14-2", changed(light, ("=1024", "=2305")), "the target at most"),
]
