"""The least time that a GPU needs for counted work: a roofline (Williams, Waterman and Patterson,
"Roofline", CACM 52(4), 2009) with the links between GPUs as one more roof, and the link to the
host on top. Standard library only.

Limits: vendors' peak rates, which no program reaches, so this is a bound and never a time. FP32
counts without TF32, as PyTorch multiplies matrices unless told otherwise; with TF32, which cuDNN's
convolutions may use by default, a step can take less.
"""

from collections.abc import Mapping

from gpumem.hardware.catalogue import Gpu


def least_seconds(
    gpu: Gpu,
    flops: Mapping[str, int],
    moved_bytes: int,
    crossing_bytes: int = 0,
    sent_bytes: int = 0,
) -> float | None:
    """Return a lower bound of the seconds of some work on ``gpu``; None if its speed is unknown.

    Args:
        gpu: its published rates; without one, only bytes count.
        flops: operations, by the precision of their operands: ``"fp32"``, ``"fp16"``, or any
            other, which is computed at BF16's rate.
        moved_bytes: what the GPU's memory reads and writes.
        crossing_bytes: what crosses the link to the host.
        sent_bytes: what it sends to the other GPUs of one server, which may overlap with computing.
    """
    if gpu.bandwidth_gb_per_s is None:
        return None
    arithmetic = sum(count / rate for kind, count in flops.items() if (rate := _rate(gpu, kind)))
    moving = _seconds(moved_bytes, gpu.bandwidth_gb_per_s)
    sending = _seconds(sent_bytes, gpu.peer_gb_per_s)
    return max(arithmetic, moving, sending) + _seconds(crossing_bytes, gpu.link_gb_per_s)


def _seconds(nbytes: int, gb_per_s: float | None) -> float:
    return nbytes / (gb_per_s * 1e9) if gb_per_s else 0.0


def _rate(gpu: Gpu, precision: str) -> float | None:
    """Return the operations per second that ``gpu`` reaches at most; None if none is published."""
    if precision == "fp32":
        tflops = gpu.fp32_tflops
    elif precision.endswith("fp16"):
        tflops = gpu.fp16_tflops
    else:
        tflops = gpu.bf16_tflops or gpu.fp16_tflops
    return tflops * 1e12 if tflops else None
