"""The compiled kernels of `csrc`, called with tensors: a ctypes binding of `csrc/capi.h`.

Shapes and dtypes are checked, because the C side trusts its pointers. Values are not checked.
"""

import ctypes
import math
from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective
from megatron_dppo.errors import MegatronDppoError
from megatron_dppo.kernels.encoding import (
    COMPILED,
    IDS,
    LOGITS_DTYPES,
    MAX_TOP_K,
    NO_RELAX,
    NUMBERS,
    flags_of,
    number_of,
    require_compiled,
)
from megatron_dppo.kernels.reference import ROWS, STATISTICS, LogitColumns
from megatron_dppo.types import RolloutTokens

ABI_VERSION = 1


class KernelError(MegatronDppoError, RuntimeError):
    """A kernel library does not load, got invalid tensors, or reports a device error."""


class ArgumentChecker:
    """Turns the tensors of one call into addresses."""

    def __init__(self, function: str, device_type: str, device: torch.device) -> None:
        self.function, self.device = function, device
        if device.type != device_type:
            self.fail("device", str(device), f"tensors on {device_type}, which this library was built for")

    def fail(self, name: str, found: str, expected: str) -> None:
        """Raise, naming the function and its argument."""
        raise KernelError(f"{self.function}: {name}: found {found}; expected {expected}.")

    def needed(self, name: str, tensor: Tensor | None, is_needed: bool) -> None:
        """Refuse a call without an input that the objective reads."""
        if is_needed and tensor is None:
            self.fail(name, "none", "a tensor, for this objective")

    def top_k(self, topk_ids: Tensor) -> int:
        """Return K of top-K ids [N, K]."""
        columns = topk_ids.shape[1] if topk_ids.dim() == 2 else 0
        if not 1 <= columns <= MAX_TOP_K:
            self.fail("topk_ids", f"shape {list(topk_ids.shape)}", f"[N, K] with K from 1 to {MAX_TOP_K}")
        return columns

    def logits(self, name: str, logits: Tensor, num_columns: int) -> int:
        """Return the number of rows of logits [N, columns], which may have padding columns and row strides."""
        if logits.dtype not in LOGITS_DTYPES:
            self.fail(name, str(logits.dtype), "float32 or bfloat16")
        if logits.dim() != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
            found = f"shape {list(logits.shape)} with strides {list(logits.stride())}"
            self.fail(name, found, "[N, columns] with neighbouring columns")
        if not 0 <= num_columns <= logits.shape[1]:
            self.fail(name, f"{logits.shape[1]} columns", f"at least num_columns = {num_columns}")
        if logits.device != self.device:
            self.fail(name, str(logits.device), str(self.device))
        return logits.shape[0]

    def pointer(
        self, name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> int | None:
        """Return a tensor's address; None for None."""
        if tensor is None:
            return None
        fits = (
            tensor.dtype == dtype
            and tensor.shape == shape
            and tensor.is_contiguous()
            and tensor.device == self.device
        )
        if not fits:
            strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
            found = f"{tensor.dtype} {list(tensor.shape)}{strides} on {tensor.device}"
            self.fail(name, found, f"contiguous {dtype} {list(shape)} on {self.device}")
        return tensor.data_ptr()


class _Objective(ctypes.Structure):
    """`DppoObjective` of capi.h."""

    _fields_ = (
        ("rule", c_int),
        ("divergence", c_int),
        ("relax", c_int),
        ("flags", c_int),
        ("delta_low", c_float),
        ("delta_high", c_float),
        ("eps_low", c_float),
        ("eps_high", c_float),
        ("log_alpha", c_float),
        ("ratio_cap", c_float),
        ("entropy_coef", c_float),
    )

    @classmethod
    def of(cls, objective: Objective) -> "_Objective":
        require_compiled(objective)
        return cls(
            rule=COMPILED["rule"][objective.rule],
            divergence=COMPILED["divergence"][objective.divergence],
            relax=IDS["relax"][getattr(objective, "relax", NO_RELAX)],
            flags=flags_of(objective),
            log_alpha=getattr(objective, "log_alpha", -math.inf),
            **{field: number_of(objective, field) for field in NUMBERS if field not in ("alpha", "top_k")},
        )


_LOGITS = [c_void_p, c_int, c_int64, c_int64]  # address, dtype, rows, stride
_SIGNATURES: dict[str, list[Any]] = {
    "dppo_row_statistics": [
        *_LOGITS, c_int, c_int, c_void_p, c_void_p, c_int, c_void_p, c_float, c_int, c_void_p, c_void_p,
    ],
    "dppo_combine": [
        c_void_p, c_int, c_int64, c_int, *[c_void_p] * 8, ctypes.POINTER(_Objective), *[c_void_p] * 3,
    ],
    "dppo_logits_gradient": [
        c_void_p, *_LOGITS, c_int64, c_int, c_int, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_float, c_int,
        c_void_p, c_void_p,
    ],
}  # fmt: skip


class KernelLibrary:
    """A shared object built from `csrc`, for CUDA tensors or (the host build) for CPU tensors.

    Kernels are queued on the current stream of the tensors' device; nothing waits for it. Arguments are
    contiguous; of logits only the last dimension must be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
            self._library.dppo_error_string.restype = c_char_p
            self._library.dppo_device_type.restype = c_char_p
            version = int(self._library.dppo_abi_version())
        except (OSError, AttributeError) as error:
            action = "Remove the file, and it is built again."
            raise KernelError(f"{path}: found no kernel library ({error}). {action}") from error
        if version != ABI_VERSION:
            action = "Remove the file, and it is built again."
            raise KernelError(f"{path}: found ABI version {version}; expected {ABI_VERSION}. {action}")
        self.device_type = self._library.dppo_device_type().decode()
        for name, argument_types in _SIGNATURES.items():
            getattr(self._library, name).argtypes = argument_types

    def row_statistics(
        self,
        logits: Tensor,
        targets: Tensor,
        topk_ids: Tensor | None,
        is_learning: Tensor | None,
        columns: LogitColumns,
    ) -> Tensor:
        """Return a shard's statistics of each row, [N, 4 + K] float32; see `dppo_row_statistics` in capi.h.

        Args:
            logits: [N, columns] float32 or bfloat16, this shard's.
            targets: [N] int64 global ids.
            topk_ids: [N, K] int32 global ids, -1 pads.
            is_learning: [N] bool; other rows are not read. `None` means that all rows learn.
            columns: Columns of the logits.
        """
        check = ArgumentChecker("row_statistics", self.device_type, logits.device)
        rows = check.logits("logits", logits, columns.num)
        top_k = 0 if topk_ids is None else check.top_k(topk_ids)
        statistics = torch.empty(rows, STATISTICS + top_k, dtype=torch.float32, device=logits.device)
        self._run(
            "dppo_row_statistics",
            logits.device,
            logits.data_ptr(),
            LOGITS_DTYPES[logits.dtype],
            rows,
            logits.stride(0),
            columns.num,
            columns.start,
            check.pointer("targets", targets, torch.int64, (rows,)),
            check.pointer("topk_ids", topk_ids, torch.int32, (rows, top_k)),
            top_k,
            check.pointer("is_learning", is_learning, torch.bool, (rows,)),
            1 / columns.temperature,
            columns.with_entropy,
            statistics.data_ptr(),
        )
        return statistics

    def combine(self, statistics: Tensor, objective: Objective, tokens: RolloutTokens) -> tuple[Tensor, Tensor]:
        """Return each token's part of the loss, [11, N] float32 in the order of ROWS, and log-probs [N, K].

        Args:
            statistics: [shards, N, 4 + K] float32, in rank order.
            objective: Objective to optimise; there must be at most `top_k` columns.
            tokens: N of them, as `checked_tokens` makes them: float32, and int32 for Top-K ids. Values of rows
                that do not learn are ignored.
        """
        encoded = _Objective.of(objective)
        check, topk_ids = ArgumentChecker("combine", self.device_type, statistics.device), tokens.topk_ids
        topk_mu = tokens.topk.log_probs if tokens.topk is not None and objective.needs_topk else None
        old_log_probs = tokens.old_log_probs if objective.anchor == "recomputed" else None
        top_k = 0 if topk_ids is None else check.top_k(topk_ids)
        num_shards, num_rows = (*statistics.shape, 0, 0)[:2]
        check.needed("topk_ids", topk_ids, objective.needs_topk)
        check.needed("old_log_probs", old_log_probs, objective.anchor == "recomputed")
        if objective.needs_topk and top_k > objective.top_k:
            check.fail("topk_ids", f"{top_k} columns", f"at most top_k = {objective.top_k} of {objective.name}")
        rows = torch.empty(len(ROWS), num_rows, dtype=torch.float32, device=statistics.device)
        topk_log_probs = torch.empty(num_rows, top_k, dtype=torch.float32, device=statistics.device)
        self._run(
            "dppo_combine",
            statistics.device,
            check.pointer("statistics", statistics, torch.float32, (num_shards, num_rows, STATISTICS + top_k)),
            num_shards,
            num_rows,
            top_k,
            check.pointer("targets", tokens.targets, torch.int64, (num_rows,)),
            check.pointer("topk_ids", topk_ids, torch.int32, (num_rows, top_k)),
            check.pointer("rollout_log_probs", tokens.rollout_log_probs, torch.float32, (num_rows,)),
            check.pointer("topk_rollout_log_probs", topk_mu, torch.float32, (num_rows, top_k)),
            check.pointer("old_log_probs", old_log_probs, torch.float32, (num_rows,)),
            check.pointer("advantages", tokens.advantages, torch.float32, (num_rows,)),
            check.pointer("loss_mask", tokens.loss_mask, torch.bool, (num_rows,)),
            check.pointer("token_weights", tokens.token_weights, torch.float32, (num_rows,)),
            ctypes.byref(encoded),
            rows.data_ptr(),
            topk_log_probs.data_ptr() if top_k else None,
        )
        return rows, topk_log_probs

    def logits_gradient(
        self,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        columns: LogitColumns,
        *,
        upstream: Tensor | None = None,
        sources: Tensor | None = None,
        out: Tensor,
    ) -> None:
        """Write the gradient of the summed loss with respect to `logits` into `out`.

        Args:
            logits: [N, columns], as for `row_statistics`.
            rows: [11, N] float32 of `combine`.
            targets: [N] int64.
            columns: Columns of the logits; the columns of `out` that are no tokens get 0.
            upstream: float32 scalar, the gradient of the summed loss; `None` means 1.
            sources: [M] int64: row i of `out` is the gradient of row sources[i] of `logits`; `None` is row i.
            out: [M, columns] of the dtype of `logits`; it may be `logits` itself. In that case, and with
                `sources`, a row that is written must be its own source or the source of no row.
        """
        check = ArgumentChecker("logits_gradient", self.device_type, logits.device)
        num_rows = check.logits("logits", logits, columns.num)
        num_written = check.logits("out", out, columns.num)
        if out.dtype != logits.dtype:
            check.fail("out", str(out.dtype), f"{logits.dtype} like logits")
        if out.shape[1] != logits.shape[1]:
            check.fail("out", f"{out.shape[1]} columns", f"the {logits.shape[1]} of logits")
        if sources is None and num_written > num_rows:
            check.fail("out", f"{num_written} rows", f"at most the {num_rows} of logits")
        self._run(
            "dppo_logits_gradient",
            logits.device,
            logits.data_ptr(),
            out.data_ptr(),
            LOGITS_DTYPES[logits.dtype],
            num_written,
            logits.stride(0),
            out.stride(0),
            columns.num,
            out.shape[1],
            columns.start,
            check.pointer("targets", targets, torch.int64, (num_rows,)),
            check.pointer("rows", rows, torch.float32, (len(ROWS), num_rows)),
            num_rows,
            check.pointer("sources", sources, torch.int64, (num_written,)),
            1 / columns.temperature,
            columns.with_entropy,
            check.pointer("upstream", upstream, torch.float32, ()),
        )

    def _run(self, name: str, device: torch.device, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._library, name)
        if device.type == "cuda":
            with torch.cuda.device(device):
                error = function(*arguments, torch.cuda.current_stream(device).cuda_stream)
        else:
            error = function(*arguments, None)
        if error != 0:
            reason = self._library.dppo_error_string(error).decode()
            raise KernelError(f"{name} of {self.path.name}: {reason} (cudaError {error})")
