"""Measures the trainer's CPU cost of a Qwen3-30B-A3B rollout, from SGLang's replies to packed micro-batches.

    python -m tools.benchmarks.host                   4 samples of 8,192 tokens, 5 rounds
    python -m tools.benchmarks.host --tokens 2048     shorter samples

There is no server and no model. Synthetic replies (top 20, routes of 48 x 8 experts) go through the loop's
functions, one step after another in one process. CPU time is measured, and extrapolated by tokens to one of 8
ranks that samples 256 of a rollout's 2,048 samples of 8,192 tokens. "alone": each rank trains a complete model,
and receives the samples that balancing moves to it. "together": all 8 ranks train one model (tensor 4, context
2), and each receives all samples. Parcels between ranks are sent through gloo to this rank itself, without a
network or a GPU.

A step runs in one of three places. "decoding process": next to the trainer. "generation": in the trainer while
responses are generated, so that only the last responses add time. "exposed": after generation and before
training. With rollout.max_staleness, generation continues during all of them.
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer

from megatron_dppo.data.batches.memory import rollout_bytes_bound
from megatron_dppo.runtime.process import Runtime, quiet_library_warnings, start, stop
from megatron_dppo.runtime.tables import show_table
from tools.benchmarks.benchmarking import OUT, OtherPrograms, cli, machine, spread, warn_if_busy, write_json
from tools.benchmarks.decoding import MODEL, PROMPT
from tools.benchmarks.host_path import HostPath, Rollout, Sizes, Step, Where, children_peak_bytes

GIB = 1 << 30


@dataclass(frozen=True)
class Measured:
    """Time and memory of some samples."""

    steps: list[Step]
    sizes: Sizes
    num_tokens: int  # tokens of all samples, which `sizes` refer to
    decoding_peak_bytes: int  # peak resident bytes of the decoding process


@dataclass(frozen=True)
class RankTime:
    """CPU seconds of a step on one rank for a complete rollout."""

    alone_s: float
    together_s: float


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank for a complete rollout."""

    samples: float
    microbatches: float
    parcels: float  # parcels of one mini-batch, sent and received
    bound: float  # the bound that `check` compares with rollout.max_data_gib

    @property
    def total(self) -> float:
        """Bytes if no sample is freed before all are packed."""
        return self.samples + self.microbatches + self.parcels


def main(
    samples: Annotated[int, typer.Option(min=2, help="Samples per round; even.")] = 4,
    tokens: Annotated[int, typer.Option(min=PROMPT + 2, help="Tokens per sample, 256 of the prompt.")] = 8192,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each step.")] = 5,
) -> None:
    """Measure, print, and write runs/bench/host.json."""
    quiet_library_warnings()
    others, runtime, rollout = OtherPrograms(), start(), Rollout()
    with tempfile.TemporaryDirectory() as name:
        found = measure(runtime, Path(name), samples, tokens, rounds)
    stop()
    busy = others.cores()
    show(found, rollout)
    warn_if_busy("the host's path", busy)
    figures = {
        "steps": list(map(asdict, found.steps)),
        "sizes": asdict(found.sizes),
        "rollout": asdict(rollout),
    }
    write_json(OUT / "host.json", {"machine": machine(), **figures, "others": busy})


def measure(runtime: Runtime, folder: Path, num_samples: int, num_tokens: int, rounds: int) -> Measured:
    """Run all steps on samples. The first round is discarded, because it starts processes.

    Args:
        runtime: Runtime of a job with one rank.
        folder: Folder for the run's files.
        num_samples: Samples per round; even.
        num_tokens: Tokens per sample.
        rounds: Number of measured rounds.
    """
    with HostPath(runtime, folder, num_samples, num_tokens) as path:
        sizes = [path.go() for _ in range(rounds + 1)][-1]
        steps = list(path.steps.values())
        for step in steps:
            del step.cpu_s[0]
        return Measured(steps, sizes, num_samples * num_tokens, children_peak_bytes())


def time_of_rank(step: Step, rollout: Rollout) -> RankTime:
    """Extrapolate a step to a rank's part of a rollout: its median CPU time, by tokens."""
    own_s = statistics.median(step.cpu_s) / step.num_tokens * rollout.samples_per_rank * rollout.num_tokens
    return RankTime(step.alone * own_s, step.together * own_s)


def memory_of_rank(found: Measured, rollout: Rollout, num_groups: int) -> RankMemory:
    """Extrapolate bytes to a rank's part of a rollout, by tokens.

    Args:
        found: Measured sizes of samples, parcels and micro-batches.
        rollout: Sizes of the rollout.
        num_groups: Number of data-parallel groups: the number of ranks, or one.
    """
    size = rollout.num_ranks // num_groups
    own = rollout.samples_per_rank * rollout.num_tokens / found.num_tokens
    moved = (
        next(step.alone for step in found.steps if step.name == "exchange: encode") if size == 1 else size - 1
    )
    bound = rollout_bytes_bound(rollout.config(Path("run")), rollout.num_ranks, num_groups, MODEL.routing)
    return RankMemory(
        samples=found.sizes.samples * own,
        microbatches=found.sizes.microbatches * own * size,
        parcels=found.sizes.parcels * own / rollout.num_minibatches * 2 * moved,
        bound=bound,
    )


def show(found: Measured, rollout: Rollout) -> None:
    """Print the tables."""
    header = ["", "where", "ms a sample", "ns a token", "s a rank, alone", "together"]
    rows = [row for where in get_args(Where) for row in _rows(found.steps, where, rollout)]
    sizes = f"{rollout.num_samples:,} samples of {rollout.num_tokens:,} tokens on {rollout.num_ranks} ranks"
    show_table(f"CPU time; {sizes}", header, rows)
    alone, together = (memory_of_rank(found, rollout, groups) for groups in (rollout.num_ranks, 1))
    names = ("samples", "microbatches", "parcels", "total", "bound")
    pairs = [(name, getattr(alone, name), getattr(together, name)) for name in names]
    limit = rollout.config(Path("run")).rollout.max_data_gib * GIB
    pairs.append(("rollout.max_data_gib", limit, limit))
    waiting = found.sizes.replies / found.num_tokens * rollout.samples_per_rank * rollout.num_tokens
    pairs.append(("replies, if all wait at once; not in the bound", waiting, waiting))
    peak = float(found.decoding_peak_bytes)
    pairs.append(("decoding process, peak; not in the bound", peak, peak))
    show_table(
        "GiB on a rank",
        ["", "alone", "together"],
        [[name, *(f"{value / GIB:.2f}" for value in values)] for name, *values in pairs],
    )
    typer.echo(
        f"bytes of a token: reply {found.sizes.replies / found.num_tokens:,.0f}, "
        f"sample {found.sizes.samples / found.num_tokens:,.0f}, "
        f"micro-batch {found.sizes.microbatches / found.num_tokens:,.0f}"
    )


def _rows(steps: Sequence[Step], where: Where, rollout: Rollout) -> list[list[str]]:
    """Return a row for each step that runs there, and a row with their sum."""
    own = [step for step in steps if step.where == where]
    times = [time_of_rank(step, rollout) for step in own]
    rows = [
        [
            step.name,
            where,
            spread([s / step.num_tokens * rollout.num_tokens * 1e3 for s in step.cpu_s], 2),
            f"{statistics.median(step.cpu_s) / step.num_tokens * 1e9:,.0f}",
            f"{of_rank.alone_s:.2f}",
            f"{of_rank.together_s:.2f}",
        ]
        for step, of_rank in zip(own, times, strict=True)
    ]
    sums = [sum(each.alone_s for each in times), sum(each.together_s for each in times)]
    return [*rows, ["all of these", where, "", "", *(f"{value:.1f}" for value in sums)]]


if __name__ == "__main__":
    cli(main, __doc__)
