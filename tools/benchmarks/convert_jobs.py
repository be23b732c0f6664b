"""Jobs that convert.py times, each in its own process.

    python -m tools.benchmarks.convert_jobs JOB SOURCE OUT

The last line of output is JSON with the seconds and peak memory of each part. The mbridge job runs in mbridge's
environment.
"""

import importlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.checkpoints.checkpoint_folder import sync

GB = 10**9
WRITERS = 2


def memory_gb(kind: str) -> float:
    """Return VmHWM (peak resident memory with mapped files) or RssAnon (current memory without them) in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / GB for line in lines if line.startswith(f"{kind}:"))


class Watch:
    """Measures the seconds and peak memory of named parts."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, float]] = {}
        self._peak = 0.0
        self._is_over = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._is_over.wait(0.01):
            self._peak = max(self._peak, memory_gb("RssAnon"))

    @contextmanager
    def part(self, name: str, written: Path | None = None) -> Iterator[None]:
        """Time the body, including the sync of the files in `written` to disk."""
        self._peak, started = memory_gb("RssAnon"), time.perf_counter()
        yield
        for file in written.rglob("*") if written is not None else ():
            sync([file])
        seconds = time.perf_counter() - started
        self.parts[name] = {"seconds": seconds, "anonymous_gb": self._peak}

    def report(self) -> None:
        """Print all parts as JSON."""
        self._is_over.set()
        print(json.dumps({"parts": self.parts, "resident_gb": memory_gb("VmHWM")}))


def copy(source: Path, out: Path, watch: Watch) -> None:
    """Copy the files byte for byte."""
    out.mkdir(parents=True)
    with watch.part("copy", out):
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, out / file.name)


def through_files(source: Path, out: Path, watch: Watch) -> None:
    """Convert from folder to folder with `to-megatron`, then with `to-hf`."""
    from megatron_dppo.checkpoints.convert.options import WriteOptions
    from megatron_dppo.checkpoints.convert.sources import HuggingFaceSource, MegatronSource
    from megatron_dppo.checkpoints.convert.to_hf import write_hf
    from megatron_dppo.checkpoints.convert.to_megatron import write_megatron
    from megatron_dppo.checkpoints.hf_folder import HFWeights
    from megatron_dppo.checkpoints.model_files import read_convertible_config
    from megatron_dppo.mcore import cpu, fixes
    from megatron_dppo.runtime import process as runtime

    this = runtime.start(num_threads=torch.get_num_threads())
    cpu.install()
    fixes.apply()
    options = WriteOptions(file_bytes=GB // 2, num_writers=WRITERS)
    with watch.part("to-megatron", out):
        config, weights = read_convertible_config(source), HFWeights(source)
        write_megatron(HuggingFaceSource(weights), config, out / "megatron", options, this)
    with watch.part("to-hf", out):
        write_hf(MegatronSource(out / "megatron"), source, out / "hf", options, this)
    runtime.stop()


def through_model(source: Path, out: Path, watch: Watch) -> None:
    """Load the weights into a model on one process and save them, as training does."""
    from megatron_dppo.checkpoints.hf_folder import HFWeights, write_hf_checkpoint
    from megatron_dppo.checkpoints.megatron_weights import export_hf_weights, load_hf_weights

    chunks, hf = built(source)
    with watch.part("load"):
        load_hf_weights(chunks, HFWeights(source), hf)
    out.mkdir(parents=True)
    with watch.part("save", out):
        write_hf_checkpoint(
            export_hf_weights(chunks, hf), out / "hf", source, GB // 4
        )  # two files are in memory


def mbridge(source: Path, out: Path, watch: Watch) -> None:
    """Load and save the same model with mbridge, which sees the names of Transformer Engine."""
    auto_bridge: Any = importlib.import_module("mbridge").AutoBridge  # only in mbridge's environment

    chunks, hf = built(source)
    bridge: Any = auto_bridge.from_pretrained(str(source))
    bridge.vocab_size = bridge.padded_vocab_size = hf["vocab_size"]
    view = EngineNames(chunks[0], hf)
    with torch.no_grad(), watch.part("load"):
        bridge.load_weights([view], str(source))
    out.mkdir(parents=True)
    with torch.no_grad(), watch.part("save", out):
        bridge.save_weights([view], str(out / "hf"))


def built(source: Path) -> tuple[list[Any], dict[str, Any]]:
    """Build the model on one process, with every page of its memory allocated."""
    from megatron_dppo.architectures.layout import Layout
    from megatron_dppo.architectures.registry import read_hf_config
    from megatron_dppo.mcore import cpu, fixes
    from megatron_dppo.mcore.groups import initialize_groups, megatron_sizes
    from megatron_dppo.models.build import build_model, transformer_config
    from megatron_dppo.runtime import process as runtime

    runtime.start(num_threads=torch.get_num_threads())
    cpu.install()
    fixes.apply()
    layout, hf = Layout(world_size=1), read_hf_config(source)
    initialize_groups(layout, seed=0)
    chunks = build_model(hf, transformer_config(hf, torch.bfloat16, megatron_sizes(layout), {}))
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.fill_(1)
    return chunks, hf


class EngineNames:
    """Our model's parameters, one per expert, under the names of Transformer Engine's spec."""

    def __init__(self, chunk: Any, hf: dict[str, Any]) -> None:
        from megatron_dppo.architectures.registry import family_of

        self.config, self.decoder = chunk.config, chunk.decoder
        table = family_of(hf).weight_table(hf)
        self._parameters: dict[str, Any] = {}
        for name, parameter in chunk.named_parameters():
            entry = table.entry(name)
            rule, layer = entry.rule, entry.layer
            engine = rule.transformer_engine or name
            if rule.is_expert:
                for local, expert in enumerate(parameter.detach().unbind()):
                    self._parameters[engine.format(layer=layer, local=local)] = expert
            elif ".mlp." in engine:  # layers with experts keep their norm's name
                self._parameters[name] = parameter.detach()
            else:
                self._parameters[engine.format(layer=layer)] = parameter.detach()

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield names and views of the parameters."""
        yield from self._parameters.items()

    def state_dict(self) -> dict[str, Any]:
        """Return the named parameters as a dict."""
        return self._parameters


JOBS: dict[str, Callable[[Path, Path, Watch], None]] = {
    "copy": copy,
    "through files": through_files,
    "through a model": through_model,
    "mbridge": mbridge,
}

if __name__ == "__main__":
    for file in Path(sys.argv[2]).iterdir():  # so that every job reads it from the system's cache
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass
    watch = Watch()
    JOBS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), watch)
    watch.report()
    sys.stdout.flush()
    os._exit(0)
