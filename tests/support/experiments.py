"""The experiments in examples/, those that have a job script, and the algorithms and the model of each."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from examples.make_tiny import FAMILIES
from tests.support.experiment_models import OF_EXPERIMENTS

ROOT = Path(__file__).parents[2]
_TINY = Path("examples") / "tiny.toml"
_TINY_GEM = Path("examples") / "tiny_gem.toml"
_GEM = "gem_tasks"


@dataclass(frozen=True)
class Algorithm:
    """One overlay of one experiment."""

    experiment: str
    name: str

    @property
    def layers(self) -> tuple[Path, Path]:
        """The TOML files of the run, relative to the repository's root."""
        folder = Path("examples") / self.experiment
        return folder / "base.toml", folder / f"{self.name}.toml"

    @property
    def tiny_layers(self) -> tuple[Path, ...]:
        """The TOML files of the recipe's test, which has a tiny model."""
        return (*self.layers, _TINY, *((_TINY_GEM,) if self.experiment == _GEM else ()))

    @property
    def earns_tiny_reward(self) -> bool:
        """Whether a random model's rewards vary; it solves no whole puzzle, and moves of Sudoku at times."""
        return self.experiment != _GEM or "sudoku" in self.name

    def __str__(self) -> str:
        return f"{self.experiment}-{self.name}"


EXPERIMENTS = sorted(path.parent.name for path in (ROOT / "examples").glob("*/train.sbatch"))
ALGORITHMS = [
    Algorithm(experiment, path.stem)
    for experiment in EXPERIMENTS
    for path in sorted((ROOT / "examples" / experiment).glob("*.toml"))
    if path.name != "base.toml"
]


def model_of(experiment: str) -> str:
    """The published name of the experiment's model."""
    base = tomllib.loads((ROOT / "examples" / experiment / "base.toml").read_text())
    return Path(base["model"]["load"]).name


def tiny_family(algorithm: Algorithm) -> str:
    """The tiny model of the same architecture, or "gem" for the model that solves Gem's tasks."""
    if algorithm.experiment == _GEM:
        return "gem"
    (architecture,) = OF_EXPERIMENTS[model_of(algorithm.experiment)]["architectures"]
    return next(name for name, known in FAMILIES.items() if known == architecture)
