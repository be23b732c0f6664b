"""Write the prompts of gem_tasks: each row asks for one problem, which Gem makes from the row's id.

python examples/gem_tasks/make_prompts.py data/gem.jsonl
"""

import argparse
from pathlib import Path

from megatron_dppo.runtime.files import write_jsonl

NUM_PROMPTS = 8192
ASKED = r"Reason step by step, and put your answer within \boxed{}."


def main() -> None:
    """Write the file of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file to write")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    asked = [{"role": "user", "content": ASKED}]
    write_jsonl(out, [{"id": f"gem-{n}", "prompt": asked, "answer": ""} for n in range(NUM_PROMPTS)])


if __name__ == "__main__":
    main()
