"""`megatron-dppo measure-mismatch` with the embedded engine: equal weights in float32 are no distance apart."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from transformers import Qwen3MoeForCausalLM

from megatron_dppo.data.prompts import sanity_task
from tests.support.commands import python
from tests.support.mismatch_ranks import LAYOUTS, PARITY, measure_layouts, require_parity, undecided
from tests.support.ranks import run_ranks
from tests.support.records import lines_of
from tests.support.tiny import TOP_K, VOCAB
from tests.support.tiny_families import write_family

ENGINE = {"weights": "float32"}
ROLLOUT: dict[str, Any] = {
    "prompts_per_rollout": 6,
    "samples_per_prompt": 3,
    "max_response_tokens": 10,
    "num_topk_log_probs": 8,
    "transformers": ENGINE,
}
NUM_RESPONSES, NUM_LAYERS = 18, 2


def _tables(task: Path, **rollout: Any) -> dict[str, Any]:
    return {
        "run": {"folder": str(task / "run")},
        "model": {"load": str(task / "model"), "dtype": "float32"},
        "parallel": {"max_tokens_per_microbatch": 80},
        "data": {"prompts": str(task / "prompts.jsonl"), "reward": "arithmetic", "max_prompt_tokens": 16},
        "rollout": ROLLOUT | rollout,
    }


def test_equal_engines_agree_in_every_layout(task: Path, tmp_path: Path) -> None:
    by_size: dict[int, list[Any]] = {}
    for world_size, layouts in LAYOUTS.items():
        (folder := tmp_path / str(world_size)).mkdir()
        results = run_ranks(measure_layouts, world_size, folder, _tables(task), str(folder), layouts)
        require_parity(results, task / "model", NUM_LAYERS, NUM_RESPONSES)
        by_size[world_size] = results
    one = by_size[1][0]["one process"]
    assert one["statistics"]["replayed"]["topk_tv_max"] <= PARITY
    sampled = [(row["prompt"], row["tokens"]) for row in one["rows"]]
    for result in by_size[2]:
        for name, found in result.items():
            assert [(row["prompt"], row["tokens"]) for row in found["rows"]] == sampled, name
            assert found["counts"].num_response_tokens == one["counts"].num_response_tokens


@pytest.fixture
def tied(tmp_path: Path) -> tuple[Path, list[int], int]:
    """A model with two equal experts, a sequence, and the first position that routes to only one of the two."""
    folder = write_family(tmp_path / "tied", "Qwen3MoeForCausalLM")
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    router = model.get_parameter("model.layers.0.mlp.gate.weight")
    sequences = torch.randint(1, VOCAB, (40, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        router[1] = router[0]
        logits = torch.stack(model(sequences, output_router_logits=True).router_logits, dim=1)
    model.save_pretrained(folder)
    first = undecided(logits, TOP_K).view(sequences.shape).argmax(-1)
    index = int(((first >= 4) & (first <= 8)).nonzero()[0])
    return folder, sequences[index].tolist(), int(first[index])


@pytest.mark.parametrize(
    ("routes", "after_tie", "is_free"), [("live", 1, True), ("live", 0, False), ("replayed", 1, False)]
)
def test_only_live_routes_may_differ_and_only_after_a_tie(
    tied: tuple[Path, list[int], int], routes: str, after_tie: int, is_free: bool
) -> None:
    """The first token that may differ is the one that the tied position predicts."""
    model, tokens, position = tied
    prompt, response = tokens[:2], tokens[2:]
    rollout = torch.full((len(response),), -2.0)
    log_probs = rollout + PARITY / 2
    log_probs[position + after_tie - len(prompt) :] -= 0.1
    by_routes = {name: log_probs if name == routes else rollout for name in ("live", "replayed")}
    row: dict[str, Any] = {f"{name}_log_probs": values.tolist() for name, values in by_routes.items()}
    row |= {"prompt": prompt, "tokens": response, "rollout_log_probs": rollout.tolist()}
    share = (len(tokens) - 1 - position) / (len(tokens) - 1)  # of the positions that predict a token
    agreement = dict.fromkeys(("agreement_mean", "agreement_layer_0", "agreement_layer_1"), 1.01 - share)
    statistics = {name: agreement | {"kl_k1": 0.02} for name in by_routes}
    results = [{"TP2": {"statistics": statistics, "rows": [row]}}]
    if is_free:
        require_parity(results, model, 2, 1)
        statistics[routes]["agreement_layer_1"] = 0.99 - share
    said = rf"TP2, rank 0, {len(tokens) - 1 - position} tokens after a tie, {routes}.*'kl_k1': 0.02"
    with pytest.raises(AssertionError, match=said):
        require_parity(results, model, 2, 1)


@pytest.mark.parametrize(
    ("logits", "is_undecided"),
    [
        ([3.0, 2.0, 2.0 - 9e-6, 0.0], 1),
        ([3.0, 2.0, 2.0 - 2e-5, 0.0], 0),
        ([3.0, 3.0, 2.0, 1.0], 0),  # both are chosen
        ([3.0, 2.0, 1.0, 1.0], 0),  # neither is
    ],
)
def test_experts_are_undecided_where_the_last_chosen_ties(logits: list[float], is_undecided: int) -> None:
    clear = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert undecided(torch.stack([clear, torch.tensor(logits)])[None], top_k=2).tolist() == [is_undecided]


def _run_tool(task: Path, tables: dict[str, Any], *arguments: str, processes: int = 1) -> Any:
    toml = task / "base.toml"
    toml.write_text(tomli_w.dumps(tables))
    return python("-m", "megatron_dppo", "measure-mismatch", toml, *arguments, processes=processes)


def test_the_command_writes_what_it_shows(task: Path, tmp_path: Path) -> None:
    """A rounded engine on two processes: replay lowers the distance, and the files equal the printed table."""
    rounded = _tables(task, transformers={"weights": "bfloat16_fp8"})
    flags = ("--prompts", "8", "--set", "parallel.expert=2", "-o", str(tmp_path / "out"))
    done = _run_tool(task, rounded, *flags, processes=2)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "mismatch.json").read_text())
    live, replayed = found["live"], found["replayed"]
    assert live["ratio_min"] <= live["ratio_p001"] <= live["ratio_p01"] <= live["ratio_p50"]
    assert live["ratio_p50"] <= live["ratio_p99"] <= live["ratio_p999"] <= live["ratio_max"]
    assert 0.5 < live["agreement_mean"] < 1
    assert replayed["kl_k3"] < live["kl_k3"]
    change = found["replay_change"]
    assert change["change"] == pytest.approx(replayed["kl_k3"] / live["kl_k3"] - 1, rel=1e-6)
    assert f"95% interval over responses: {change['low']:+.0%} to {change['high']:+.0%}" in done.stdout
    rows = lines_of(tmp_path / "out" / "tokens.jsonl")
    assert (found["num_responses"], found["num_processes"]) == (24, 2) and len(rows) == 24
    assert sum(len(row["tokens"]) for row in rows) == live["num_tokens"] == replayed["num_tokens"]
    assert {len(values) for row in rows for key, values in row.items() if key != "prompt"} <= set(range(1, 11))
    assert found["config"]["rollout"]["prompts_per_rollout"] == 8
    for words in (f"{live['kl_k3']:.3e}", f"{replayed['ratio_max']:.6g}", "layer 1", "routes lowers the KL"):
        assert words in done.stdout, words
    _require_table(done.stdout, {"live": live, "replayed": replayed})
    _require_names(rows, task / "model", {"live": live, "replayed": replayed})
    assert found["rounded_weights"] == pytest.approx(_rounded(task / "model"), abs=1e-9)
    assert f"The engine's type rounds {found['rounded_weights']:.2%} of" in done.stdout
    again = _run_tool(task, rounded, *flags)
    assert again.returncode != 0
    assert "--out: found" in again.stderr and "Give another folder with -o" in again.stderr


def _rounded(model: Path) -> float:
    """Return the fraction of the weights of two expert-parallel ranks that are no bfloat16 numbers."""
    num_changed = num_weights = 0
    weights = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, each in weights.named_parameters():
        copies = 1 if ".experts." in name else 2
        num_changed += copies * int((each.bfloat16().float() != each).sum())
        num_weights += copies * each.numel()
    return num_changed / num_weights


SHOWN = {
    "|pi - mu| of a token, mean": ("abs_prob_diff_mean", "{:.3e}"),
    "|pi - mu| of a token, 99.9th percentile": ("tv_p999", "{:.3e}"),
    "|pi - mu| of a token, largest": ("tv_max", "{:.3e}"),
    "TV over the rollout's top-K, mean": ("topk_tv_mean", "{:.3e}"),
    "TV over the rollout's top-K, largest": ("topk_tv_max", "{:.3e}"),
    "KL(mu || pi), k1": ("kl_k1", "{:+.3e}"),
    "KL(mu || pi), k3": ("kl_k3", "{:.3e}"),
    "|log pi - log mu|, mean": ("log_prob_diff_mean", "{:.3e}"),
    "|log pi - log mu|, largest": ("log_prob_diff_max", "{:.3e}"),
    "pi / mu, smallest": ("ratio_min", "{:.6g}"),
    "pi / mu, 0.1th percentile": ("ratio_p001", "{:.6g}"),
    "pi / mu, 1st percentile": ("ratio_p01", "{:.6g}"),
    "pi / mu, median": ("ratio_p50", "{:.6g}"),
    "pi / mu, 99th percentile": ("ratio_p99", "{:.6g}"),
    "pi / mu, 99.9th percentile": ("ratio_p999", "{:.6g}"),
    "pi / mu, largest": ("ratio_max", "{:.6g}"),
    "experts agreed on, all layers": ("agreement_mean", "{:.4%}"),
    "experts agreed on, layer 0": ("agreement_layer_0", "{:.4%}"),
    "experts agreed on, layer 1": ("agreement_layer_1", "{:.4%}"),
}
"""The statistic and its form, by the label of a row; an indented label continues the one above it."""


def _require_table(printed: str, statistics: dict[str, Any]) -> None:
    """Each row of the table shows the statistic that it names, each column the routes that it names."""
    lines = printed[printed.index("live routes  replayed routes") :].partition("\n\n")[0].splitlines()[1:]
    shown: dict[str, list[str]] = {}
    head = ""
    for line in lines:
        label, *cells = re.split(r"\s{2,}", line.strip())
        if not line.startswith(" "):
            head = label.rpartition(", ")[0]
        shown[label if not line.startswith(" ") else f"{head}, {label}"] = cells
    assert shown == {
        label: [form.format(statistics[routes][name]) for routes in ("live", "replayed")]
        for label, (name, form) in SHOWN.items()
    }
    # All tokens are in an average; the one that is farthest may be the same by both routes.
    averages = {label for label in shown if not re.search("largest|smallest|percentile|median|layer 0", label)}
    assert len(averages) > 5 and all(len(set(shown[label])) == 2 for label in averages)


def _require_names(rows: list[dict[str, Any]], model: Path, statistics: dict[str, Any]) -> None:
    """The statistics are of the columns of tokens.jsonl; live log-probs are the trainer's, by transformers."""
    mu = torch.tensor([value for row in rows for value in row["rollout_log_probs"]], dtype=torch.float64)
    for routes, found in statistics.items():
        pi = torch.tensor([x for row in rows for x in row[f"{routes}_log_probs"]], dtype=torch.float64)
        expected = {
            "abs_prob_diff_mean": (pi.exp() - mu.exp()).abs().mean(),
            "kl_k1": (mu - pi).mean(),
            "ratio_min": (pi - mu).min().exp(),
            "ratio_max": (pi - mu).max().exp(),
        }
        for name, value in expected.items():
            assert found[name] == pytest.approx(float(value), rel=1e-3, abs=1e-6), (routes, name)
    assert statistics["replayed"]["agreement_layer_1"] > statistics["live"]["agreement_layer_1"]
    assert statistics["replayed"]["agreement_layer_0"] == statistics["live"]["agreement_layer_0"]
    reference = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    own, engines = list[float](), list[float]()
    for row in rows:
        tokens, start = torch.tensor([row["prompt"] + row["tokens"]]), len(row["prompt"])
        with torch.no_grad():
            logits = reference(tokens).logits[0, start - 1 : -1].log_softmax(-1)
        expected_ = logits.gather(1, tokens[0, start:, None])[:, 0]
        own += (torch.tensor(row["live_log_probs"]) - expected_).abs().tolist()
        engines += (torch.tensor(row["rollout_log_probs"]) - expected_).abs().tolist()
    assert torch.tensor(own).median() < 1e-4 < 1e-2 < torch.tensor(engines).median()


def test_a_model_without_experts_is_forwarded_once(task: Path, tmp_path: Path) -> None:
    end = sanity_task.VOCABULARY[sanity_task.EOS]
    sizes: dict[str, Any] = {"vocab_size": len(sanity_task.TOKENS), "eos_token_id": end}
    model = write_family(tmp_path / "dense", "Qwen3ForCausalLM", **sizes)
    for file in (task / "model").glob("token*"):
        shutil.copy(file, model)
    done = _run_tool(task, _tables(task), "--set", f"model.load={model}", "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "mismatch.json").read_text())
    assert "replayed" not in found
    assert found["live"]["log_prob_diff_max"] <= PARITY
    assert "agreement_mean" not in found["live"]
    assert "replayed routes" not in done.stdout
    assert found["rounded_weights"] == 0 and "The engine's type rounds" not in done.stdout
    assert "The model has no experts: there are no routes to replay." in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--serve",), "--serve: found rollout.engine = 'transformers'; expected 'sglang'"),
        (("--set", "model.load=/nowhere"), "model.load: found"),
        (("--set", "parallel.tensor=3"), "expected"),
        (("--prompts", "0"), "Invalid value for '--prompts'"),
        (("--engine", "sglang", "--set", "sglang.python=x"), "found no SGLang server; expected one"),
    ],
)
def test_unusable_options_are_refused_before_a_model_loads(task: Path, flags: Any, words: str) -> None:
    done = _run_tool(task, _tables(task), *flags)
    is_of_cluster = "no SGLang server" in words  # which may start later
    assert done.returncode == (1 if is_of_cluster else 2), done.stdout
    assert words in done.stderr
    assert "Traceback" not in done.stderr and "layers of the" not in done.stderr
