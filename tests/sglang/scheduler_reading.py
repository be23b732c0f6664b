"""Run by SGLang's interpreter: which requests its scheduler retracts, as JSON on the last line.

The model is left out: a decode step appends a token to each running request. Admission, allocation, retraction
and the ratio of new tokens are SGLang's.
"""

import json
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.environ import envs  # type: ignore[import-not-found]
from sglang.srt.managers import schedule_policy  # type: ignore[import-not-found]
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch  # type: ignore[import-not-found]
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder  # type: ignore[import-not-found]
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import (  # type: ignore[import-not-found]
    NewTokenRatioTracker,
)
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # type: ignore[import-not-found]
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # type: ignore[import-not-found]
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache  # type: ignore[import-not-found]
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # type: ignore[import-not-found]
from sglang.srt.mem_cache.radix_cache import RadixCache  # type: ignore[import-not-found]
from sglang.srt.runtime_context import SpawnRanks, publish  # type: ignore[import-not-found]
from sglang.srt.sampling.sampling_params import SamplingParams  # type: ignore[import-not-found]
from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # type: ignore[import-not-found]

PREFILL_TOKENS = 16384  # of max_prefill_tokens, which no case reaches


class Served:
    """Requests at one server: waiting, in chunks, running, ended."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, size = case, case["max_new_tokens"] + max(case["prompts"]) + 2
        self.rows = ReqToTokenPool(case["max_running"] + 1, size, "cpu", enable_memory_saver=False)
        self.cache = TokenToKVPoolAllocator(case["cached_tokens"], torch.float32, "cpu", None, need_sort=False)
        self.tree = RadixCache(CacheInitParams(True, self.rows, self.cache, page_size=1))
        self.tracker = NewTokenRatioTracker.from_config()
        self.waiting = [self._request(*each) for each in enumerate(case["prompts"])]
        self.requests, self.chunked, self.num_steps = list(self.waiting), None, 0
        self.running = ScheduleBatch(reqs=[], batch_is_full=False)

    def _request(self, index: int, num_tokens: int) -> Req:
        params = SamplingParams(max_new_tokens=self.case["max_new_tokens"])
        return Req(str(index), "", array("q", [1] * num_tokens), params, vocab_size=8, eos_token_ids={7})

    def _batch(self, requests: list[Req]) -> ScheduleBatch:
        model = SimpleNamespace(vocab_size=8, is_encoder_decoder=False)
        return ScheduleBatch.init_new(
            requests, self.rows, self.cache, self.tree, model, False, SpeculativeAlgorithm.NONE, self.chunked
        )

    def prefill(self) -> bool:
        """Admit and compute requests as the scheduler's loop does."""
        running, chunk = self.running, self.case["chunk_tokens"]
        if (running.batch_is_full or not self.waiting) and self.chunked is None:
            return False
        adder = PrefillAdder(1, self.tree, self.cache, running, self.tracker.current, PREFILL_TOKENS, chunk)
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        for request in self.waiting:
            if adder.budget_state() == AddReqResult.OTHER:
                break
            if len(running.reqs) + len(adder.can_run_list) >= self.case["max_running"]:
                running.batch_is_full = True
            if running.batch_is_full:
                break
            request.init_next_round_input(self.tree)
            found = adder.add_one_req(request, self.chunked is not None, None)
            if found != AddReqResult.CONTINUE:
                if found == AddReqResult.NO_TOKEN:
                    running.batch_is_full = bool(adder.can_run_list) or not running.is_empty()
                break
        if not adder.can_run_list:
            return False
        self.waiting = [request for request in self.waiting if request not in adder.can_run_list]
        self.chunked = adder.new_chunked_req or self.chunked
        batch = self._batch(adder.can_run_list)
        batch.prepare_for_extend()
        for request in batch.reqs:
            if request is self.chunked:
                checkpoint_kv_cache(request, self.tree)
            else:
                checkpoint_kv_cache(request, self.tree)
                self._sample(request)
        batch.filter_batch(reqs_to_exclude=[self.chunked] if self.chunked else [])
        if not batch.is_empty():
            is_full = running.batch_is_full
            if running.is_empty():
                self.running = batch
                batch.batch_is_full = is_full
            else:
                running.merge_batch(batch)
        return True

    def _sample(self, request: Req) -> None:
        request.output_ids.append(1)
        if len(request.output_ids) == self.case["lengths"][int(request.rid)]:
            request.to_finish = None
            request.finished_reason = SimpleNamespace(to_json=dict)
            release_kv_cache(request, self.tree, checkpoint=False)

    def decode(self) -> None:
        running = self.running
        if running.check_decode_mem():
            self.tracker.decay_step()
        else:
            retracted, self.tracker.current, aborted = running.retract_decode()
            assert not aborted
            self.waiting += retracted
            running.batch_is_full = False
        running.prepare_for_decode()
        for request in running.reqs:
            self._sample(request)
        self.num_steps += 1

    def serve(self) -> dict[str, Any]:
        """Serve all requests to their end."""
        while True:
            before = self.running.batch_size()
            self.running.filter_batch()
            if self.running.batch_size() < before:
                self.running.batch_is_full = False
            if not (self.waiting or self.chunked or self.running.reqs):
                break
            if not self.prefill():
                self.decode()
        counts = [request.retraction_count for request in self.requests]
        return {"num_retractions": counts, "num_decode_steps": self.num_steps}


def constants() -> dict[str, Any]:
    """Constants of the scheduler, by the names of `plan.retraction.Policy`."""
    return {
        "initial_ratio": envs.SGLANG_INIT_NEW_TOKEN_RATIO.get(),
        "lowest_factor": envs.SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR.get(),
        "decay_steps": envs.SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS.get(),
        "most_new_tokens": schedule_policy.CLIP_MAX_NEW_TOKENS,
        "retract_steps": envs.SGLANG_RETRACT_DECODE_STEPS.get(),
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    arguments = ServerArgs(
        model_path=asked["model"],
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        load_format="dummy",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        schedule_conservativeness=asked["conservativeness"],
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    found = constants()
    schedule_policy.CLIP_MAX_NEW_TOKENS = asked["policy"]["most_new_tokens"]
    envs.SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS.set(asked["policy"]["decay_steps"])
    print(json.dumps({"constants": found, "served": [Served(case).serve() for case in asked["cases"]]}))
