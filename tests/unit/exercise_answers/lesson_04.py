"""Answers to lesson 04's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_04 import halved

NO_SCALER = [
    ("scaler.scale(loss).backward()", "loss.backward()"),
    ("scaler.step(optimizer)", "optimizer.step()"),
    ("        scaler.update()\n", ""),
]
PURE_BF16 = ("device=device)\n    lab", "device=device, dtype=torch.bfloat16)\n    lab")
AUTOCAST = ("with torch.amp.autocast(kind, dtype=torch.float16)", "if True")
MISTAKES = [
    ("04-1", 100 / 6, "copies of the weights are missing"),
    ("04-1", 25, "reaches two thirds"),
    ("04-1", 20.8, "share of the whole peak"),
    ("04-1", 50, "the article's figure"),
    ("04-2", changed(halved, ("    lab.checkpointing(model)\n", "")), "what attacks the activat"),
    ("04-2", changed(halved, *NO_SCALER), "no scaler"),
    ("04-2", changed(halved, ("seq_len=512", "seq_len=256")), "less arithmetic"),
    ("04-2", changed(halved, PURE_BF16), "`model.half()`"),
    ("04-2", changed(halved, AUTOCAST), "Nothing in your step is FP16"),
]
