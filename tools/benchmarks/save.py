"""Measures the pause of training for a checkpoint: asynchronous saves compared with synchronous saves.

    python -m tools.benchmarks.save                  a model of about 60 M parameters, 6 saves of each kind
    python -m tools.benchmarks.save --hidden 1024    a larger model
    torchrun --nproc-per-node 2 -m tools.benchmarks.save --expert 1    without expert parallelism

The real actor trains on random samples. Saves of both kinds alternate. A pause is the extra time of a gradient
step with a save. For an asynchronous save, the time to turn the written files into a checkpoint is added.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from megatron_dppo.config.schema import CheckpointConfig
from megatron_dppo.run.state import RunPoint
from megatron_dppo.runtime.process import Runtime, quiet_library_warnings, start, stop, world_size_from_launcher
from megatron_dppo.types import RunState
from tools.benchmarks.benchmarking import cli
from tools.benchmarks.jobs import batch_of, build_actor, write_model

KINDS: tuple[str, ...] = ("synchronous", "asynchronous")


def main(
    hidden: Annotated[int, typer.Option(help="Hidden size of the model.")] = 512,
    saves: Annotated[int, typer.Option(min=1, help="Saves of each kind.")] = 6,
    expert: Annotated[int | None, typer.Option(help="parallel.expert. [default: number of processes]")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder to write to, on the disk to measure.")] = None,
) -> None:
    """Print the pauses and their ratio."""
    quiet_library_warnings()
    runtime = start()
    with tempfile.TemporaryDirectory(dir=folder) as name:
        shared = Path(runtime.on_main(lambda: name))
        measure(shared, runtime, hidden, saves, expert or world_size_from_launcher())
        runtime.barrier()
    stop()


def measure(folder: Path, runtime: Runtime, hidden: int, num_saves: int, expert: int) -> None:
    """Alternate plain steps, steps with a synchronous save and steps with an asynchronous save."""
    from megatron_dppo.run.checkpoints import Checkpoints  # after quiet_library_warnings

    sizes = dict(hidden_size=hidden, moe_intermediate_size=hidden, intermediate_size=2 * hidden)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8)
    write_model(runtime, str(folder / "model"), sizes | {"initializer_range": 0.25})
    actor = build_actor(runtime, str(folder / "model"), {"expert": expert})
    batch = batch_of(runtime, actor, [16] * 24, 16384)
    kinds: dict[str, Checkpoints] = {}
    for kind in KINDS:
        options = CheckpointConfig(asynchronous=kind == "asynchronous", keep_last=1)
        runtime.on_main((folder / kind).mkdir)
        kinds[kind] = Checkpoints(folder / kind, options, folder / "model", runtime)
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", *KINDS, "during")}
    writing_s = 0.0

    def step(checkpoints: Checkpoints | None = None, number: int = 0) -> float:
        began = time.perf_counter()
        actor.train_step(batch, is_first=False)
        if checkpoints is not None:
            checkpoints.save(actor, RunPoint(RunState(0, number, 0, {}), 0, ""))
        runtime.barrier()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    for number in range(num_saves + 1):  # the first of each kind warms up
        for kind, checkpoints in kinds.items():
            plain, during = [step() for _ in range(3)], list[float]()
            saved = step(checkpoints, number)
            began = time.perf_counter()
            while checkpoints.is_writing:
                during.append(step())
                polled = time.perf_counter()
                checkpoints.poll()
                saved += time.perf_counter() - polled
            writing_s += (time.perf_counter() - began) / (num_saves + 1)
            if number > 0:
                for name, values in (("plain", plain), (kind, [saved]), ("during", during)):
                    seconds[name] += values
    newest = folder / KINDS[0] / (folder / KINDS[0] / "latest").read_text().strip()
    if runtime.is_main:
        num_parameters = sum(p.numel() for chunk in actor.chunks for p in chunk.parameters())
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        print(f"{num_parameters / 1e6:.1f} M parameters on rank 0; a checkpoint holds {size / 1e6:.0f} MB")
        report(seconds, writing_s)


def report(seconds: dict[str, list[float]], writing_s: float) -> None:
    """Print medians over the saves."""
    median = {name: statistics.median(values) for name, values in seconds.items() if values}
    print(f"gradient step without a save      {median['plain']:8.3f} s  (median of {len(seconds['plain'])})")
    pause = {kind: median[kind] - median["plain"] for kind in KINDS}
    for kind, value in pause.items():
        low, high = min(seconds[kind]) - median["plain"], max(seconds[kind]) - median["plain"]
        print(f"pause of a save, {kind:<12}     {value:8.3f} s  ({low:.3f} to {high:.3f})")
    if "during" in median:
        slower = f"({median['during'] / median['plain'] - 1:+.0%}; {writing_s:.2f} s of writing)"
        print(f"gradient step during the writing  {median['during']:8.3f} s  {slower}")
    ratio = pause["asynchronous"] / pause["synchronous"]
    print(f"the asynchronous pause is {ratio:.2f} of the synchronous one")


if __name__ == "__main__":
    cli(main, __doc__)
