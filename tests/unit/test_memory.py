"""The bound on a rollout's bytes holds, and is met where every response is as long as allowed."""

import pytest
from samples import ROUTING, make_group, make_sample

from megatron_dppo.config.schema import Config
from megatron_dppo.data.batch_file import bytes_of
from megatron_dppo.data.batches import gradient_steps
from megatron_dppo.data.memory import bytes_of_samples, rollout_bytes_bound

PROMPT, RESPONSE, PROMPTS, SAMPLES = 3, 200, 4, 2


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("length", [RESPONSE, RESPONSE // 2])
def test_the_bound_holds(epochs: int, length: int) -> None:
    config = Config.model_validate(
        {
            "data": {"max_prompt_tokens": PROMPT},
            "rollout": {
                "prompts_per_rollout": PROMPTS,
                "samples_per_prompt": SAMPLES,
                "max_response_tokens": RESPONSE,
                "num_topk_log_probs": 2,
            },
            "algorithm": {"epochs_per_rollout": epochs, "minibatches_per_rollout": 2},
        }
    )
    tokens = list(range(PROMPT + length))
    groups = [make_group(i, [make_sample(tokens, PROMPT) for _ in range(SAMPLES)]) for i in range(PROMPTS)]
    steps = gradient_steps(groups, 0, config, routing=ROUTING, rank=0, all_gather=lambda value: [value])
    held = bytes_of_samples(sample for group in groups for sample in group.samples)
    held += sum(bytes_of(step) for step in steps)
    bound = rollout_bytes_bound(config, 1, ROUTING)
    assert 0.9 * bound * length / RESPONSE < held <= bound
    assert rollout_bytes_bound(config, 2, ROUTING) * 2 == bound
    assert rollout_bytes_bound(config, 1, None) < bound
