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
NO_ZEROING = ("        optimizer.zero_grad()\n", "")
IN_PIECES = [
    ("    lab.checkpointing(model)\n", ""),
    ("        with", "        for part in ids.chunk(4):\n          with"),
    (
        "            loss = model(input_ids=ids, labels=ids).loss",
        "              loss = model(input_ids=part, labels=part).loss / 4",
    ),
    ("        scaler.scale(loss).backward()", "          scaler.scale(loss).backward()"),
]
WITHOUT_LABKIT = [
    ("lab.checkpointing(model)", "model.gradient_checkpointing_enable()"),
    ("torch.amp.GradScaler(kind)", "torch.amp.GradScaler('cuda')"),
    ("torch.amp.autocast(kind,", "torch.autocast('cuda',"),
]
RIGHT = [
    ("04-1", 5.0),
    ("04-2", changed(halved, *IN_PIECES)),
    ("04-2", changed(halved, *WITHOUT_LABKIT)),
    ("04-2", changed(halved, ("zero_grad()", "zero_grad(set_to_none=False)"))),
]
MISTAKES = [
    ("04-1", 4, "the copies add 0.65"),
    ("04-1", 4.35, "which way do you round"),
    ("04-1", 3, "reaches half"),
    ("04-1", 2, "They are halved"),
    ("04-1", 9, "16 bits"),
    ("04-1", 6, "less"),
    ("04-2", changed(halved, NO_ZEROING), "add up"),
    ("04-2", changed(halved, ("    lab.checkpointing(model)\n", "")), "what attacks the activat"),
    ("04-2", changed(halved, *NO_SCALER), "no scaler"),
    ("04-2", changed(halved, ("seq_len=512", "seq_len=256")), "less arithmetic"),
    ("04-2", changed(halved, PURE_BF16), "`model.half()`"),
    ("04-2", changed(halved, AUTOCAST), "Nothing in your step is FP16"),
]
