"""`check` remarks on settings that go against a finding of the paper, once each, and refuses none of them."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.checks import remarks
from megatron_dppo.cli import app
from megatron_dppo.config import Config, load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES / "guides" / "what_the_paper_found.md"

TAKEAWAY_1 = "section 5, Takeaway 1"
TAKEAWAY_2 = "section 5.2, Takeaway 2"
TAKEAWAY_3 = "section 5.3, Takeaway 3"
MINIMAL_MASK = "stable with 0.5 and collapsed with 0.8 (section 5.3)"
TRUNCATION = "section 5.4"
BY_MEAN = "section 4.1, Appendix D"
LORA = "Table 1, Appendix F"
TOPK = "Appendix G.2"
REPLAY = "section 7"
OF_THE_PAPER = (TAKEAWAY_1, TAKEAWAY_2, TAKEAWAY_3, MINIMAL_MASK, TRUNCATION, BY_MEAN, LORA, TOPK, REPLAY)


def config_of(*settings: str) -> Config:
    """Return the default config with settings such as `lora.rank=8`, values as in TOML."""
    tables: dict[str, Any] = {}
    for setting in settings:
        for name, table in tomllib.loads(setting).items():
            tables.setdefault(name, {}).update(table)
    return Config.model_validate(tables)


def cited(config: Config) -> list[str]:
    """Return the places of the paper that the remarks of a config cite, one for each remark."""
    places = []
    for remark in remarks(config):
        (place,) = (place for place in OF_THE_PAPER if place in remark)
        places.append(place)
    return places


def with_preset(name: str, *settings: str) -> tuple[str, ...]:
    return (f'algorithm.preset = "{name}"', *settings)


RECOMPUTED = 'algorithm.anchor = "recomputed"'
ONE_STEP = "algorithm.minibatches_per_rollout = 1"
BY_STD = "algorithm.normalize_advantage_std = true"
REPLAYED = 'rollout.routing_replay = "replay"'
MEAN_OF_MEANS = 'algorithm.aggregation = "seq_mean_token_mean"'


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ((), []),
        (with_preset("dppo_binary_kl", REPLAYED), []),
        # No trust region: no rule, or a rule that never acts.
        (with_preset("pg_is"), [TAKEAWAY_1]),
        (with_preset("cispo"), [TAKEAWAY_1]),
        (with_preset("dppo_binary_kl", "algorithm.delta = inf"), [TAKEAWAY_1]),
        (with_preset("grpo", "algorithm.eps_low = inf", "algorithm.eps_high = inf"), [TAKEAWAY_1]),
        (with_preset("relax_both", "algorithm.alpha = inf"), [TAKEAWAY_1]),
        (with_preset("relax_both", "algorithm.alpha = 0.9"), []),
        (with_preset("relax_high", "algorithm.alpha = inf", "algorithm.eps_low = inf"), [TAKEAWAY_1]),
        (with_preset("negative_mask", "algorithm.delta = inf"), [TAKEAWAY_1]),
        (with_preset("ipo", "algorithm.delta = inf"), [TAKEAWAY_1]),
        (with_preset("cppo", "algorithm.delta = inf"), [TAKEAWAY_1]),
        (with_preset("trm", "algorithm.token_kl = inf", "algorithm.response_kl = inf"), [TAKEAWAY_1]),
        (with_preset("trm", "algorithm.token_kl = inf"), []),
        (with_preset("sapo", "algorithm.tau_low = 0", "algorithm.tau_high = 0", MEAN_OF_MEANS), [TAKEAWAY_1]),
        (with_preset("sapo", MEAN_OF_MEANS), []),
        # One side without a bound.
        (("algorithm.delta_low = inf",), [TAKEAWAY_3]),
        (("algorithm.delta_high = inf",), []),
        (with_preset("grpo_clip_higher", "algorithm.eps_low = inf"), [TAKEAWAY_3]),
        (with_preset("relax_low", "algorithm.alpha = inf"), [TAKEAWAY_3]),
        (with_preset("relax_high", "algorithm.alpha = inf"), []),
        (with_preset("negative_mask"), []),
        (with_preset("negative_mask", "algorithm.delta = 0.7"), [MINIMAL_MASK]),
        # The anchor.
        ((RECOMPUTED,), [TAKEAWAY_2]),
        (with_preset("minirl"), [TAKEAWAY_2]),
        (with_preset("minirl", 'algorithm.anchor = "rollout"'), []),
        (with_preset("dppo_binary_kl_decoupled"), [TAKEAWAY_2]),
        (with_preset("pg_is", RECOMPUTED), [TAKEAWAY_1, TAKEAWAY_2]),
        ((RECOMPUTED, ONE_STEP), [TAKEAWAY_1, TAKEAWAY_2]),
        ((RECOMPUTED, ONE_STEP, "algorithm.epochs_per_rollout = 2"), [TAKEAWAY_2]),
        ((ONE_STEP,), []),
        (with_preset("icepop", MEAN_OF_MEANS), []),  # which compares trainer and engine too
        # Truncation.
        (("algorithm.ratio_cap = 4.5",), [TRUNCATION]),
        (("algorithm.ratio_cap = 5",), []),
        (("algorithm.ratio_cap = 20",), []),
        (with_preset("cispo", "algorithm.ratio_cap = inf"), [TAKEAWAY_1]),
        (with_preset("minirl_tis"), [TAKEAWAY_2, TRUNCATION]),
        # Advantages, adapters, Top-K, R3.
        ((BY_STD,), [BY_MEAN]),
        (with_preset("grpo", BY_STD), [BY_MEAN]),
        (with_preset("gspo", BY_STD, MEAN_OF_MEANS), []),  # of another paper, which divides
        (("lora.rank = 4", "optimizer.lr = 5e-7"), [LORA]),
        (("lora.rank = 4",), [LORA]),  # with the default learning rate
        (("lora.rank = 4", "optimizer.lr = 2e-5"), []),
        (("optimizer.lr = 5e-7",), []),
        (with_preset("dppo_topk_kl"), [TOPK]),
        (("rollout.num_topk_log_probs = 20",), []),
        (with_preset("cppo_topk"), []),
        (with_preset("grpo_clip_higher", REPLAYED), [REPLAY]),
        (with_preset("grpo_clip_higher", 'rollout.routing_replay = "measure"'), []),
        (with_preset("cispo", REPLAYED), [TAKEAWAY_1, REPLAY]),
        # Shadow presets train nothing.
        (('tracking.shadow_presets = ["pg_is", "dppo_topk_tv"]',), []),
    ],
)
def test_a_setting_against_a_finding_is_remarked_on(settings: tuple[str, ...], places: list[str]) -> None:
    assert cited(config_of(*settings)) == places


def test_check_prints_the_remark_and_refuses_nothing_for_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'{RECOMPUTED}\n[model]\nload = "none"\n[data]\nprompts = "none"\nreward = "math"\n')
    shown = CliRunner().invoke(app, ["check", str(file), "--set", "algorithm.ratio_cap=2"])
    (anchor,) = re.findall(r"^note: algorithm.anchor is 'recomputed'.*$", shown.output, re.MULTILINE)
    (cap,) = re.findall(r"^note: algorithm.ratio_cap is 2: .*$", shown.output, re.MULTILINE)
    assert anchor.endswith(f"({TAKEAWAY_2}).") and TRUNCATION in cap
    problems = re.findall(r"^- (\S+):", shown.output, re.MULTILINE)
    assert problems and not any(key.startswith("algorithm.") for key in problems)


@pytest.mark.parametrize(
    "overlay",
    sorted(EXAMPLES.glob("*/dppo_binary_[tk]?.toml")),
    ids=lambda file: f"{file.parent.name}/{file.stem}",
)
def test_dppo_binary_of_an_experiment_goes_against_nothing(overlay: Path) -> None:
    assert remarks(load_config([overlay.parent / "base.toml", overlay])) == []


def rows_of_the_page() -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return rows[1:]


def test_the_page_names_the_settings_that_are_remarked_on() -> None:
    found: set[str] = set()
    for _, place, settings, _ in rows_of_the_page():
        for alternative in settings.split("; ") if settings != "-" else ():
            remarked = cited(config_of(*re.findall(r"`([a-z.]+\.\w+ = [^`]+)`", alternative)))
            assert len(remarked) == 1, alternative
            (cites,) = remarked
            assert cites == MINIMAL_MASK or place.startswith(cites), alternative
            found.update(remarked)
    assert found == set(OF_THE_PAPER)


def test_the_page_names_files_of_the_experiments() -> None:
    for *_, experiments in rows_of_the_page():
        for folder, names in re.findall(
            r"\]\(\.\./(\w+)/README\.md\)(?:: ((?:`[^`]+`(?:, )?)+))?", experiments
        ):
            for name in re.findall(r"`([^`]+)`", names):
                assert list((EXAMPLES / folder).glob(f"{name}.toml")), (folder, name)
