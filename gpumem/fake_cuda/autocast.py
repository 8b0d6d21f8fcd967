"""CUDA's autocast rules for tensors on the CPU, so that a simulation casts what a GPU would.

Autocast runs products in half precision on every device, but which operators it runs in float32
differs: CUDA's list holds normalisations, softmax, losses, powers and sums, the CPU's hardly any.
Each float32 result is a tensor of twice the bytes, often one that autograd keeps.

Source of the list: ``AT_FORALL_FP32`` and ``AT_FORALL_FP32_SET_OPT_DTYPE`` in PyTorch's
``ATen/autocast_mode.h``, which a test compares with the installed one. It is longer than the
documentation's "CUDA Ops that can autocast to float32"
(https://docs.pytorch.org/docs/stable/amp.html).

Limits: CUDA's rule that some operators promote to the widest input type is left to ordinary type
promotion, which gives the same for tensors of one type.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Names of operators in the `aten` namespace; every overload that takes a tensor is meant.
FLOAT32 = _names(
    """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin
    binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cumprod
    cumsum dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss
    kl_div l1_loss layer_norm linalg_matrix_norm linalg_vector_norm log log10 log1p log2
    log_softmax logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    native_layer_norm nll_loss nll_loss2d norm nuclear_norm pdist poisson_nll_loss pow prod
    reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softplus sum
    tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """
)
# Of these, the ones whose ``dtype`` argument asks for a float32 result: no copy of the input.
SET_DTYPE = _names(
    "cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax prod softmax sum"
)
_HALVES = (torch.float16, torch.bfloat16)
_WITHOUT = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """Inside, ``torch.autocast("cpu")`` runs in float32 what ``torch.autocast("cuda")`` would."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some of them replace the CPU's own entry
            for name in FLOAT32:
                packet = getattr(torch.ops.aten, name)
                for overload in packet.overloads():
                    if "out" in overload.split("_"):
                        continue
                    operator = getattr(packet, overload)
                    kernel = _to_float32 if name in SET_DTYPE else _in_float32
                    operator_name = operator._name.removeprefix("aten::")
                    library.impl(operator_name, kernel(operator), "AutocastCPU")
            for name in _only_on_the_cpu():
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        yield


def _in_float32(operator: Any) -> Callable:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_WITHOUT):
            args = tuple(_widen(value) for value in args)
            kwargs = {name: _widen(value) for name, value in kwargs.items()}
            return operator(*args, **kwargs)

    return kernel


def _to_float32(operator: Any) -> Callable:
    """CUDA's rule for `SET_DTYPE`: the result is float32, unless the caller asks for a type."""
    names = [argument.name for argument in operator._schema.arguments]
    if "dtype" not in names:
        return _in_float32(operator)
    position = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get("dtype")
        with torch._C._ExcludeDispatchKeyGuard(_WITHOUT):
            if args[0].dtype in _HALVES and given is None:
                args = args[:position]
                kwargs["dtype"] = torch.float32
            return operator(*args, **kwargs)

    return kernel


def _only_on_the_cpu() -> list[str]:
    """Operators with a rule for the CPU and none for CUDA, where they just run."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    names = [
        name for name in registered if name.startswith("aten::") and not has(name, "AutocastCUDA")
    ]
    bare = (name.removeprefix("aten::") for name in names)
    return [name for name in bare if name.partition(".")[0] not in FLOAT32]


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _HALVES:
        return value.float()
    if isinstance(value, list):
        return [_widen(item) for item in value]
    return value


# --- Operators that keep other tensors on CUDA than on the CPU ---

_aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
#: They only call others, though autograd has a formula for the whole.
_CALL_OTHERS = {
    _aten.affine_grid_generator.default: _EXPLICIT,
    _aten._euclidean_dist.default: _EXPLICIT,
    _aten.binary_cross_entropy_with_logits.default: _EXPLICIT,
    _aten._trilinear.default: torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
}


def key_of_parts(func: Any) -> torch._C.DispatchKey | None:
    """Return the key of an operator's kernel if that only calls other operators, else None.

    Autograd has taken most of these apart before a mode sees them, but not in inference mode.
    """
    if func in _CALL_OTHERS or func.namespace != "aten":
        return _CALL_OTHERS.get(func)
    has, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    if not has(name, "CompositeImplicitAutograd") or has(name, "CPU"):
        return None
    return torch._C.DispatchKey.AutogradCPU if has(name, "AutogradCPU") else _COMPOSITE


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Inside, the simulated GPU's tensors (CPU devices with an index) use CUDA's kernels."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some of them replace PyTorch's own
            library.impl("dropout", _dropout, "AutogradCPU")
            library.impl("linear", _linear, "AutogradCPU")
            everywhere = "CompositeImplicitAutograd"
            library.impl("pin_memory", lambda tensor, device=None: tensor.clone(), everywhere)
            library.impl("is_pinned", lambda tensor, device=None: False, everywhere)
        yield


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0 < p < 1 and tensor.device.index is not None:
        return torch.native_dropout(tensor, p, True)[0]
    # PyTorch's own for the CPU; its Python decomposition keeps bytes, as CUDA's kernel does.
    return _aten.dropout.default._op_dk(_COMPOSITE, tensor, p, train)


def _linear(
    tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the bias in place where PyTorch does so unless a mode looks (``linear`` in PyTorch's
    ``aten/src/ATen/native/Linear.cpp``)."""
    if bias is None or tensor.dim() == 2 or tensor.is_contiguous():
        return _aten.linear.default._op_dk(_COMPOSITE, tensor, weight, bias)
    return (tensor @ weight.t()).add_(bias)
