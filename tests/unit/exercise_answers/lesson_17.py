"""Answers to lesson 17's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_17 import large, roomy


def answer(operations=8, crossings=3, nbytes=2, plain=6, hide=None):
    """The solution of 17-1, except for what is named."""

    def given(parameters, tokens, flops_per_second, bytes_per_second, hidden):
        arithmetic = operations * parameters * tokens / flops_per_second
        copies = crossings * nbytes * parameters / bytes_per_second
        hidden = hidden if hide is None else hide
        together = max(arithmetic, copies) if hidden else arithmetic + copies
        return together / (plain * parameters * tokens / flops_per_second)

    return given


LEAVE_LATE = [
    ("        p.register_post_accumulate_grad_hook(partial(leave, there))", "        pass"),
    (
        "        optimizer.step()\n",
        "        for there, p in zip(hosted, placed, strict=True):\n"
        "            leave(there, p)\n"
        "        optimizer.step()\n",
    ),
]
SAVE_ON_CPU = (
    "        loss = model(",
    "        with torch.autograd.graph.save_on_cpu():\n            loss = model(",
)
COMPUTE_ON_CPU = [
    ("512, device=device) for", "512) for"),
    ("torch.randn(128, 512, device=device)", "torch.randn(128, 512, device=device).to('cpu')"),
    ("yield loss", "yield loss.to(device)"),
]


PINNED = (
    'there.grad, p.grad = p.grad.to("cpu", copy=True), None',
    'there.grad = torch.empty(p.shape, device="cpu", pin_memory=True).copy_(p.grad)\n'
    "        p.grad = None",
)
PINNED_WEIGHTS = ('p.detach().to("cpu", copy=True)', 'p.detach().to("cpu", copy=True).pin_memory()')
RIGHT = [("17-2", changed(large, PINNED, PINNED_WEIGHTS))]
MISTAKES = [
    ("17-1", answer(crossings=2), "Gradients have to cross"),
    ("17-1", answer(nbytes=4), "BF16 has two bytes"),
    ("17-1", answer(operations=6), "8 operations for each weight and token"),
    ("17-1", answer(plain=8), "Plain training computes forward once"),
    ("17-1", answer(hide=False), "Hidden copies take no extra time"),
    ("17-1", answer(hide=True), "it first computes and then copies"),
    ("17-2", roomy, "The optimizer's state is still there"),
    ("17-2", changed(large, *LEAVE_LATE), "*all* gradients are on the GPU"),
    ("17-2", changed(large, SAVE_ON_CPU), "Need the weights themselves leave the GPU?"),
    ("17-2", changed(large, ("p.copy_(there)", "pass")), "loss"),
    ("17-2", changed(large, *COMPUTE_ON_CPU), "The CPU computes"),
]
