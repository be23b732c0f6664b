"""What the CPU environment serves is what Hugging Face computes."""

import httpx2
import torch

from tests.support.serving import KEY, Served


@torch.no_grad()
def test_log_probs_equal_a_full_forward_pass(served: Served) -> None:
    prompt = [5, 6, 7, 8, 40, 41]
    sampling = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    answer = httpx2.post(
        f"{served.url}/generate", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    ).json()
    tokens = answer["output_ids"]
    expected = served.model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    found = torch.tensor([row[0] for row in answer["meta_info"]["output_token_logprobs"]])
    assert len(tokens) == 12
    assert (found - expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]).abs().max() < 5e-5
