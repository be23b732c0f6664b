"""The command of the README on two nodes, against the same run on one."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

from tests.faults.campaign import compare_rows, equal_states
from tests.nodes.lab import Lab
from tests.nodes.training import torchrun, train
from tests.support.jobs import ROOT


def options_of_readme(master: str) -> list[str]:
    """Options of torchrun there, changed to one process per node, which meet at a node of the lab."""
    readme = (ROOT / "README.md").read_text().replace("\\\n", " ")
    found = re.findall(r"torchrun (--nnodes 2 .*?)-m megatron_dppo train run\.toml", readme)
    options = [part for word in shlex.split(found[0]) for part in word.split("=")]
    assert all(shlex.split(other) == shlex.split(found[0]) for other in found), found
    for place, (option, value) in enumerate(pairwise(options), 1):
        if option == "--nproc-per-node":
            options[place] = "1"
        elif option in ("--rdzv-endpoint", "--master-addr"):
            options[place] = ":".join([master, *value.split(":")[1:]])
    return options


def test_the_readmes_command_trains_on_two_nodes_as_on_one(
    lab: Lab, tiny: tuple[str, ...], one_machine: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    nodes = [lab.nodes[name] for name in ("n0", "n1")]
    torchrun(nodes, [*options_of_readme("n0"), *train(tiny, run)], tmp_path / "log")
    assert compare_rows(one_machine, run) == (0, 0)
    assert equal_states(one_machine, run)
