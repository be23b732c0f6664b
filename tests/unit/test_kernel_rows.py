"""How the kernels walk over logits: alignment, places, sizes, and what the binding and the shim refuse."""

import ctypes
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.algorithms import preset
from megatron_dppo.kernels.build import CSRC, HOST_FLAGS
from megatron_dppo.kernels.library import KernelError, KernelLibrary
from megatron_dppo.kernels.reference import ROWS
from tests.support.kernel_host import (
    Shard,
    Tokens,
    combined,
    exact_loss,
    gradient_of,
    random_tokens,
    run,
    shards_of,
    statistics_of,
)
from tests.unit.test_kernel_source import assert_matches

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
OBJECTIVE = preset("dppo_binary_tv", entropy_coef=0.01)


def rows_of(tokens: Tokens, rows: slice) -> Tokens:
    """Only some tokens."""
    tensors = {name: value for name, value in vars(tokens).items() if isinstance(value, torch.Tensor)}
    return replace(tokens, **{name: value[rows].contiguous() for name, value in tensors.items()})


def planes_of(library: KernelLibrary, tokens: Tokens, shards: list[Shard]) -> torch.Tensor:
    statistics = statistics_of(library, tokens, shards, with_entropy=True)
    return combined(library, tokens, statistics, OBJECTIVE)[0]


@DTYPES
@pytest.mark.parametrize(("offset", "stride"), [(1, 312), (0, 307), (3, 305)])
def test_unaligned_rows_equal_aligned_ones(kernels: Any, dtype: torch.dtype, offset: int, stride: int) -> None:
    tokens = random_tokens(8, 300, 3, dtype=dtype)
    aligned = shards_of(tokens, 1, math.nan)[0]
    storage = torch.full((8 * stride + offset,), math.nan, dtype=dtype)
    view = storage[offset:].as_strided((8, 304), (stride, 1), offset)
    view.copy_(aligned.logits)
    shard = replace(aligned, logits=view)
    planes = planes_of(kernels, tokens, [aligned])
    learns = tokens.is_learning
    unaligned = planes_of(kernels, tokens, [shard])
    torch.testing.assert_close(unaligned, planes, rtol=1e-5, atol=2e-6)
    assert torch.equal(unaligned[ROWS.index("highest")], planes[ROWS.index("highest")])
    outs = [torch.full_like(aligned.logits, 7) for _ in range(2)]
    expected = gradient_of(kernels, tokens, aligned, planes, out=outs[0])
    got = gradient_of(kernels, tokens, shard, planes, out=outs[1])
    assert torch.equal(got, expected)
    in_place = gradient_of(kernels, tokens, shard, planes, out=view)
    assert torch.equal(in_place[learns], expected[learns])


def exact_statistics(y: torch.Tensor) -> torch.Tensor:
    """[N, 3] of base-2 logits in float64: the maximum, the sum relative to it, and the weighted sum."""
    below = y - y.amax(1, keepdim=True)
    return torch.stack([y.amax(1), below.exp2().sum(1), (below.exp2() * below.clamp(min=-1e30)).sum(1)], dim=1)


@DTYPES
def test_every_width_at_every_distance_from_16_bytes(kernels: Any, dtype: torch.dtype) -> None:
    """Rows of 1 to 40 columns, one after another: heads, vectors and tails of every length, also compacted."""
    generator = torch.Generator().manual_seed(0)
    num = 8
    for width in range(1, 41):
        storage = (torch.randn(num * width + 3, generator=generator) * 4).to(dtype)
        storage[3 + width - 1] = -math.inf if width > 1 else 0.0
        logits = storage[3:].view(num, width)  # rows at all eight distances, or all four
        targets = torch.randint(width, (num,), generator=generator)
        targets[0] = 0
        shard = Shard(logits, 0, width)
        tokens = replace(
            random_tokens(num, 64, 0), logits=logits, targets=targets, is_learning=torch.ones(num).bool()
        )
        statistics = statistics_of(kernels, tokens, [shard], with_entropy=True)
        y = logits.double() / math.log(2)
        torch.testing.assert_close(statistics[0, :, :3].double(), exact_statistics(y), rtol=1e-5, atol=1e-5)
        chosen = y.gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(statistics[0, :, 3].double(), chosen, rtol=1e-6, atol=0)

        planes, _ = combined(kernels, tokens, statistics, preset("pg_is"))
        sources = torch.randint(num, (num,), generator=generator)
        g = planes[ROWS.index("log_prob_gradient")].double()[:, None]
        one_hot = torch.nn.functional.one_hot(targets, width)
        exact = (g * (one_hot - logits.double().softmax(1)))[sources]
        rounding = 2**-8 if dtype == torch.bfloat16 else 0.0
        for distance in range(3):
            space = torch.full((num * width + 8,), 7.0, dtype=dtype)
            out = space[distance : distance + num * width].view(num, width)
            gradient_of(kernels, tokens, shard, planes, out=out, with_entropy=False, sources=sources)
            error = (out.double() - exact).abs()
            assert (error <= 5e-6 * g[sources].abs() + rounding * exact.abs()).all(), width
            assert (space[:distance] == 7).all() and (space[distance + num * width :] == 7).all(), width


@DTYPES
def test_nan_is_kept_at_each_position(kernels: Any, dtype: torch.dtype) -> None:
    """In the head, in chunks of vectors, in the rest of them, in the tail; -inf alone counts for nothing."""
    width = 128 * 4 * 8 + 100 + 5
    places = [0, 1, 7, 900, 128 * 4 * 8 + 3, width - 9, width - 1]
    storage = torch.zeros((len(places) + 2) * width + 1, dtype=dtype)
    logits = storage[1:].view(-1, width)
    for row, place in enumerate(places):
        logits[row, place] = math.nan
    logits[-1] = -math.inf
    logits[-2, : width // 2] = -math.inf
    tokens = replace(
        random_tokens(len(logits), 64, 0), logits=logits, is_learning=torch.ones(len(logits)).bool()
    )
    found = statistics_of(kernels, tokens, [Shard(logits, 0, width)], with_entropy=True)[0]
    assert found[: len(places), 1].isnan().all()
    assert found[-1, :3].tolist() == [-math.inf, 0.0, 0.0]
    assert found[-2, :3].tolist() == [0.0, width - width // 2, 0.0]


@DTYPES
@pytest.mark.parametrize("vocab_size", [9001, 33001, 65603], ids=["narrow", "wider", "widest"])
def test_long_rows(kernels: Any, dtype: torch.dtype, vocab_size: int) -> None:
    """Blocks of 128, 256 and 512 threads; rows that end within a chunk of vectors, and within a vector."""
    tokens = random_tokens(7, vocab_size, 20, dtype=dtype)
    assert_matches(tokens, OBJECTIVE, run(kernels, tokens, OBJECTIVE), exact_loss(tokens, OBJECTIVE))


@DTYPES
@pytest.mark.parametrize("num_shards", [1, 4])
def test_in_place_and_compacted_gradients_equal_the_plain_one(
    host_library: KernelLibrary, dtype: torch.dtype, num_shards: int
) -> None:
    tokens = random_tokens(24, 300, 3, dtype=dtype)
    tokens.token_weights[torch.tensor([7, 9, 10, 15, 23])] = 0
    shards = shards_of(tokens, num_shards, 1e4)
    planes = planes_of(host_library, tokens, shards)
    is_live = (planes[ROWS.index("log_prob_gradient")] != 0) | (planes[ROWS.index("entropy_gradient")] != 0)
    num_live = int(is_live.sum())
    assert 0 < num_live < 24
    # Live rows from behind the first num_live fill the dead ones among them.
    sources = torch.arange(num_live)
    sources[~is_live[:num_live]] = torch.arange(num_live, 24)[is_live[num_live:]]
    for shard in shards:
        plain = gradient_of(host_library, tokens, shard, planes, out=torch.full_like(shard.logits, math.nan))
        assert (plain[~is_live] == 0).all()
        own = shard.logits.clone()
        assert torch.equal(
            gradient_of(host_library, tokens, replace(shard, logits=own), planes, out=own), plain
        )
        own = shard.logits.clone()
        gradient_of(
            host_library, tokens, replace(shard, logits=own), planes, out=own[:num_live], sources=sources
        )
        assert torch.equal(own[:num_live], plain[sources])
        assert torch.equal(own[num_live:].nan_to_num(), shard.logits[num_live:].nan_to_num())


def test_upstream_scales_the_gradient(host_library: KernelLibrary) -> None:
    tokens = random_tokens(24, 300, 3)
    shard = shards_of(tokens, 1, math.nan)[0]
    planes = planes_of(host_library, tokens, [shard])

    def gradient(upstream: float | None) -> torch.Tensor:
        scalar = None if upstream is None else torch.tensor(upstream)
        out = torch.empty_like(shard.logits)
        return gradient_of(host_library, tokens, shard, planes, out=out, upstream=scalar)

    torch.testing.assert_close(gradient(0.25), gradient(None) * 0.25, rtol=1e-6, atol=0)
    assert (gradient(0.0) == 0).all()
    dead = (planes[ROWS.index("log_prob_gradient")] == 0) & (planes[ROWS.index("entropy_gradient")] == 0)
    assert (gradient(math.inf)[dead] == 0).all()


def test_without_entropy_neither_pass_knows_of_it(kernels: Any) -> None:
    tokens = random_tokens(24, 300, 3)
    shard = shards_of(tokens, 1, math.nan)[0]
    statistics = statistics_of(kernels, tokens, [shard], with_entropy=False)
    assert (statistics[:, :, 2] == 0).all()
    with_entropy = statistics_of(kernels, tokens, [shard], with_entropy=True)
    kept = [0, 1, *range(3, 7)]
    assert torch.equal(statistics[:, :, kept], with_entropy[:, :, kept])
    bonus, _ = combined(kernels, tokens, with_entropy, OBJECTIVE)
    plain, _ = combined(kernels, tokens, with_entropy, preset("dppo_binary_tv"))
    gradients = [
        gradient_of(kernels, tokens, shard, planes, out=torch.empty_like(shard.logits), with_entropy=False)
        for planes in (bonus, plain)
    ]
    assert torch.equal(*gradients)


def test_statistics_of_a_shard(kernels: Any) -> None:
    tokens = random_tokens(8, 300, 4, temperature=0.5)
    shard = shards_of(tokens, 4, math.nan)[1]
    statistics = statistics_of(kernels, tokens, [shard], with_entropy=True)[0]
    y = tokens.logits.double()[:, shard.start : shard.start + shard.num_columns] * 2 / math.log(2)
    learns = tokens.is_learning & (y.amax(1) > -math.inf)
    torch.testing.assert_close(
        statistics[learns, :3].double(), exact_statistics(y)[learns], rtol=1e-5, atol=1e-5
    )
    ids = torch.cat([tokens.targets[:, None], tokens.topk_ids], dim=1) - shard.start
    is_here = (ids >= 0) & (ids < shard.num_columns) & (ids >= -shard.start)
    chosen = torch.where(is_here, y.gather(1, ids.clamp(0, shard.num_columns - 1)), 0)
    torch.testing.assert_close(statistics[learns, 3:].double(), chosen[learns], rtol=1e-6, atol=0)
    nothing = torch.tensor([-math.inf] + [0.0] * 7)
    assert (statistics[~tokens.is_learning] == nothing).all()
    no_columns = replace(shard, logits=shard.logits[:, :0], num_columns=0)
    assert (statistics_of(kernels, tokens, [no_columns], with_entropy=True) == nothing).all()


@pytest.mark.parametrize("vocab_size", [20, 7])
def test_top_k_of_the_whole_vocabulary_and_more(kernels: Any, vocab_size: int) -> None:
    tokens = random_tokens(16, max(8, vocab_size), 20)
    objective = preset("dppo_topk_kl", delta=0.01)
    result, exact = run(kernels, tokens, objective, num_shards=2), exact_loss(tokens, objective)
    # Float32 resolves no tail below 4e-6, which is worth that much of a KL, and a log-prob near 0.
    torch.testing.assert_close(result.rows["divergence"].double(), exact.loss.divergence, atol=2e-5, rtol=1e-5)


def test_addresses_beyond_2_to_the_31(host_library: KernelLibrary, tmp_path: Path) -> None:
    """Two rows 2^31 elements apart, in a file of 4 GiB that holds nothing but their pages."""
    stride, width = 2**31, 16
    file = tmp_path / "sparse"
    storage = torch.from_file(str(file), shared=True, size=stride + width, dtype=torch.bfloat16)
    file.unlink()
    far = storage.as_strided((2, width), (stride, 1))
    tokens = rows_of(random_tokens(8, width, 3, dtype=torch.bfloat16), slice(2, 4))
    far.copy_(tokens.logits)
    shard = Shard(far, 0, width)
    near = Shard(tokens.logits, 0, width)
    planes = planes_of(host_library, tokens, [near])
    assert torch.equal(planes_of(host_library, tokens, [shard]), planes)
    expected = gradient_of(host_library, tokens, near, planes, out=torch.empty_like(near.logits))
    assert torch.equal(gradient_of(host_library, tokens, shard, planes, out=far), expected)


def test_no_rows(kernels: Any) -> None:
    tokens = rows_of(random_tokens(8, 300, 3), slice(0))
    result = run(kernels, tokens, preset("dppo_topk_tv"), num_shards=2)
    assert result.planes.shape == (11, 0)
    assert result.gradient.shape == (0, 300)


def test_the_binding_names_what_does_not_fit(host_library: KernelLibrary, tmp_path: Path) -> None:
    tokens = random_tokens(8, 300, 3)
    shard = shards_of(tokens, 1, math.nan)[0]
    statistics = statistics_of(host_library, tokens, [shard], with_entropy=True)

    def fails(
        message: str, objective: str = "dppo_topk_tv", shard: Shard = shard, **fields: torch.Tensor
    ) -> None:
        with pytest.raises(KernelError, match=message):
            combined(host_library, replace(tokens, **fields), statistics, preset(objective))
            statistics_of(host_library, replace(tokens, **fields), [shard], with_entropy=True)

    fails(
        r"combine: targets: found torch.int32 \[8\] on cpu; expected contiguous", targets=tokens.targets.int()
    )
    fails("rollout_log_probs: found torch.float64", rollout_log_probs=tokens.rollout_log_probs.double())
    fails(r"targets: .* with strides \[2\]", targets=torch.zeros(16, dtype=torch.int64)[::2])
    fails(r"topk_ids: found shape \[8, 65\]; expected .* 1 to 64", topk_ids=torch.zeros(8, 65).int())
    fails("topk_ids: found none; expected a tensor", topk_ids=tokens.topk_ids[:, :0])
    fails("logits: found torch.float64", shard=replace(shard, logits=shard.logits.double()))
    fails("logits: .* neighbouring columns", shard=replace(shard, logits=shard.logits[:, ::2], num_columns=9))
    fails("logits: found 304 columns", shard=replace(shard, num_columns=305))
    with pytest.raises(KernelError, match=r"topk_ids: found 3 .*top_k = 2"):
        combined(host_library, tokens, statistics, preset("dppo_topk_tv", top_k=2))
    with pytest.raises(KernelError, match=r"dppo_row_statistics .*cudaError 1\)"):
        statistics_of(host_library, replace(tokens, temperature=-1.0), [shard], with_entropy=True)
    with pytest.raises(KernelError, match=r"found meta; expected .*cpu"):
        statistics_of(host_library, tokens, [replace(shard, logits=shard.logits.to("meta"))], with_entropy=True)
    with pytest.raises(KernelError, match="no kernel library"):
        KernelLibrary(tmp_path / "absent.so")


def test_the_c_side_refuses_null_pointers_and_unknown_choices(host_library: KernelLibrary) -> None:
    library = ctypes.CDLL(str(host_library.path))
    one, null, none = ctypes.c_int64(1), ctypes.c_void_p(), ctypes.c_int(0)
    top_k = ctypes.c_int(65)
    scale = ctypes.c_float(1)
    for dtype, k in ((ctypes.c_int(0), none), (ctypes.c_int(2), none), (ctypes.c_int(0), top_k)):
        statistics = (null, dtype, one, one, none, none, null, null, k, null, scale, none, null, null)
        assert library.dppo_row_statistics(*statistics) == 1
    assert library.dppo_combine(null, ctypes.c_int(1), one, none, *[null] * 12) == 1
    gradient = (null, null, none, one, one, one, ctypes.c_int(1), ctypes.c_int(1), none, null, null, one, null)
    assert library.dppo_logits_gradient(*gradient, scale, none, null, null) == 1


DIVERGENT = """
#define DPPO_HOST
#include "common.cuh"
#pragma GCC visibility pop
DPPO_API int run(int kind) {
  return shim::launch(1, 64, [=] {
    const int thread = threadIdx.x;
    if (kind == 0 && thread < 7) __syncthreads();
    if (kind == 1 && thread < 7) return;
    if (kind == 2 && thread >= 32) return;
    if (kind <= 1) __shfl_xor_sync(dppo::kWholeWarp, 1.f, 1);
    __syncthreads();
  });
}
"""


def test_the_shim_reports_waits_that_hang_or_are_undefined(tmp_path: Path) -> None:
    source = tmp_path / "divergent.cpp"
    source.write_text(DIVERGENT)
    command = ["g++", *HOST_FLAGS, f"-I{CSRC}", str(source), "-o", str(tmp_path / "divergent.so")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(tmp_path / "divergent.so"))
    assert library.run(3) == 0
    assert [library.run(kind) for kind in range(3)] == [719] * 3
    assert library.run(3) == 0
