"""mini-swe-agent with litellm's client: python mini_swe_agent.py QUESTION."""

# pyright: reportMissingImports=false

import os
import sys
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else litellm downloads prices
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = str(Path.cwd())

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
model = LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors", **config["model"])
found = DefaultAgent(model, LocalEnvironment(), **config["agent"]).run(sys.argv[1])["submission"].strip()
sys.exit(f"found {found!r}" if found != "It is 5." else 0)
