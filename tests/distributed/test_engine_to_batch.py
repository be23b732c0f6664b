"""The loss of a run gets what its engine returned: log-probs, Top-K, routes, tokens, masks, versions, rewards.

Runs of the real loop. Both ends are recorded: the replies of the engine, and each micro-batch at the call of
the loss and in the routers. Every bit is compared. `tests/sglang` does the same with a real server.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.support.comparing import num_alike, router_choices
from tests.support.drawing_server import DrawingServer
from tests.support.trained_runs import (
    AGENT,
    ALGORITHM,
    ENGINES,
    EPOCHS,
    NUM_LAYERS,
    PROMPTS,
    SAMPLES,
    TEMPERATURE,
    TURNS,
    Run,
    make_chat_task,
    make_text_task,
)
from tests.support.trained_tokens import Found

MakeRun = Callable[..., tuple[Run, DrawingServer]]
NUM_SEQUENCES = PROMPTS * SAMPLES * EPOCHS  # of a rollout, without branches


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a model and prompts."""
    return {
        "texts": make_text_task(tmp_path_factory.mktemp("texts")),
        "chats": make_chat_task(tmp_path_factory.mktemp("chats")),
    }


@pytest.fixture
def make_run(tasks: dict[str, Path], tmp_path: Path) -> Iterator[MakeRun]:
    """Make a run of one of the tasks in the test's folder, and a server, which the run may have."""
    with ExitStack() as stack:

        def make(task: str, engine: str, **sections: dict[str, Any]) -> tuple[Run, DrawingServer]:
            (tmp_path / "run").mkdir()
            run = Run(tasks[task], tmp_path, engine, **sections)
            digits = tuple(run.tokenizer.convert_tokens_to_ids([*"0123456789"]))
            server = DrawingServer(
                num_layers=NUM_LAYERS,
                moe_layers=range(NUM_LAYERS),
                vocab_size=len(run.tokenizer),
                end_token=run.tokenizer.eos_token_id,
                tokens=digits,
            )
            if engine == "servers":
                stack.enter_context(server.running())
                run.register(server.url, "0.5.23")
            return run, server

        yield make


def require_extremes(found: Found) -> None:
    """Require probabilities near 0 and near 1, and several lengths packed into a micro-batch."""
    least, most = found.log_probs
    assert least < -4 and most > -0.01, found
    assert len(found.lengths) >= 4 and found.most_in_a_microbatch >= 3, found


@pytest.mark.parametrize("engine", ENGINES)
def test_one_turn_on_two_ranks_and_a_resume_within_a_rollout(make_run: MakeRun, engine: str) -> None:
    """Ranks exchange responses; the run is stopped after three of the four gradient steps of a rollout."""
    lag = {"lag": 1} if engine == "embedded" else {}
    run, server = make_run("texts", engine, parallel={"expert": 2, "share_prefixes": False}, rollout=lag)
    stopped = run.play(2, stop_after=3)
    assert [len(rank.steps) for rank in stopped] == [3, 3]
    found = run.require_equal(stopped, run.play(2), by_servers=server.sampled)
    require_extremes(found)
    assert found.num_sequences == 2 * NUM_SEQUENCES and found.num_shared == 0
    assert found.versions == ({(0,)} if lag else {(0,), (1,)})


@pytest.mark.parametrize("engine", ENGINES)
def test_several_turns_with_shared_prefixes(make_run: MakeRun, engine: str) -> None:
    """Observations lie between the responses; a prefix that responses have in common is forwarded once."""
    run, server = make_run("texts", engine, rollout=TURNS, parallel={"share_prefixes": True})
    found = run.require_equal(run.play(1), by_servers=server.sampled)
    require_extremes(found)
    assert found.num_sequences == 2 * NUM_SEQUENCES and found.num_shared > 0
    assert max(found.num_calls) == 3 and found.versions == {(0,), (1,)}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_branch_of_an_agent(make_run: MakeRun, engine: str) -> None:
    """Two leaves of each episode train, their common call once, and the title does not; on two ranks."""
    run, server = make_run("chats", engine, rollout=AGENT, parallel={"expert": 2, "share_prefixes": True})
    found = run.require_equal(run.play(2), by_servers=server.sampled)
    require_extremes(found)
    assert found.num_sequences == 2 * 2 * NUM_SEQUENCES and found.num_shared > 0
    assert found.num_calls == {2} and found.versions == {(0,), (1,)}


def test_responses_that_pushes_interrupt(make_run: MakeRun) -> None:
    """Old tokens keep what they were sampled with, new ones have the new weights; stopped and resumed."""
    ahead = {"max_staleness": 1, "over_sampling": 2.0}
    algorithm = ALGORITHM | {"loss_from": "logits"}
    run, server = make_run("texts", "servers", run={"num_rollouts": 3}, rollout=ahead, algorithm=algorithm)
    server.holds = lambda name: int(name.partition("+")[0].removeprefix("place")) >= PROMPTS and name[-1] == "1"
    stopped = run.play(1, stop_after=5)
    found = run.require_equal(stopped, run.play(1), by_servers=server.sampled, is_complete=False)
    require_extremes(found)
    assert found.num_sequences == 3 * NUM_SEQUENCES and server.num_held > 0
    assert {(0, 1), (1, 2)} & found.versions and 2 in found.num_calls


@torch.no_grad()
def test_log_probs_of_engine_and_trainer_equal_hugging_face_at_the_temperature(
    make_run: MakeRun, tasks: dict[str, Path], tmp_path: Path
) -> None:
    """Of both rollouts, each with the weights whose version its tokens have."""
    run, _ = make_run("texts", "embedded")
    (seen,) = run.play(1, keeps_weights=True)
    run.require_equal([seen])
    assert sorted(seen.weights) == [0, 1, 2]
    assert any((seen.weights[1][name] != values).any() for name, values in seen.weights[0].items())
    steps_of_rollout = len(seen.steps) // 2
    for version in (0, 1):
        folder = shutil.copytree(tasks["texts"] / "model", tmp_path / f"version_{version}")
        weights = {name: torch.from_numpy(values) for name, values in seen.weights[version].items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        float32, float64 = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
            for dtype in (torch.float32, torch.float64)
        )
        errors: dict[str, list[float]] = {name: [] for name in ("mu", "best of mu", "pi", "Hugging Face")}
        for microbatch in seen.steps[version * steps_of_rollout]:
            for _, rows in microbatch.sequences():
                columns = {name: torch.from_numpy(each[rows]) for name, each in microbatch.columns.items()}
                tokens = torch.from_numpy(microbatch.tokens[rows])
                pi = torch.from_numpy(microbatch.log_probs[rows])
                with router_choices(float32) as choices:
                    rounded = (float32(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
                exact = (float64(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
                assert microbatch.routes is not None
                routes = torch.from_numpy(microbatch.routes[rows][:-1]).long()
                learns = columns["loss_mask"].clone()
                learns[num_alike(routes, choices) :] = False  # after a tie of experts all differs
                ids = torch.cat([columns["targets"][:, None], columns["topk.ids"].long()], dim=1)[learns]
                mu, topk = columns["rollout_log_probs"][learns, None], columns["topk.log_probs"][learns]
                wanted = exact[learns].gather(1, ids)
                for name, found, expected in (
                    ("mu", torch.cat([mu, topk], dim=1), wanted),
                    ("best of mu", topk, exact[learns].topk(topk.shape[1]).values),
                    ("pi", pi[learns, None], wanted[:, :1]),
                    ("Hugging Face", rounded[learns].gather(1, ids), wanted),
                ):
                    errors[name] += (found - expected).abs().flatten().tolist()
                assert set(columns["weight_versions"][learns].tolist()) <= {version}
        assert len(errors["pi"]) > 50
        worst = {name: max(each) for name, each in errors.items()}
        limit = 5 * worst.pop("Hugging Face")  # of float32 against float64, of the same model
        assert max(worst.values()) <= limit, (limit, worst)
