"""Measures the pause of training for a checkpoint: asynchronous saves compared with synchronous saves.

    python -m tools.benchmarks.save                  a model of about 60 M parameters, 6 saves of each kind
    python -m tools.benchmarks.save --hidden 1024    a larger model
    torchrun --nproc-per-node 2 -m tools.benchmarks.save --expert 1    without expert parallelism

The real actor trains on random samples. Saves of both kinds alternate, so that they find the disk in the same
state. A pause is the extra time of a gradient step with a save. For an asynchronous save, the time to turn the
written files into a checkpoint is added. Steps during the writing are timed too. The floor of an asynchronous
pause is a copy of the bytes of the rank that writes most. Resident memory is the increase during the save, on
the rank with the largest increase.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / "tests" / "distributed")]

from megatron_dppo.runtime.process import Runtime, quiet_library_warnings, start, stop, world_size_from_launcher  # noqa: E402


def main() -> None:
    """Print the pauses and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model")
    parser.add_argument("--saves", type=int, default=6, help="saves of each kind")
    parser.add_argument("--expert", type=int, help="parallel.expert (default: number of processes)")
    parser.add_argument("--folder", type=Path, help="folder to write to, on the file system to measure")
    options = parser.parse_args()
    quiet_library_warnings()
    runtime = start()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(runtime.on_main(lambda: name))
        expert = options.expert or world_size_from_launcher()
        measure(folder, runtime, options.hidden, options.saves, expert)
        runtime.barrier()
    stop()


def trainer(folder: Path, runtime: Runtime, hidden: int, expert: int) -> tuple[Any, Any, Any]:
    """Return a config, its actor and the batch of a gradient step."""
    from tiny import random_groups, write_model

    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import gradient_steps, with_advantages

    sizes = dict(hidden_size=hidden, moe_intermediate_size=hidden, intermediate_size=2 * hidden)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8)
    runtime.on_main(lambda: write_model(folder / "model", **sizes))
    tables: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder / "run")},
        "model": {"load": str(folder / "model"), "dtype": "float32"},
        "parallel": {"expert": expert},
        "rollout": {"prompts_per_rollout": 8},
        "algorithm": {"minibatches_per_rollout": 1},
    }
    config = Config.model_validate(tables)
    actor = Actor(config, runtime)
    own = random_groups(8, topk=4)[runtime.rank :: runtime.world_size]
    groups = with_advantages(own, normalize_std=False)
    (batch,), _ = gradient_steps(groups, 0, config, actor.data_parallel, routing=actor.routing)
    return config, actor, batch


def measure(folder: Path, runtime: Runtime, hidden: int, num_saves: int, expert: int) -> None:
    """Alternate plain steps, steps with a synchronous save and steps with an asynchronous save."""
    from megatron_dppo.run.checkpoints import Checkpoints
    from megatron_dppo.run.state import RunPoint
    from megatron_dppo.types import RunState

    config, actor, batch = trainer(folder, runtime, hidden, expert)
    kinds: dict[str, Any] = {}
    for kind, is_asynchronous in (("synchronous", False), ("asynchronous", True)):
        checkpoint = config.checkpoint.model_copy(update={"asynchronous": is_asynchronous, "keep_last": 1})
        checkpoints_folder = folder / kind
        runtime.on_main(lambda made=checkpoints_folder: made.mkdir())
        kinds[kind] = Checkpoints(checkpoints_folder, checkpoint, config.model.load, runtime)
    seconds: dict[str, list[float]] = {"plain": [], **{kind: [] for kind in kinds}, "beside": []}
    total_writing, memory = 0.0, dict.fromkeys(kinds, 0)

    def step(save: Any = None, number: int = 0) -> float:
        began = time.perf_counter()
        actor.train_step(batch, is_first=False)
        if save is not None:
            save.save(actor, RunPoint(RunState(0, number, 0, {}), 0, ""))
        runtime.barrier()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    for number in range(num_saves + 1):  # the first of each kind warms up
        for kind, checkpoints in kinds.items():
            plain = [step() for _ in range(3)]
            began, beside = time.perf_counter(), list[float]()
            with peak_memory() as above:
                saved = step(checkpoints, number)
                began = time.perf_counter()
                while checkpoints.is_writing:
                    beside.append(step())
                    polled = time.perf_counter()
                    checkpoints.poll()
                    saved += time.perf_counter() - polled
            total_writing += time.perf_counter() - began
            memory[kind] = max(memory[kind], *runtime.all_gather(above[0]))
            if number > 0:
                seconds["plain"] += plain
                seconds[kind].append(saved)
                seconds["beside"] += beside
    newest = folder / "synchronous" / (folder / "synchronous" / "latest").read_text().strip()
    own = sum(file.stat().st_size for file in newest.glob(f"megatron/__{runtime.rank}_*.distcp"))
    copy_s = max(runtime.all_gather(seconds_of_copy(own)))
    if runtime.is_main:
        report(seconds, total_writing / (num_saves + 1), actor, newest)
        print(f"copy of the bytes of one rank     {copy_s:8.3f} s  (the rank that writes most)")
        for kind, above in memory.items():
            print(f"resident memory, {kind:<12}     {above / (1 << 30):8.2f} GiB more than before the save")


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Measure the largest increase of resident bytes in the block. Yield a list with this one number."""
    ended, above = threading.Event(), [0]
    before = resident_bytes()

    def watch() -> None:
        while not ended.wait(0.005):
            above[0] = max(above[0], resident_bytes() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield above
    finally:
        ended.set()
        thread.join()


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def seconds_of_copy(num_bytes: int) -> float:
    """Measure the seconds of copying this many bytes into new memory."""
    import torch

    source = torch.ones(max(num_bytes, 1), dtype=torch.uint8)
    began = time.perf_counter()
    source.clone()
    return time.perf_counter() - began


def report(seconds: dict[str, list[float]], writing_s: float, actor: Any, newest: Path) -> None:
    """Print medians over the saves."""
    num_parameters = sum(p.numel() for chunk in actor.chunks for p in chunk.parameters())
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    median = {kind: statistics.median(values) for kind, values in seconds.items() if values}
    pause = {kind: median[kind] - median["plain"] for kind in ("synchronous", "asynchronous")}
    print(f"{num_parameters / 1e6:.1f} M parameters on rank 0; a checkpoint holds {size / 1e6:.0f} MB")
    print(f"gradient step without a save      {median['plain']:8.3f} s  (median of {len(seconds['plain'])})")
    for kind, value in pause.items():
        low, high = min(seconds[kind]) - median["plain"], max(seconds[kind]) - median["plain"]
        print(f"pause of a save, {kind:<12}     {value:8.3f} s  ({low:.3f} to {high:.3f})")
    if "beside" in median:
        slower = median["beside"] / median["plain"] - 1
        beside = f"({slower:+.0%}; {writing_s:.2f} s of writing)"
        print(f"gradient step during the writing  {median['beside']:8.3f} s  {beside}")
    print(
        f"the asynchronous pause is {pause['asynchronous'] / pause['synchronous']:.2f} of the synchronous one"
    )


if __name__ == "__main__":
    main()
