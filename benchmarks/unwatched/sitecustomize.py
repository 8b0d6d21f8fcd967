"""Have a script run on a phantom GPU without our watch, and say what it took.

Python imports this module when it starts, after that of ``phantom_gpu/startup``, where its folder
is on the path: in each process of a script, whoever starts it. After so many optimizer steps, or at
its end, a process that uses a GPU writes into a folder the most bytes that one GPU had allocated
and reserved, and its steps, and ends. The variable UNWATCHED holds the folder, the number of steps,
and whether values are followed, as JSON.
"""

import atexit
import importlib.abc
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

#: Ranks end by themselves, so one that started others waits for them; workers that load data stay.
RANK_SECONDS = 30


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Begin as soon as torch is there and the phantom has begun: scripts set variables before."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)  # for libraries that only ask where it is
        execute = spec.loader.exec_module

        def execute_and_begin(module: Any) -> None:
            execute(module)
            _begin(module)

        spec.loader.exec_module = execute_and_begin
        return spec


def _begin(torch: Any) -> None:
    import psutil
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    folder, most, follows = json.loads(os.environ["UNWATCHED"])
    for mode in () if follows else reversed(_get_current_dispatch_mode_stack()):
        mode.__exit__(None, None, None)
    torch._C._cuda_resetPeakMemoryStats = lambda device: None
    process, steps = os.getpid(), 0

    def write() -> None:
        if os.getpid() != process or not torch.cuda.is_initialized():
            return
        statistics = [*map(torch.cuda.memory_stats, range(torch.cuda.device_count()))]
        found = {"steps": steps}
        for name in ("allocated_bytes", "reserved_bytes"):
            found[name] = max(each.get(f"{name}.all.peak", 0) for each in statistics)
        Path(folder, f"{process}.json").write_text(json.dumps(found))

    def after_step(*_: object) -> None:
        nonlocal steps
        if torch._C._current_graph_task_id() != -1:  # one of several within a backward pass
            return
        steps += 1
        if steps == most:
            write()
            _, others = psutil.wait_procs(psutil.Process().children(True), timeout=RANK_SECONDS)
            for other in others:
                other.kill()
            os._exit(0)

    atexit.register(write)
    register_optimizer_step_post_hook(after_step)


if "UNWATCHED" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
