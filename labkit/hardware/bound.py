"""The least time that a GPU needs for counted work: a roofline (Williams, Waterman and Patterson,
"Roofline", CACM 52(4), 2009), and the link to the host on top. Standard library only.

Limits: vendors' peak rates, which no program reaches, so this is a bound and never a time. FP32
counts without TF32, as PyTorch multiplies matrices unless told otherwise; with TF32, which cuDNN's
convolutions may use by default, a step can take less.
"""

from collections.abc import Mapping

from labkit.hardware.catalogue import Gpu


def least_seconds(
    gpu: Gpu, flops: Mapping[str, int], moved_bytes: int, crossing_bytes: int = 0
) -> float:
    """Return a lower bound of the seconds of some work on ``gpu``.

    Args:
        gpu: its published rates; without one, only bytes count.
        flops: operations, by the precision of their operands: ``"fp32"``, ``"fp16"``, or any
            other, which is computed at BF16's rate.
        moved_bytes: what the GPU's memory reads and writes.
        crossing_bytes: what crosses the link to the host.
    """
    arithmetic = sum(count / rate for kind, count in flops.items() if (rate := _rate(gpu, kind)))
    link = gpu.link_gb_per_s
    crossing = crossing_bytes / (link * 1e9) if link else 0.0
    return max(arithmetic, moved_bytes / (gpu.bandwidth_gb_per_s * 1e9)) + crossing


def _rate(gpu: Gpu, precision: str) -> float | None:
    """Return the operations per second that ``gpu`` reaches at most; None if none is published."""
    if precision == "fp32":
        tflops = gpu.fp32_tflops
    elif precision.endswith("fp16"):
        tflops = gpu.fp16_tflops
    else:
        tflops = gpu.bf16_tflops or gpu.fp16_tflops
    return tflops * 1e12 if tflops else None
