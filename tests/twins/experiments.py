"""What examples/ holds: its experiments, their algorithms, and the model and machine of each."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from published_models import PUBLISHED

from examples.make_tiny import FAMILIES

ROOT = Path(__file__).parents[2]
TINY = Path("examples") / "tiny.toml"
_ELSEWHERE = {"quickstart", "sudoku"}


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

    def __str__(self) -> str:
        return f"{self.experiment}-{self.name}"


EXPERIMENTS = sorted(
    path.parent.name for path in (ROOT / "examples").glob("*/base.toml") if path.parent.name not in _ELSEWHERE
)
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
    """The tiny model of the same architecture."""
    (architecture,) = PUBLISHED[model_of(algorithm.experiment)]["architectures"]
    return next(name for name, known in FAMILIES.items() if known == architecture)
