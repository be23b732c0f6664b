"""The report's first findings: sentences that follow the runs, and none without evidence."""

import importlib.util
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.analysis.contrasts import MIN_SEEDS, pooled_change
from megatron_dppo.analysis.lines import over_rollouts, run_names
from megatron_dppo.analysis.report.diagnostics import why_not_comparable
from megatron_dppo.analysis.report.findings import Finding, findings
from megatron_dppo.analysis.report.numbers import numbers, seed_tables
from megatron_dppo.analysis.report.report import summary_table, toggles
from megatron_dppo.analysis.report.summary import (
    difference,
    format_number,
    num_shared,
    summary,
    up_to_shared,
)
from megatron_dppo.run_folder.reader import MetricsRow, Run

Tables = Mapping[str, Mapping[str, Any]]
MEASURE: Tables = {"rollout": {"routing_replay": "measure"}}
REPLAY: Tables = {"rollout": {"routing_replay": "replay"}}


def _run(
    name: str,
    tables: Tables = MEASURE,
    *,
    seed: int = 0,
    num_rollouts: int = 30,
    reward: float = 0.8,
    length: float = 17.0,
    kl: float = 8e-4,
    masked: float = 0.01,
    tokens_per_s: float = 1000.0,
    paired: tuple[float, float] | None = None,
    host: str | None = "a",
) -> Run:
    """A run with constant metrics; pairs of KL, if given, scatter about two means."""
    noise = random.Random(seed)
    rollouts: list[MetricsRow] = []
    for n in range(num_rollouts):
        values = {"reward/mean": reward, "rollout/response_length_mean": length, "mismatch/kl_k3": kl}
        values["throughput/tokens_per_s"] = tokens_per_s
        if paired is not None:
            live, replayed = (mean * noise.uniform(0.8, 1.2) for mean in paired)
            values |= {"mismatch_live/kl_k3": live, "mismatch_replayed/kl_k3": replayed}
            values["mismatch_live/num_tokens"] = 100 + n
        rollouts.append(MetricsRow(n, None, values))
    signs = ("positive", "negative")
    masks = {f"trust_region/masked_fraction_{sign}": masked for sign in signs}
    steps = tuple(MetricsRow(n, n, masks) for n in range(num_rollouts))
    config = {"run": {"seed": seed, "num_rollouts": num_rollouts, "folder": name}, **tables}
    versions = {"host": host} if host else {}
    return Run(name, Path("/runs") / name, config, versions, steps, tuple(rollouts), ())


def _said(*runs: Run) -> dict[str, list[tuple[str, str]]]:
    """Verdicts and texts by topic."""
    found: dict[str, list[tuple[str, str]]] = {}
    for finding in findings(runs, run_names(runs)):
        found.setdefault(finding.topic, []).append((finding.verdict, finding.text))
    return found


def test_one_seed_of_r3_off_and_on() -> None:
    off = _run("m", paired=(1e-3, 4e-4), reward=0.867, masked=0.003)
    on = _run("r", REPLAY, seed=0, paired=(1e-3, 4e-4), reward=0.877, kl=4e-4, masked=0.002)
    said = _said(off, on)
    (paired, between) = said["mismatch"]
    assert paired[0] == "decided"
    assert paired[1].startswith("R3 lowered the KL between rollout and trainer on the same tokens by ")
    assert "(60 forwards of 2 runs, 95 % interval" in paired[1]
    assert between == (
        "open",
        "Mean KL of the tokens trained on: 8.0e-4 (R3 off) against 4.0e-4 (R3 on): one seed, not decided.",
    )
    rewards = "Reward, mean of the last 10: .867 (R3 off) against .877 (R3 on): one seed, not decided."
    assert said["reward"] == [("open", rewards)]
    assert said["length"] == [
        ("note", "Response length: 17.0 (R3 off) against 17.0 (R3 on): equal to within 1 %.")
    ]
    assert "masked" not in said, "the trust regions are the same: nobody asks"
    assert said["stability"] == [("note", "No run raised an alarm or skipped a gradient step in 30 rollouts.")]
    assert "speed" not in said and "length of the run" not in said


@pytest.mark.parametrize(
    ("means", "num_rollouts", "verdict", "words"),
    [
        (
            (1e-3, 2e-3),
            30,
            "decided",
            "R3 would raise the KL between rollout and trainer on the same tokens by 1",
        ),
        (
            (1e-3, 1e-3),
            30,
            "open",
            "Whether R3 lowers the KL between rollout and trainer on the same tokens is",
        ),
        ((1e-3, 4e-4), 4, "open", "tokens would be 6"),
        ((1e-3, 4e-4), 9, "open", "over 9 forwards: too few to decide"),
        (
            (1e-3, 4e-4),
            10,
            "decided",
            "R3 would lower the KL between rollout and trainer on the same tokens by",
        ),
    ],
)
def test_the_paired_forward(means: tuple[float, float], num_rollouts: int, verdict: str, words: str) -> None:
    (found,) = _said(_run("m", paired=means, num_rollouts=num_rollouts))["mismatch"]
    assert found[0] == verdict and words in found[1]


def test_the_share_of_a_recomputed_anchor() -> None:
    """The share is over all rollouts, the last of which has no such seconds; the other run has no finding."""
    seconds = {"time/anchor_s": 1.0, "time/train_s": 5.0, "time/total_s": 10.0}
    slow = {"time/anchor_s": 5.0, "time/train_s": 15.0, "time/total_s": 20.0}
    values = [seconds, slow, {name: seconds[name] for name in ("time/train_s", "time/total_s")}]
    rollouts = tuple(MetricsRow(n, None, {"reward/mean": 0.5, **each}) for n, each in enumerate(values))
    said = _said(replace(_run("recomputed"), rollouts=rollouts), _run("rollout", num_rollouts=3))
    ((verdict, text),) = said["speed"]
    shares = "recomputing log-probs took 20 % of a rollout's time and 30 % of its training; algorithm.anchor"
    assert verdict == "note" and shares in text and "about 25 % less cost without it (section 5.2)" in text


def test_no_mismatch_is_no_finding() -> None:
    """A float32 engine has KL 0: there is no share to speak of."""
    assert "mismatch" not in _said(_run("m", paired=(0.0, 0.0)))


@pytest.mark.parametrize("num_seeds", [2, MIN_SEEDS])
@pytest.mark.parametrize(("gain", "decides"), [(0.05, True), (0.0, False)])
def test_several_seeds_decide_by_their_interval(num_seeds: int, gain: float, decides: bool) -> None:
    runs: list[Run] = []
    for seed in range(num_seeds):
        own = 0.5 + 0.01 * seed
        wobble = 0.02 if seed % 2 else -0.019
        runs.append(_run(f"m{seed}", seed=seed, reward=own))
        runs.append(_run(f"r{seed}", REPLAY, seed=seed, reward=own + gain + wobble))
    ((verdict, text),) = _said(*runs)["reward"]
    if not decides:
        assert verdict in ("open", "note") and ("not decided" in text or "equal" in text)
    elif num_seeds < MIN_SEEDS:
        assert verdict == "open" and f"{num_seeds} seeds agree, too few to decide" in text
    else:
        assert verdict == "decided" and f": higher ({num_seeds} seeds, 95 % interval of the difference" in text


def test_no_finding_without_evidence() -> None:
    """Other data, few rollouts, settings that changed, seeds that no two share."""
    data = _run("b", {**REPLAY, "data": {"prompts": "other.jsonl"}}, reward=0.1)
    said = _said(_run("a"), data)
    (told,) = said["reward"]
    assert told == (
        "note",
        "The runs differ in data.prompts, so reward, length and mismatch are not compared.",
    )
    assert not said.keys() & {"mismatch", "length", "masked"}
    workers = _run("b", {**MEASURE, "data": {"reward_workers": 4}}, reward=0.1)
    assert _said(_run("a"), workers)["reward"][0][0] == "open", "processes change no reward"
    few = _said(_run("a", num_rollouts=4), _run("b", REPLAY, num_rollouts=30, reward=0.1))
    assert [text for _, text in few["reward"]] == [
        "4 rollouts are too few to compare reward, length and masked share (from 20 on)."
    ]
    apart = _said(_run("a", seed=1), _run("b", REPLAY, seed=2, reward=0.1))["reward"]
    assert apart == [
        (
            "open",
            "Reward, mean of the last 10: .800 (R3 off) against .100 (R3 on): no seed in common, not decided.",
        )
    ]
    assert findings([replace(_run("a"), rollouts=(), steps=())], ["a"]) == []


def test_speed_needs_one_machine_and_repeats() -> None:
    twice = [
        _run(f"{n}{s}", t, seed=s, tokens_per_s=v)
        for s in range(6)
        for n, t, v in (("a", MEASURE, 9.0), ("b", REPLAY, 5.0))
    ]
    assert why_not_comparable(twice) == ""
    assert _said(*twice)["speed"][0][1].startswith("Tokens per second: 9 (R3 off) against 5 (R3 on): lower (")
    assert "fewer than 6 runs" in why_not_comparable(twice[:2]) and "speed" not in _said(*twice[:2])
    elsewhere = [*twice[:-1], _run("b5", REPLAY, seed=5, host="z")]
    assert "different machines (a, z)" in why_not_comparable(elsewhere) and "speed" not in _said(*elsewhere)
    assert "not known" in why_not_comparable([_run("a", host=None), _run("b", host=None)])
    more = replace(twice[0], versions={"host": "a", "world_size": 8})
    assert "different numbers of processes" in why_not_comparable([*twice[1:], more])


def test_alarms_and_skipped_steps_are_reported() -> None:
    broken = _run("b", REPLAY)
    rows = list(broken.rollouts)
    rows[20] = replace(rows[20], values={**rows[20].values, "rollout/response_length_mean": 60.0})
    steps = (replace(broken.steps[0], values={**broken.steps[0].values, "optimizer/skipped_steps": 1.0}),)
    broken = replace(broken, rollouts=tuple(rows), steps=(*steps, *broken.steps[1:]))
    said = _said(_run("a"), broken)["stability"]
    assert said == [
        ("warning", "R3 on: 1 alarm (length_jump at rollout 21), 1 gradient step skipped; the other none.")
    ]


def test_single_run_reports_its_reward_trend() -> None:
    flat = _run("a")
    rising = replace(
        flat,
        rollouts=tuple(
            replace(row, values={**row.values, "reward/mean": 0.4 + 0.01 * row.rollout})
            for row in flat.rollouts
        ),
    )
    assert _said(rising)["reward"] == [
        ("decided", "Reward rose from .445 (first 10 rollouts) to .645 (last 10).")
    ]
    assert _said(flat)["reward"][0][0] == "open"
    rounded = replace(
        flat,
        rollouts=tuple(
            replace(row, values={**row.values, "reward/mean": 0.3 if row.rollout < 15 else 0.1 + 0.2})
            for row in flat.rollouts
        ),
    )
    assert _said(rounded)["reward"][0][0] == "open"
    assert "length of the run" in _said(replace(rising, config={"run": {"num_rollouts": 99}}))


def test_only_decided_differences_of_many_settings_are_reported() -> None:
    runs = [
        _run(
            f"{n}_{seed}",
            {"algorithm": {"delta": 0.1 * n}},
            seed=seed,
            reward=0.5 + 0.001 * seed + (n == 5) * 0.2,
        )
        for n in range(6)
        for seed in range(MIN_SEEDS)
    ]
    found = [finding for finding in findings(runs, run_names(runs)) if finding.topic == "reward"]
    assert [finding.verdict for finding in found] == ["decided", "open"]
    assert "(delta 0) against .703 (delta 0.5): higher" in found[0].text
    assert isinstance(found[1], Finding) and "comparisons with delta 0 are not decided" in found[1].text


def test_runs_are_named_by_what_differs() -> None:
    both = [_run("m"), _run("r", REPLAY)]
    assert run_names(both) == ["R3 off", "R3 on"]
    assert run_names([*both, _run("r1", REPLAY, seed=1)]) == ["R3 off", "R3 on, seed 0", "R3 on, seed 1"]
    off = _run("o", {"rollout": {"routing_replay": "off"}})
    assert run_names([*both, off]) == ["R3 off (measure)", "R3 on", "R3 off (off)"]
    presets = [_run(name, {"algorithm": {"preset": name}}) for name in ("grpo", "dppo_binary_tv")]
    assert run_names(presets) == ["grpo", "dppo_binary_tv"]
    assert run_names([_run("a"), _run("b", seed=1)]) == ["seed 0", "seed 1"]
    assert run_names([_run("a"), _run("b")]) == ["a", "b"], "nothing differs"
    several = {**REPLAY, "algorithm": {"preset": "grpo"}}
    assert run_names([_run("a"), _run("b", several)]) == ["a", "b"], "two things differ"
    assert run_names([_run("a"), _run("b", {"algorithm": {"note": 50 * "x"}, **MEASURE})]) == ["a", "b"]
    assert run_names(both[:1]) == ["m"]


def test_a_pooled_change_and_its_interval() -> None:
    weights, before, after = [1.0, 3.0, 2.0], [4.0, 8.0, 6.0], [2.0, 5.0, 1.0]
    found = pooled_change(weights, before, after)
    assert found.change == pytest.approx((1 * 2 + 3 * 5 + 2 * 1) / (1 * 4 + 3 * 8 + 2 * 6) - 1)
    assert found.low < found.change < found.high and found.num_pairs == 3
    same = pooled_change([1.0, 2.0], [4.0, 8.0], [2.0, 4.0])
    assert (same.low, same.change, same.high) == (-0.5, -0.5, -0.5)
    assert np.isnan(pooled_change([1.0], [0.0], [1.0]).change)


def test_differences_read_as_a_person_writes_them() -> None:
    assert difference(0.867, 0.877, "fraction") == "+0.010"
    assert difference(8e-4, 4e-4, "number") == "−50 %"
    assert difference(0.003, 0.087, "number") == "× 29"
    assert difference(80, 80, "count") == "=" and difference(None, 1.0, "count") == "–"
    assert difference(-0.54, -0.62, "change") == "−8 points"
    assert (format_number(-0.54, "change"), format_number(0.0012, "share")) == ("−54 %", "0.12 %")
    assert difference(0.0012, 0.0034, "share") == "+0.22 points"


def test_quickstart_picture_shows_the_runs_data(tmp_path: Path) -> None:
    """Under the first finding, the same each time, and small enough for a first page."""
    file = Path(__file__).parents[2] / "examples" / "quickstart" / "picture.py"
    spec = importlib.util.spec_from_file_location("quickstart_picture", file)
    assert spec and spec.loader
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    runs = [_run("m", paired=(1e-3, 4e-4)), _run("r", REPLAY, paired=(1e-3, 4e-4), reward=0.7)]
    for name in ("a.svg", "b.svg"):
        picture.draw(runs, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert "R3 lowered the KL" in drawn and "replayed routes (R3 on)" in drawn
    kl, reward = picture.panels(runs, ["off", "on"])
    expected = [
        (kl, "live routes (R3 off)", runs[0], "mismatch_live/kl_k3"),
        (kl, "replayed routes (R3 on)", runs[0], "mismatch_replayed/kl_k3"),
        (reward, "off", runs[0], "reward/mean"),
        (reward, "on", runs[1], "reward/mean"),
    ]
    shown = [(panel, line) for panel in (kl, reward) for line in panel.lines]
    for (panel, line), (of, label, run, metric) in zip(shown, expected, strict=True):
        (curve,) = [curve for of_curve, _, curve in panel.curves if of_curve is line]
        assert panel is of and line.label == label
        assert (curve.x.tolist(), curve.raw.tolist()) == over_rollouts(run, metric)
    assert (file.parent / "r3_off_and_on.svg").stat().st_size <= 60_000


def varied(run: Run, **metrics: Callable[[int], float]) -> Run:
    """The run with metrics that vary over its rollouts: `reward__mean` means reward/mean."""
    values = {name.replace("__", "/"): of for name, of in metrics.items()}
    rows = [
        replace(row, values={**row.values, **{name: of(row.rollout) for name, of in values.items()}})
        for row in run.rollouts
    ]
    return replace(run, rollouts=tuple(rows))


def test_difference_comes_first_and_only_replay_runs_claim_a_lower_mismatch() -> None:
    """Runs of another algorithm that measured routes: their question is not R3's."""
    grpo, tv = ({**MEASURE, "algorithm": {"preset": name}} for name in ("grpo", "dppo_binary_tv"))
    runs = [
        _run("a", tv, seed=3, paired=(1e-3, 4e-4), reward=0.4, masked=0.1),
        _run("b", grpo, seed=3, paired=(1e-3, 4e-4), reward=0.9, masked=0.2),
    ]
    found = findings(runs, run_names(runs))
    assert [finding.topic for finding in found[:2]] == ["reward", "length"]
    assert found[0].text.startswith("Reward, mean of the last 10: .400 (dppo_binary_tv) against .900 (grpo)")
    paired = [finding for finding in found if "same tokens" in finding.text]
    assert [each.text.startswith("R3 would lower the KL between") for each in paired] == [True]
    assert "; no run replayed)." in paired[0].text
    assert "Masked share, mean of both signs of the advantage: 10.00 % (dppo_binary_tv) against 20.00 %" in (
        next(finding.text for finding in found if finding.topic == "masked")
    )
    (alone,) = (finding for finding in findings(runs[:1], ["a"]) if finding.topic == "mismatch")
    assert alone.text.startswith("R3 would lower") and "; the run did not replay)." in alone.text
    few = [replace(run, rollouts=run.rollouts[:4]) for run in runs[:1]]
    assert any(" would be " in finding.text for finding in findings(few, ["a"]))
    both = [_run("m", paired=(1e-3, 4e-4)), _run("r", REPLAY, paired=(1e-3, 4e-4))]
    assert findings(both, run_names(both))[0].text.startswith("R3 lowered the KL between"), "R3 is the question"


def test_settings_of_several_seeds_are_named_by_what_differs() -> None:
    """In another order of seeds on each side, two settings apart, and with more settings than a name holds."""
    on = {**REPLAY, "algorithm": {"preset": "grpo"}}
    off = {**MEASURE, "algorithm": {"preset": "dppo_binary_tv"}}
    rewards = {"on": (0.9, 0.5, 0.7), "off": (0.2, 0.3, 0.1)}  # by seed
    order = [("on", 2), ("off", 0), ("on", 0), ("off", 1), ("off", 2), ("on", 1)]

    def runs(tables: Mapping[str, Tables]) -> list[Run]:
        return [
            _run(f"{side}/seed_{seed}", tables[side], seed=seed, reward=rewards[side][seed])
            for side, seed in order
        ]

    made = runs({"on": on, "off": off})
    ((verdict, text),) = _said(*made)["reward"]
    assert verdict == "open"
    head = (
        "Reward, mean of the last 10: .700 (grpo, R3 on) against .200 (dppo_binary_tv, R3 off): 3 seeds agree"
    )
    assert text.startswith(head)
    assert "(95 % interval of the difference −.700 to −.200)" in text
    long = {side: {**tables, "note": {"words": side * 20}} for side, tables in {"on": on, "off": off}.items()}
    assert ".700 (on) against .200 (off)" in _said(*runs(long))["reward"][0][1], "the folders' common part"
    names = run_names(made)
    assert [toggle.label for toggle in toggles(made, names)] == ["grpo, R3 on ×3", "dppo_binary_tv, R3 off ×3"]
    assert [toggle.places for toggle in toggles(made, names)] == [(0, 2, 5), (1, 3, 4)]


def test_a_longer_run_is_compared_over_the_rollouts_that_all_have() -> None:
    """Rewards rise with the rollouts, so that a run's own last ten would speak for the longer one."""
    longer = varied(_run("b", REPLAY, num_rollouts=45), reward__mean=lambda n: 0.3 + 0.01 * n)
    shorter = varied(_run("a", num_rollouts=25), reward__mean=lambda n: 0.4 + 0.01 * n)
    words = "Reward, mean of the last 10: .495 (R3 on) against .595 (R3 off): one seed, not decided."
    assert _said(longer, shorter)["reward"] == [("open", words)]
    assert [summary(run)["reward_last"] for run in up_to_shared([longer, shorter])] == pytest.approx(
        [0.495, 0.595]
    )
    assert num_shared([longer, shorter]) == 25 and num_shared([longer, longer]) is None
    cells = {row["label"]: row for row in summary_table([longer, shorter], ["b", "a"])}
    row = cells["reward, mean of the last 10"]
    assert [cell["text"] for cell in row["cells"]] == ["0.695", "0.595"] and row["difference"] == "+0.100"
    assert cells["rollouts"]["difference"] == "−20"
    seeds = [
        varied(_run(f"a{s}", seed=s, num_rollouts=25 + 9 * s), reward__mean=lambda n: n / 100) for s in (1, 0)
    ]
    tables = seed_tables(numbers(seeds, run_names(seeds)))
    assert tables is not None and tables["means"][0]["cells"][1].startswith("0.195 ["), "both up to rollout 25"


def test_warnings_of_a_run_are_findings() -> None:
    noisy = varied(
        _run("b", REPLAY),
        trust_region__noise_masked_fraction=lambda n: 0.0 if n < 7 else 0.03,
        mismatch__abs_prob_diff_mean=lambda n: 0.1 + n / 100,
        rollout__prompts_too_long=lambda n: float(n == 3) * 2,
    )
    said = _said(_run("a"), noisy)["warning"]
    assert [verdict for verdict, _ in said] == ["warning", "warning"]
    noise, too_long = (text for _, text in said)
    # of rollouts 5 to 9: 0, 0, .03, .03, .03 would be .018; the mean passes .01 with the second noisy rollout
    assert noise.startswith(
        "R3 on: from rollout 9 on the trust region sits inside the engines' noise: found 1.2%"
    )
    assert "(|pi - mu|: mean 0.18)" in noise
    assert too_long == "R3 on: 2 prompts are longer than data.max_prompt_tokens and were left out."
    assert "warning" not in _said(_run("a"), _run("b", REPLAY))
