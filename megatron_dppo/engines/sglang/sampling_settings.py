"""Lists SGLang's settings that change which tokens are sampled or what a returned log-prob means.

The tables come from the sources of 0.5.22 and 0.5.23: server arguments, environment variables and
sampling parameters. The package sets a setting (`SET`), refuses it (`REFUSED_ARGUMENTS`, `REFUSED_VARIABLES`),
or sends it in each request (`sampling_parameters`). `check`, the servers that the package starts, and the facts
that any server reports are compared with the same tables.

Settings of precision and of kernels are not listed: dtype, quantization, kv_cache_dtype, attention_backend, ...
A server with such settings still samples from the distribution of the log-probs that it returns, and
`measure-mismatch` reports how far this is from the trainer's distribution. The same is true for speculative
decoding with acceptance thresholds of 1.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from megatron_dppo.errors import Problem

SET: Mapping[str, str] = MappingProxyType(
    {
        "random_seed": "run.seed",
        "weight_version": "the weight sync",
        "enable_return_routed_experts": "rollout.routing_replay",
        "enable_memory_saver": "rollout.sglang.colocated",
        "skip_tokenizer_init": "the client, which sends and reads token ids",
        "preferred_sampling_params": "[rollout]",
        "sampling_defaults": "the client, which names every sampling parameter",
        "config": "[sglang], whose arguments are checked",
        "api_key": "$MEGATRON_DPPO_SGLANG_API_KEY",
        "admin_api_key": "$MEGATRON_DPPO_SGLANG_API_KEY",
        "log_requests": "the client, whose requests are long",
    }
)
"""Server arguments that the package sets or leaves out, and where each value comes from."""


@dataclass(frozen=True)
class Setting:
    """A setting that is refused for its effect, unless it is unset or has a neutral value."""

    effect: str
    neutral: tuple[Any, ...] = (False, None, "", "null")


_OTHER_MODEL = "the server would serve another model than model.load describes"
_OLD_CACHE = "it keeps keys and values outside the server, and a push does not remove the old ones"
_OTHER_TOKENS = "tokens would be drawn from another distribution than the model's"
REFUSED_ARGUMENTS: Mapping[str, Setting] = MappingProxyType(
    {
        "speculative_accept_threshold_single": Setting(_OTHER_TOKENS, (1.0, None)),
        "speculative_accept_threshold_acc": Setting(_OTHER_TOKENS, (1.0, None)),
        "enable_watermark": Setting(_OTHER_TOKENS),
        "watermark_config": Setting(_OTHER_TOKENS, ("", None, "<redacted>")),  # as reported for any value
        "enable_strict_thinking": Setting(_OTHER_TOKENS),
        "dllm_algorithm": Setting("tokens would not be sampled one after the other"),
        "rl_on_policy_target": Setting("log-probs would be rounded to bfloat16"),
        "allow_auto_truncate": Setting("prompts would be truncated silently"),
        "json_model_override_args": Setting(_OTHER_MODEL, ("{}", "", None, {})),
        "decrypted_config_file": Setting(_OTHER_MODEL),
        "modelopt_checkpoint_restore_path": Setting(_OTHER_MODEL),
        "kt_weight_path": Setting(_OTHER_MODEL),
        "kt_max_deferred_experts_per_token": Setting(_OTHER_MODEL, (0, None)),
        "forward_hooks": Setting(_OTHER_MODEL, ([], "", "[]", None)),
        "hicache_storage_backend": Setting(_OLD_CACHE),
        "enable_lmcache": Setting(_OLD_CACHE),
        "enable_flexkv": Setting(_OLD_CACHE),
        "enable_unified_cache_external_linker": Setting(_OLD_CACHE),
    }
)
"""Refused server arguments."""

_OFF = ("", "0", "false", "no", "n", "off")
_UNTRIED = "another front end, which is untested, would read the requests"
_FAULTS = "it injects faults for tests of SGLang"
REFUSED_VARIABLES: Mapping[str, Setting] = MappingProxyType(
    {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": Setting("log-probs would lack the temperature of the request", _OFF),
        "SGLANG_SANITIZE_NAN_LOGITS": Setting("broken weights would produce responses that look valid", _OFF),
        "SGLANG_MAX_NEW_TOKENS_LIMIT": Setting("responses would end before rollout.max_response_tokens", ("",)),
        "SGLANG_MAX_THINK_TOKENS": Setting(_OTHER_TOKENS, ("", "-1")),
        "SGLANG_NGRAM_FORCE_GREEDY_VERIFY": Setting(_OTHER_TOKENS, _OFF),
        "SGLANG_FP8_IGNORED_LAYERS": Setting("other linears would be quantised than a push quantises", ("",)),
        "SGLANG_FORCE_FP8_MARLIN": Setting(
            "weights would be repacked, and a push could not replace them", _OFF
        ),
        "SGLANG_USE_MLX": Setting("tokens would be chosen greedily", _OFF),
        "SGLANG_RUST_SERVER": Setting(_UNTRIED, _OFF),
        "SGLANG_HTTP_SERVER_APP_PATH": Setting(_UNTRIED, ("", "sglang.srt.entrypoints.http_server:app")),
        "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": Setting("headers would replace fields of requests", _OFF),
        "SGLANG_EXTERNAL_MODEL_PACKAGE": Setting(_OTHER_MODEL, ("",)),
        "SGLANG_SKIP_SOFTMAX_*": Setting("attention would leave tokens out", ("", "0", "0.0")),
        "SGLANG_DEBUG_REVERT_PR": Setting("it reverts bug fixes of SGLang", ("", "0")),
        "SGLANG_SIMULATE_*": Setting(_OTHER_TOKENS, (*_OFF, "-1", "-1.0", "match-expected", "fixed")),
        "SGLANG_DSPARK_SIMULATE_*": Setting(_OTHER_TOKENS, _OFF),
        "SGLANG_KV_CANARY_PERTURB_*": Setting(_FAULTS, (*_OFF, "0.0")),
        "SGLANG_TEST_*": Setting(_FAULTS, _OFF),
    }
)
"""Refused environment variables; `*` matches any end of a name. SGL_X is the same as SGLANG_X."""

_RETRACT = "SGLANG_TEST_RETRACT"  # retracts requests like a full cache, which does not change the sampling

SET_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health then generates no token
        "SGLANG_EXPOSE_OWN_ENV_VARS": "1",  # /server_info then lists them, except for likely secrets
        "TOKENIZERS_PARALLELISM": "false",
    }
)
"""Environment variables of the servers that the package starts."""

UNUSED_PARAMETERS: Mapping[str, Any] = MappingProxyType(
    {
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "min_new_tokens": 0,
        "n": 1,
        "beam_width": None,
        "stop": None,
        "stop_regex": None,
        "no_stop_trim": False,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "stream_interval": None,
        "custom_params": None,
        "watermark": None,
    }
)
"""Sampling parameters that each request sends with a value that has no effect."""


def sampling_parameters(
    *, num_tokens: int, temperature: float, top_p: float, end_tokens: tuple[int, ...], seed: int
) -> dict[str, Any]:
    """Return all sampling parameters of a request, so that server and generation_config.json add none.

    Args:
        num_tokens: Largest number of tokens.
        temperature: Temperature; 0 decodes greedily.
        top_p: Nucleus size; 1 means no cut.
        end_tokens: Tokens that end the response; if empty, no token does.
        seed: Seed from `seed_of`; only servers with enable_deterministic_inference use it.
    """
    return {
        "max_new_tokens": num_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stop_token_ids": list(end_tokens),
        "ignore_eos": not end_tokens,
        "sampling_seed": seed,
        **UNUSED_PARAMETERS,
    }


def seed_of(noise_key: tuple[int, int, int]) -> int:
    """Return the seed of a sample's noise from (seed, rollout, sample), an integer from 0 to 2^63 - 1.

    SGLang adds the token's position, so a response resumes with the same noise after an interruption.
    """
    digest = hashlib.blake2b(repr(noise_key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def argument_problems(table: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each argument of an `[sglang]` table that the package sets or refuses."""
    for name, value in table.items():
        found = name if name.endswith("api_key") else f"{name} = {value!r}"
        if name in SET:
            action = f"Remove it from [sglang]; it is set by {SET[name]}."
            yield Problem(f"sglang.{name}", found, "an argument that the package does not set", action)
        elif name in REFUSED_ARGUMENTS and value not in REFUSED_ARGUMENTS[name].neutral:
            action = f"Remove it from [sglang]: {REFUSED_ARGUMENTS[name].effect}."
            yield Problem(f"sglang.{name}", found, _neutral(REFUSED_ARGUMENTS[name]), action)


def variable_problems(environment: Mapping[str, str], where: str = "the environment") -> Iterator[Problem]:
    """Yield a problem for each environment variable that must not reach a server.

    Args:
        environment: Environment variables of a process.
        where: Name of the process or environment in the problem.
    """
    for name, value in sorted(environment.items()):
        setting = _variable(name)
        if setting is not None and value.strip().lower() not in setting.neutral:
            yield Problem(where, f"{name}={value}", "no such variable", f"Unset {name}: {setting.effect}.")


def reported_problems(server_info: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each setting in a server's /server_info that changes the sampling.

    A server reports its environment only if it was started with SGLANG_EXPOSE_OWN_ENV_VARS=1, which the package
    sets for its own servers.
    """
    where, action = "/server_info", "Start the server with megatron-dppo serve, or without this setting: {}."
    if server_info.get("preferred_sampling_params"):
        found = f"preferred_sampling_params = {server_info['preferred_sampling_params']!r}"
        yield Problem(where, found, "none", action.format(_OTHER_TOKENS))
    if server_info.get("frontend", "python") != "python":
        yield Problem(where, f"frontend = {server_info['frontend']!r}", "'python'", action.format(_UNTRIED))
    for name, setting in REFUSED_ARGUMENTS.items():
        value = server_info.get(name)
        if value not in setting.neutral:
            yield Problem(where, f"{name} = {value!r}", _neutral(setting), action.format(setting.effect))
    for state in server_info.get("internal_states") or ():
        variables = cast(Mapping[str, Any], state).get("env_vars") if isinstance(state, Mapping) else None
        if isinstance(variables, Mapping):
            texts = {str(name): str(value) for name, value in cast(Mapping[Any, Any], variables).items()}
            yield from variable_problems(texts, "the server's environment")


def _variable(name: str) -> Setting | None:
    name = "SGLANG_" + name.removeprefix("SGL_") if name.startswith("SGL_") else name
    if name.startswith(_RETRACT):
        return None
    found = REFUSED_VARIABLES.get(name)
    starred = ((key[:-1], setting) for key, setting in REFUSED_VARIABLES.items() if key.endswith("*"))
    return found or next((setting for start, setting in starred if name.startswith(start)), None)


def _neutral(setting: Setting) -> str:
    value = setting.neutral[0]
    return "nothing" if value in (False, "", []) else f"{value!r}"
