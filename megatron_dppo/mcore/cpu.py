"""Makes Megatron-Core run on a machine without CUDA.

Megatron-Core requests CUDA devices, streams and generators by name. Without a GPU each of these calls would
raise an error. This module gives Megatron's modules a `torch` that returns CPU objects instead. All other code
keeps the real `torch`, and nothing changes if CUDA is present. So the same training code runs on gloo and NCCL.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

_MEGATRON = "megatron.core"
_CPU = torch.device("cpu")
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like")
_CONSTANTS: dict[str, Any] = {
    "current_device": _CPU,
    "synchronize": None,
    "empty_cache": None,
    "set_device": None,
    "set_stream": None,
    "reset_peak_memory_stats": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
}


class _View(ModuleType):
    """A module as Megatron sees it: attributes set on the view first, then the real module's."""

    def __init__(self, real: ModuleType) -> None:
        super().__init__(real.__name__)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Stream:
    """A stream or event of a device that has none: everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":
        return event or _Stream()

    def query(self) -> bool:
        return True


class _TypeName(str):
    """A tensor type name that equals its CUDA spelling: Megatron's optimizer dispatches on those."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __hash__(self) -> int:
        return str.__hash__(self)


def install() -> None:
    """Show the CPU to Megatron's modules, loaded now or later; do nothing if CUDA is present."""
    if torch.cuda.is_available() or any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(_MEGATRON):
            _show_cpu(module)
    sys.meta_path.insert(0, _MegatronFinder())
    _answer_tensor_methods()
    _replace_generators_and_splits()


class _MegatronFinder(MetaPathFinder):
    """Shows the CPU to Megatron's modules as they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname.startswith(_MEGATRON) else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_show(module: ModuleType) -> None:
                execute(module)
                _show_cpu(module)

            loader.exec_module = execute_and_show
        return spec


def _show_cpu(module: ModuleType) -> None:
    if getattr(module, "torch", None) is torch:
        setattr(module, "torch", _torch_on_cpu())  # noqa: B010 - the module's own name for it


@functools.cache
def _torch_on_cpu() -> ModuleType:
    cuda: Any = _View(torch.cuda)
    for name, value in _CONSTANTS.items():
        setattr(cuda, name, _constant(value))
    cuda.current_stream = cuda.default_stream = _constant(_Stream())
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = _no_stream
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    distributed: Any = _View(torch.distributed)
    distributed.all_gather, distributed.reduce_scatter = _all_gather, _reduce_scatter
    view: Any = _View(torch)
    view.cuda, view.distributed = cuda, distributed
    for name in _FACTORIES:
        setattr(view, name, _on_cpu(getattr(torch, name)))
    return view


def _all_gather(
    gathered: list[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Gather or scatter tensors of unequal lengths, as NCCL does and gloo does not."""
    longest = max(tensor.shape[0] for tensor in gathered)
    padded = own.new_zeros(longest, *own.shape[1:])
    padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded) for _ in gathered]
    dist.all_gather(parts, padded, group=group)
    for target, part in zip(gathered, parts, strict=True):
        target.copy_(part[: target.shape[0]])


def _reduce_scatter(
    own: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Gather or scatter tensors of unequal lengths, as NCCL does and gloo does not."""
    whole = torch.cat(parts)
    dist.all_reduce(whole, group=group)
    own.copy_(whole.split([part.shape[0] for part in parts])[dist.get_rank(group)])


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextlib.contextmanager
def _no_stream(stream: object) -> Iterator[None]:
    yield


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `factory` so that device="cuda" means the CPU, and page-locking is dropped."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu


def _answer_tensor_methods() -> None:
    """Replace three tensor methods for all code: without CUDA they raise or never match."""
    tensor: Any = torch.Tensor
    if isinstance(torch.zeros(()).type(), _TypeName):
        return
    tensor.cuda = lambda self, *_, **__: self
    tensor.record_stream = lambda self, *_, **__: None
    type_of = tensor.type

    @functools.wraps(type_of)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        return _TypeName(result) if isinstance(result, str) else result

    tensor.type = type_name


def _replace_generators_and_splits() -> None:
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Return the all-to-all dispatcher's splits as numpy, as on a GPU: c10d wants that here too."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu = to_host
