"""Run Python on a phantom GPU: ``a100-80gbx8 train.py --epochs 1`` for eight of them."""

import os
import sys

from gpumem.inputs import InputError
from phantom_gpu.environment import environment_of

USAGE = f"usage: python -m {__package__} GPU[xCOUNT] SCRIPT|-m MODULE|-c CODE [ARGUMENTS]"


def main(arguments: list[str]) -> int:
    """Replace this process by Python on the GPU named; return 2 where that cannot be."""
    if len(arguments) < 2:
        print(USAGE, file=sys.stderr)
        return 2
    named, *rest = arguments
    try:
        variables = environment_of(named)
    except InputError as error:
        print(f"{__package__}: {error}", file=sys.stderr)
        return 2
    os.execve(sys.executable, [sys.executable, *rest], variables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
