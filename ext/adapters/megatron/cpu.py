"""Stand-ins that let megatron-core 0.16.1 and Megatron-LM's training code run on CPUs over gloo.

For tests and the launcher's ``--cpu`` switch only. They replace functions of torch and of the host in this process for
good, so nothing else may import this module, and `install` refuses where a CUDA device is there.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ext.core.errors import ConfigError

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "rand",
    "randint", "randn", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_installed: set[str] = set()


def install() -> None:
    """What ``megatron.core`` needs. Call before a process group exists and before ``megatron`` is imported.

    Raises:
        ConfigError: there is a CUDA device, which these stand-ins would hide.
    """
    if torch.cuda.is_available():
        raise ConfigError(
            f"--cpu: found {torch.cuda.device_count()} CUDA devices. Remove --cpu, or hide them with "
            "CUDA_VISIBLE_DEVICES=''."
        )
    if "core" in _installed:
        return
    _installed.add("core")
    _replace_devices()
    _replace_factories()
    _replace_random_numbers()
    _replace_streams()
    # There is one generator for both here, so what the host warns of is bound to happen.
    random = logging.getLogger("megatron.core.tensor_parallel.random")
    random.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    _replace_tensor_types()
    _extend_norms()
    _mend_moe()


def install_training() -> None:
    """`install`, and what ``megatron.training`` needs, which must be importable."""
    install()
    if "training" in _installed:
        return
    _installed.add("training")
    # The training code imports kernels that need triton, compiles CUDA sources, and asks for a GPU.
    kernels = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    module: Any = types.ModuleType(kernels)
    module.is_batch_invariant_mode_enabled = _answering(False)
    module.enable_batch_invariant_mode = _needs_gpu
    sys.modules[kernels] = module
    _module("megatron.legacy.fused_kernels").load = _answering(None)
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        _module("megatron.core.datasets.utils").compile_helpers = _answering(None)  # compiled already
    initialize = _module("megatron.training.initialize")
    training = _module("megatron.training.training")
    training.set_jit_fusion_options = _answering(None)
    training.initialize_megatron = _with(initialize.initialize_megatron, allow_no_cuda=True)


def _replace_devices() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.device_count = lambda: 8
    cuda.get_device_capability = lambda *_: (0, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=0
    )
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, _answering(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _answering(0))
    cuda.memory_stats = lambda *_, **__: {"num_alloc_retries": 0, "allocation.all.current": 0}
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _answering(None), _answering(None)


def _replace_factories() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    to = torch.Tensor.to

    def to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *args, **kwargs)

    tensor.to = to_cpu


def _replace_random_numbers() -> None:
    cuda: Any = torch.cuda
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = _answering(None)  # torch.manual_seed calls it
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    streams = _module("megatron.core.tensor_parallel.random")
    streams._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    streams._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _replace_streams() -> None:
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream, cuda.default_stream = lambda *_: _Stream(), lambda *_: _Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    torch.Tensor.record_stream = _answering(None)  # type: ignore[method-assign, assignment]


def _replace_tensor_types() -> None:
    """The optimizers compare ``Tensor.type()`` with the names of CUDA types."""
    type_of = torch.Tensor.type

    def as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = as_on_cuda  # type: ignore[method-assign, assignment]


def _extend_norms() -> None:
    """Torch's norms work on a part of the sequence as on all of it, but the host allows them without only.

    What is missing is the mark by which the host sums their gradients over the tensor-parallel ranks.
    """
    wrapper = _module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    make = wrapper.__new__

    def make_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = make(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    wrapper.__new__ = make_marked


def _mend_moe() -> None:
    utils = _module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(utils, "te_general_gemm"):  # read but not bound where TransformerEngine is absent
        utils.te_general_gemm = None
    # The host leaves a tensor that is no CUDA tensor as it is, and then no all-to-all takes its split sizes.
    dispatchers = _module("megatron.core.transformer.moe.token_dispatcher")

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    dispatchers.maybe_move_tensor_to_cpu = to_cpu


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Stream(_Event):
    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _is_cuda(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


def _with(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, **fixed})

    return call


def _needs_gpu(*_: Any, **__: Any) -> Any:
    raise ConfigError("--cpu: batch-invariant kernels need a GPU. Remove the flag that asks for them.")


def _answering(value: Any) -> Callable[..., Any]:
    """A function of its own for every name: torch keeps rules by function, and one function may have one only."""
    return lambda *_, **__: value
