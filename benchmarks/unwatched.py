"""Run a script on a phantom GPU without following its values and without our watch.

    python -m phantom_gpu t4 benchmarks/unwatched.py FOLDER STEPS SCRIPT|-m MODULE [ARGUMENTS]

After so many optimizer steps, or at its end, the process writes into FOLDER the most bytes that one
GPU had allocated and reserved, and its steps, and ends.
"""

import atexit
import json
import os
import runpy
import sys
from pathlib import Path

import psutil
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def main() -> None:
    folder, most, *words = sys.argv[1:]
    for mode in reversed(_get_current_dispatch_mode_stack()):
        mode.__exit__(None, None, None)
    torch._C._cuda_resetPeakMemoryStats = lambda device: None
    steps = 0

    def write() -> None:
        if not torch.cuda.is_initialized():
            return
        statistics = [*map(torch.cuda.memory_stats, range(torch.cuda.device_count()))]
        found = {"steps": steps}
        for name in ("allocated_bytes", "reserved_bytes"):
            found[name] = max(each.get(f"{name}.all.peak", 0) for each in statistics)
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(found))

    def after_step(*_: object) -> None:
        nonlocal steps
        if torch._C._current_graph_task_id() != -1:  # one of several within a backward pass
            return
        steps += 1
        if steps == int(most):
            write()
            for child in psutil.Process().children(recursive=True):  # Lightning's second rank
                child.kill()
            os._exit(0)

    atexit.register(write)
    register_optimizer_step_post_hook(after_step)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()  # as for python -m; nanochat has a package with our file's name
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
