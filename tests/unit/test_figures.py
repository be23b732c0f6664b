"""The paper's figures: what is drawn is what was measured, and captions say what it is."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle
from typer.testing import CliRunner

from megatron_dppo.algorithms import PRESETS, preset
from megatron_dppo.analysis.figures.canvas import NARROW, Drawing, build
from megatron_dppo.analysis.figures.command import KINDS, Written, draw_figures
from megatron_dppo.analysis.figures.material import (
    Lacking,
    Material,
    TokenPairs,
    experiments_of,
    objective_of,
    read_curves,
    read_token_pairs,
)
from megatron_dppo.analysis.figures.style import LOOKS, NAMES, labels_of, look, without_paths
from megatron_dppo.analysis.figures.token_figures import (
    MOST_TOKENS,
    evaluate_mask,
    is_drawable,
    region,
    sample_tokens,
    surrogate,
)
from megatron_dppo.analysis.lines import smooth
from megatron_dppo.cli import app
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.batch_file import write_group
from megatron_dppo.data.batches.packing import pack
from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.runtime.files import write_jsonl
from megatron_dppo.types import TrainBatch
from tests.support import records
from tests.support.records import metrics_of
from tests.support.refusals import refused
from tests.support.samples import make_sample

NUM_ROLLOUTS = 12
Tables = dict[str, dict[str, Any]]


def write_run(
    path: Path,
    tables: Tables | None = None,
    *,
    seed: int = 0,
    num_rollouts: int = NUM_ROLLOUTS,
    planned: int = 100,
) -> Path:
    """A run with two gradient steps in each rollout, and a score before every fourth."""
    given: Tables = {"run": {"folder": path, "seed": seed, "num_rollouts": planned}, **(tables or {})}
    config = Config.model_validate(given).model_dump(exclude_none=True)
    noise = np.random.default_rng([seed, len(path.name)])
    with RunFolder.open(path, config, resume=False) as folder:
        for rollout in range(num_rollouts):
            for step in (2 * rollout, 2 * rollout + 1):
                folder.write_step(
                    rollout, step, {"policy/entropy": 1.0 + step, "trust_region/bad_update_fraction": 0.001}
                )
            row = {"reward/mean": noise.random(), "mismatch/abs_prob_diff_mean": noise.random() / 100}
            folder.write_rollout(rollout, row, num_rollouts=num_rollouts)
            if rollout % 4 == 0:
                folder.write_evaluation(rollout, {"eval/aime24/avg_at_4": rollout / 100})
    return path


def write_clipped(run: Path, step: int, rows: list[tuple[str, str, int, float]]) -> None:
    """A list of (preset, sign, count, mean mu), as `ClippedTokens.rows` writes it."""
    (run / "clipped_tokens").mkdir(exist_ok=True)
    of_all = {"token": "$x", "token_id": 7, "share": 1.0, "mean_pi": 0.3, "mean_entropy": 1.0, "mean_tv": 0.2}
    lines = [
        {"preset": name, "sign": sign, "count": count, "mean_mu": mu, **of_all}
        for name, sign, count, mu in rows
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "clipped_tokens" / f"step_{step:06d}.jsonl").write_text(text)


def algorithm(name: str, **fields: Any) -> Tables:
    return {"algorithm": {"preset": name, **fields}}


def drawn(name: str, folders: list[Path], tokens_at: int | None = None) -> list[Drawing] | Lacking:
    """What a kind of figure makes of these runs."""
    (kind,) = (kind for kind in KINDS if kind.name == name)
    return kind.draw(kind, Material(experiments_of(read_curves(folders)), [], tokens_at))


def only(answer: list[Drawing] | Lacking) -> Drawing:
    assert isinstance(answer, list)
    (drawing,) = answer
    return drawing


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three seeds of Binary-TV, the last of them shorter, and one of GRPO."""
    folder = tmp_path_factory.mktemp("runs")
    of_tv = [
        write_run(
            folder / f"tv_{seed}",
            algorithm("dppo_binary_tv"),
            seed=seed,
            num_rollouts=NUM_ROLLOUTS - (seed == 2),
        )
        for seed in range(3)
    ]
    return [*of_tv, write_run(folder / "grpo", algorithm("grpo_clip_higher"))]


def rewards(run: Path) -> list[float]:
    """From metrics.jsonl, by this test's own reading."""
    return [row["reward/mean"] for row in metrics_of(run, "rollout")]


def test_axes_contain_the_values_of_metrics_jsonl(runs: list[Path]) -> None:
    figure = build(only(drawn("03_stability", runs)))
    (axes,) = [axes for axes in figure.axes if axes.get_title() == "reward"]
    by_label = {line.get_label(): line for line in axes.lines}
    raw = [line for line in axes.lines if line.get_gid() == "raw"]
    np.testing.assert_allclose(np.asarray(by_label["GRPO-ClipHigher"].get_ydata()), smooth(rewards(runs[3])))
    np.testing.assert_allclose(np.asarray(raw[0].get_ydata()), rewards(runs[3]))
    together = np.mean([rewards(run)[: NUM_ROLLOUTS - 1] for run in runs[:3]], axis=0)
    np.testing.assert_allclose(np.asarray(raw[1].get_ydata()), together)
    np.testing.assert_allclose(np.asarray(by_label["DPPO-Binary-TV"].get_ydata()), smooth(together.tolist()))
    assert list(np.asarray(raw[1].get_xdata())) == list(range(1, NUM_ROLLOUTS))
    assert len(axes.collections) == 1, "three seeds have an interval, one has none"


def test_scores_are_unsmoothed_at_their_rollouts(runs: list[Path]) -> None:
    figure = build(only(drawn("03_stability", runs)))
    (axes,) = [axes for axes in figure.axes if axes.get_title() == "aime24, avg@4"]
    assert not [line for line in axes.lines if line.get_gid() == "raw"]
    for line in axes.lines:
        assert list(np.asarray(line.get_xdata())) == [0, 4, 8]
        assert list(np.asarray(line.get_ydata())) == [0.0, 0.04, 0.08]


def test_a_caption_names_runs_seeds_and_smoothing(runs: list[Path]) -> None:
    caption = " ".join(only(drawn("03_stability", runs)).caption)
    assert "DPPO-Binary-TV: seeds 0, 1, 2 (runs: tv_0, tv_1, tv_2)." in caption
    assert "GRPO-ClipHigher: seed 0 (runs: grpo)." in caption
    assert (
        "Smoothed by a local line (Gaussian of 2 points), the raw mean behind: reward; mean |π − μ|." in caption
    )
    assert "Not smoothed: aime24, avg@4." in caption
    assert "to the last rollout that all of a line's seeds have" in caption


def test_experiments_differ_by_settings_and_lines_by_trust_regions(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", algorithm("dppo_binary_tv")),
        write_run(tmp_path / "b", algorithm("dppo_binary_tv", delta=0.05)),
        write_run(tmp_path / "c", algorithm("dppo_binary_tv") | {"rollout": {"routing_replay": "replay"}}),
        write_run(tmp_path / "d", algorithm("pg_is") | {"tracking": {"samples_every": 3}}, planned=99),
        write_run(tmp_path / "e", algorithm("pg_is") | {"optimizer": {"lr": 0.5}}),
    ]
    usual, fast = experiments_of(read_curves(folders))
    labels = ["PG-IS", "DPPO-Binary-TV, δ 0.05", "DPPO-Binary-TV, δ 0.15", "DPPO-Binary-TV, δ 0.15 + R3"]
    assert [line.label for line in usual.lines] == labels
    assert [line.shade for line in usual.lines] == [0, 0, 1, 1]
    assert (usual.label, fast.label) == ("lr 1e-06", "lr 0.5")
    assert fast.settings == "optimizer.lr = 0.5"


def test_a_preset_keeps_its_colour() -> None:
    """A preset without a row in the table of looks is drawn like a custom rule."""
    assert LOOKS.keys() == NAMES.keys() <= set(PRESETS)
    own = preset("dppo_binary_tv", delta=0.3)
    assert look(own) == look(PRESETS["dppo_binary_tv"])
    assert look(own, 1)["color"] != look(own)["color"]


@pytest.mark.parametrize("name", [n for n, o in PRESETS.items() if is_drawable(o)])
def test_regions_are_the_masks_that_train(name: str) -> None:
    """Against the paper's formulas, written out again in plain numbers."""
    objective = PRESETS[name]
    for is_logarithmic in (False, True):
        own = region(objective, is_logarithmic=is_logarithmic)
        for column in range(7, own.mu.size, 39):
            for row in range(5, own.pi.size, 23):
                expected = _dropped(name, float(own.mu[column]), float(own.pi[row]))
                assert (own.drops_positive[row, column], own.drops_negative[row, column]) == expected


def _dropped(name: str, mu: float, pi: float) -> tuple[bool, bool]:
    """Whether a token with A > 0, and one with A < 0, learns nothing."""
    far = {
        "dppo_binary_tv": abs(mu - pi) > 0.15,
        "dppo_binary_kl": mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi)) > 0.05,
    }
    if name == "ipo":
        return abs(mu - pi) > 0.3, abs(mu - pi) > 0.3
    if name == "ipo_2026_08":
        return abs(mu - pi) > 0.1, abs(mu - pi) > 0.1
    if name in far:
        return far[name] and pi > mu, far[name] and pi < mu
    if name == "negative_mask":
        return False, mu - pi >= 0.5
    is_rare = mu < 0.1
    above = pi / mu > (1.2 if name == "grpo" else 1.28) and not (
        name in ("relax_high", "relax_both") and is_rare
    )
    return above, pi / mu < 0.8 and not (name in ("relax_low", "relax_both") and is_rare)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_ratio_s_surrogate_is_ppo_s_clipped_objective(advantage: float) -> None:
    ratio, value = surrogate(PRESETS["grpo"], 0.05, advantage)
    clipped = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    np.testing.assert_allclose(value, clipped - advantage, atol=2 * (ratio[1] - ratio[0]))


def test_a_mask_keeps_the_token_on_its_edge() -> None:
    mu, pi = np.asarray([0.5]), np.asarray([0.625])
    assert evaluate_mask(preset("dppo_binary_tv", delta=0.125001), mu, pi, 1.0).all()
    assert not evaluate_mask(preset("dppo_binary_tv", delta=0.124999), mu, pi, 1.0).any()


def test_anchors_are_paired_with_their_twins(tmp_path: Path) -> None:
    names = ("dppo_binary_kl", "dppo_binary_kl_decoupled", "grpo", "minirl", "pg_is")
    folders = [write_run(tmp_path / "pairs" / name, algorithm(name)) for name in names]
    axes = build(only(drawn("04_anchor", folders))).axes[0]
    labels = {line.get_label() for line in axes.lines if line.get_gid() != "raw"}
    assert labels == {"DPPO-Binary-KL", "DPPO-Binary-KL-Recompute"}, "MiniRL and grpo clip differently"
    clips = [write_run(tmp_path / name, algorithm(name)) for name in ("minirl", "grpo_clip_higher", "cispo")]
    of_clips = only(drawn("04_anchor", clips))
    assert lines_of(of_clips, "reward").keys() == {"MiniRL", "GRPO-ClipHigher"}
    assert "not among these runs" in " ".join(of_clips.caption)
    assert lines_of(only(drawn("04_anchor", [*clips, *folders])), "reward").keys() == labels


def test_bad_updates_are_percentages_and_exist_for_minimal_masks_only(tmp_path: Path) -> None:
    names = ("pg_is", "negative_mask", "grpo")
    folders = [write_run(tmp_path / name, algorithm(name)) for name in names]
    drawing = only(drawn("05_bad_updates", folders))
    axes = build(drawing).axes[1]
    lines = {str(line.get_label()): line for line in axes.lines if line.get_gid() != "raw"}
    assert lines.keys() == {"PG-IS", "Mask-0.5-Rollout"}
    np.testing.assert_allclose(np.asarray(lines["Mask-0.5-Rollout"].get_ydata()), 0.1)
    assert "bad updates" in " ".join(drawing.caption).lower()
    alone = only(drawn("05_bad_updates", folders[2:]))
    assert "are not among these runs" in " ".join(alone.caption)


def test_clipped_tokens_of_both_signs_and_all_gradient_steps_weigh_by_count(tmp_path: Path) -> None:
    """The two steps of the third rollout, of unequal counts; the lists of the 50 most frequent play no part."""
    folders = [write_run(tmp_path / name, algorithm(name)) for name in ("grpo_clip_higher", "relax_both")]
    drawing = only(drawn("06_relaxation_threshold", folders))
    assert "these runs have no clipped/num_tokens_*" in " ".join(drawing.caption)
    of_steps = {
        4: {"num_tokens_positive": 4000, "mu_mean_positive": 0.001, "num_tokens_negative": 0},
        5: {
            "num_tokens_positive": 1,
            "mu_mean_positive": 0.4,
            "num_tokens_negative": 999,
            "mu_mean_negative": 0.15,
        },
    }
    file = folders[0] / "metrics.jsonl"
    rows = records.lines_of(file)
    for row in rows:
        row |= {f"clipped/{name}": value for name, value in of_steps.get(row.get("step", -1), {}).items()}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_clipped(folders[0], 4, [("active", "+", 20, 0.9)])
    figure = build(only(drawn("06_relaxation_threshold", folders)))
    assert [axes.get_title() for axes in figure.axes] == ["reward", "μ of clipped tokens"]
    (line,) = figure.axes[1].lines
    assert list(np.asarray(line.get_xdata())) == [3.0]
    assert list(np.asarray(line.get_ydata())) == pytest.approx([(4000 * 0.001 + 0.4 + 999 * 0.15) / 5000])


def write_list(run: Path, rollout: int, positive: list[int], negative: list[int]) -> None:
    """A list of a rollout, counted from 1, with tokens named by sign and place and these counts."""
    of_all = {"preset": "active", "num_steps": 2, "mean_mu": 0.1, "mean_pi": 0.3, "mean_entropy": 1.0}
    rows = [
        {**of_all, "sign": sign, "token": f"{sign}{place}", "token_id": place, "count": count, "mean_tv": 0.2}
        | {"share": count / sum(counts), "rollout": rollout - 1}
        for sign, counts in (("+", positive), ("-", negative))
        for place, count in enumerate(counts)
    ]
    write_jsonl(run / "clipped_tokens" / f"rollout_{rollout - 1:06d}.jsonl", rows)


def bars_of(drawing: Drawing) -> dict[str, list[tuple[str, float]]]:
    """Tokens and counts of each panel, from the top down, by its title."""
    found: dict[str, list[tuple[str, float]]] = {}
    for axes in build(drawing).axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        widths = [patch.get_width() for patch in axes.patches if isinstance(patch, Rectangle)]
        found[axes.get_title()] = list(zip(names, widths, strict=True))
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_lists_are_of_one_rollout_that_every_run_has(tmp_path: Path, order: tuple[int, int]) -> None:
    """Fifty tokens of each sign, each run its own, in any order of the runs."""
    names = ("grpo_clip_higher", "cispo")
    folders = [write_run(tmp_path / name, algorithm(name)) for name in names]
    fifty = list(range(150, 100, -1))
    for rollout in (3, 6, 9):
        write_list(folders[0], rollout, fifty, [20 + rollout, 4])
    for rollout in (2, 6, 12):
        write_list(folders[1], rollout, [10 + rollout], [70 + rollout, 8, 2])
    drawings = drawn("clipped_tokens", [folders[place] for place in order])
    assert isinstance(drawings, list)
    by_name = {drawing.name: drawing for drawing in drawings}
    assert by_name.keys() == {f"clipped_tokens_{name}" for name in names}
    first, second = (by_name[f"clipped_tokens_{name}"] for name in names)
    assert first.title == "Most frequently masked tokens of rollout 6: GRPO-ClipHigher"
    assert second.title == "Most frequently masked tokens of rollout 6: CISPO"
    assert "rollout 6: the tokens (at most 50)" in first.caption[0]
    assert "Listed rollouts: 3, 6, 9." in first.caption[0]
    assert bars_of(first) == {
        "tokens with A > 0": [(f"'+{place}'", count) for place, count in enumerate(fifty)],
        "tokens with A < 0": [("'-0'", 26), ("'-1'", 4)],
    }
    assert bars_of(second) == {
        "tokens with A > 0": [("'+0'", 16)],
        "tokens with A < 0": [("'-0'", 76), ("'-1'", 8), ("'-2'", 2)],
    }
    asked = ["figures", *map(str, folders), "-o", str(tmp_path / "out"), "--tokens-at", "3"]
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 2 and not (tmp_path / "out").exists()
    assert "found 3, but " in refused.output and "Name 6." in refused.output
    assert "grpo_clip_higher lists 3, 6, 9" in refused.output and "cispo lists 2, 6, 12" in refused.output
    alone = only(drawn("clipped_tokens", folders[:1], tokens_at=9))
    assert bars_of(alone)["tokens with A < 0"] == [("'-0'", 29), ("'-1'", 4)]


def test_a_damaged_list_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "clipped_tokens").mkdir()
    (run / "clipped_tokens" / "rollout_000001.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"rollout_000001\.jsonl, line 1: "):
        drawn("clipped_tokens", [run])


def test_replay_and_its_absence_share_a_panel_in_two_colours(tmp_path: Path) -> None:
    modes = ("measure", "replay")
    folders = [
        write_run(tmp_path / name / mode, algorithm(name) | {"rollout": {"routing_replay": mode}})
        for name in ("grpo", "dppo_binary_tv")
        for mode in modes
    ]
    alone = build(only(drawn("replay_by_algorithm", folders[:2]))).axes
    assert [axes.get_title() for axes in alone] == ["aime24, avg@4"]
    both = build(only(drawn("replay_by_algorithm", folders))).axes
    assert {axes.get_title() for axes in both} == {"aime24, avg@4, GRPO", "aime24, avg@4, DPPO-Binary-TV"}
    assert both[0].get_ylim() == both[1].get_ylim()
    for axes in (*alone, *both):
        without, with_it = axes.lines
        assert str(with_it.get_label()) == f"{without.get_label()} + R3"
        assert without.get_color() != with_it.get_color()
    metrics = build(only(drawn("11_metrics", folders[:2]))).axes
    for axes in metrics:
        low, high = axes.get_ylim()
        assert high - low > 0.099 * max(abs(low), abs(high)), "noise does not fill an axis"
    assert {len({str(line.get_color()) for line in axes.lines}) for axes in metrics} == {2}
    assert isinstance(drawn("replay_by_algorithm", folders[1:3]), Lacking), "no algorithm has both"
    crossed = build(only(drawn("08_replay", folders[1:3]))).axes
    labels = [[str(line.get_label()) for line in axes.lines] for axes in crossed]
    assert labels == [["DPPO-Binary-TV"], ["GRPO + R3"]], "DPPO without R3 and GRPO with it can be compared"
    assert isinstance(drawn("01_overview", folders[:3]), Lacking), "DPPO is there on one side alone"


def test_a_panel_has_at_most_four_bands(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"{delta}_{seed}", algorithm("dppo_binary_tv", delta=delta), seed=seed)
        for delta in (0.05, 0.1, 0.15, 0.2, 0.25)
        for seed in range(2)
    ]
    many, few = only(drawn("03_stability", folders)), only(drawn("03_stability", folders[:8]))
    assert [len(axes.collections) for axes in build(few).axes] == [4] * len(few.panels)
    for axes in build(many).axes:
        marks = [line for line in axes.lines if line.get_gid() == "interval"]
        assert not axes.collections and len(marks) == 5
        assert min(min(np.asarray(line.get_xdata())) for line in marks) > 8
    said = "the interval of the last rollout alone"
    assert said in " ".join(many.caption) and said not in " ".join(few.caption)


def test_masks_that_no_run_trained_are_not_drawn(runs: list[Path], tmp_path: Path) -> None:
    assert len(only(drawn("01_mask_regions", runs[:3])).panels) == 3, "three rows of one mask"
    free = write_run(tmp_path / "free", algorithm("pg_is"))
    assert isinstance(drawn("01_mask_regions", [free]), Lacking)


def test_thresholds_need_runs_that_differ_in_them(runs: list[Path], tmp_path: Path) -> None:
    answer = drawn("thresholds", runs)
    assert isinstance(answer, Lacking) and "algorithm.delta" in answer.action
    other = write_run(tmp_path / "other", algorithm("dppo_binary_tv", delta=0.3))
    labels = {line.label for e in experiments_of(read_curves([runs[0], other])) for line in e.lines}
    assert labels == {"DPPO-Binary-TV, δ 0.15", "DPPO-Binary-TV, δ 0.3"}
    assert only(drawn("thresholds", [runs[0], other])).panels


def test_tokens_of_a_measurement_are_drawn_as_they_are(tmp_path: Path) -> None:
    row = {"rollout_log_probs": [-1.0, -2.0, "NaN"], "live_log_probs": [-1.5, -2.0, -1.0], "tokens": [1, 2, 3]}
    (tmp_path / "tokens.jsonl").write_text(json.dumps(row) + "\n")
    (pairs,) = read_token_pairs(tmp_path)
    (kind,) = (kind for kind in KINDS if kind.name == "02_engine_differences")
    ratio, difference = build(only(kind.draw(kind, Material([], [pairs])))).axes
    mu, pi = np.exp([-1.0, -2.0]), np.exp([-1.5, -2.0])
    np.testing.assert_allclose(np.asarray(ratio.collections[0].get_offsets()), np.stack([mu, pi / mu], 1))
    np.testing.assert_allclose(
        np.asarray(difference.collections[0].get_offsets()), np.stack([mu, abs(pi - mu)], 1)
    )


def test_tokens_of_kept_batches_are_of_the_newest_rollout_and_pair_mu_with_the_recomputed_policy(
    tmp_path: Path,
) -> None:
    """Of tokens in the loss; a rollout that not every rank has written is no rollout."""

    def step(seed: int) -> TrainBatch:
        sample = make_sample(list(range(9 + seed)), 2)
        m = pack([replace(sample, token_weights=torch.ones(sample.response_length))])
        mu, pi = (-torch.arange(1.0, m.tokens.numel() + 1) * scale - seed for scale in (0.25, 0.125))
        learns = torch.arange(m.tokens.numel()) % 3 == 1
        changed = replace(m, rollout_log_probs=mu, old_log_probs=pi, loss_mask=learns)
        return TrainBatch((changed,), int(learns.sum()), 1)

    for rollout, seeds in ((0, (1, 2)), (1, (3, 4)), (2, (5,))):
        for rank, seed in enumerate(seeds):
            write_group(tmp_path / "batches", rollout, (rank, 2), [step(seed)])
    (pairs,) = read_token_pairs(tmp_path)
    learning = [
        (-0.25 * (place + 1) - seed, -0.125 * (place + 1) - seed)
        for seed in (3, 4)
        for place in range(9 + seed)
        if place % 3 == 1
    ]
    assert list(zip(pairs.log_mu.tolist(), pairs.log_pi.tolist(), strict=True)) == learning
    assert pairs.source == "mini-batches of rollout 1"


def test_a_sample_of_many_tokens_is_always_the_same() -> None:
    values = np.linspace(-5, 0, 3 * MOST_TOKENS)
    pairs = TokenPairs(Path("run"), "live routes", values, values)
    first, second = sample_tokens(pairs), sample_tokens(pairs)
    assert first[0].size == MOST_TOKENS and (first[0] == second[0]).all()


@pytest.fixture(scope="module")
def written(runs: list[Path]) -> tuple[Path, Written]:
    """All that the runs suffice for."""
    out = runs[0].parent / "figures"
    return out, draw_figures(runs, out, title="tiny model")


def test_files_are_images_with_captions(written: tuple[Path, Written]) -> None:
    out, said = written
    for name in said.names:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert ElementTree.fromstring((out / f"{name}.svg").read_text()).tag.endswith("svg")
        caption = (out / f"{name}.txt").read_text()
        assert caption.startswith("tiny model.\n")
        assert ("After arXiv 2602.04879, " in caption) == (name != "01_mask_regions")
    assert {path.name.split(".")[0] for path in out.iterdir()} == {*said.names, "index"}
    missing = " ".join(said.not_drawn)
    assert "megatron-dppo measure-mismatch" in missing and "tracking.clipped_tokens_every" in missing
    for name in (
        "02_engine_differences",
        "04_anchor",
        "06_relaxation_threshold",
        "08_replay",
        "clipped_tokens",
    ):
        assert name in missing and name not in said.names


def test_the_gallery_holds_all_of_them_and_fetches_nothing(written: tuple[Path, Written]) -> None:
    out, said = written
    page = (out / "index.html").read_text()
    assert (
        page.count("<img ")
        == len(said.names)
        == page.count('max-width: 600px)" srcset="data:image/png;base64,')
    )
    assert "http" not in page and "<h1>tiny model</h1>" in page
    for name in said.names:
        assert f'id="{name}"' in page and f'href="{name}.svg"' in page
    assert page.count("<li>07_relaxation_side (Figure 7)") == 1


def test_every_figure_says_what_it_is_of_on_a_narrow_page(runs: list[Path]) -> None:
    figure = build(only(drawn("11_metrics", runs)), NARROW, "tiny model")
    assert figure.get_suptitle() == "tiny model\nEvolution of metrics"
    assert len({axes.get_position().x0 for axes in figure.axes}) == 1, "one column"


def test_runs_without_a_rollout_cannot_be_drawn(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty", num_rollouts=0)
    with refused("figures", str(empty)):
        draw_figures([empty], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="named twice"):
        draw_figures([empty, empty], tmp_path / "out")


def test_command_writes_the_requested_formats(tmp_path: Path) -> None:
    out = tmp_path / "out"
    row = {"rollout_log_probs": [-1.0], "live_log_probs": [-1.5]}
    (tmp_path / "tokens.jsonl").write_text(json.dumps(row) + "\n")
    result = CliRunner().invoke(app, ["figures", str(tmp_path), "-o", str(out), "--format", "svg"])
    assert result.exit_code == 0, result.output
    assert not list(out.glob("*.png")) and (out / "02_engine_differences.svg").is_file()
    assert "for want of data: 01_overview, 01_mask_regions, 03_stability, 04_anchor, " in result.output
    refused = CliRunner().invoke(app, ["figures", str(tmp_path), "-o", str(out), "--format", "pdf"])
    assert refused.exit_code == 2 and "--format" in refused.output


def test_an_objective_is_what_the_config_names(runs: list[Path]) -> None:
    (own, *_) = read_curves(runs[:1])
    assert objective_of(own.run) == PRESETS["dppo_binary_tv"]


RULE = "my_rules:fades"  # of no module that is there


def lines_of(drawing: Drawing, title: str) -> dict[str, Any]:
    """The curves of a panel by their label."""
    (axes,) = [axes for axes in build(drawing).axes if axes.get_title() == title]
    return {str(line.get_label()): line for line in axes.lines if line.get_gid() is None}


def test_custom_rule_is_plotted_with_a_line_per_option(tmp_path: Path) -> None:
    """In an order that neither names nor options have; each curve is its run's."""
    other = "my_rules:another"
    narrow = algorithm(RULE, rule_options={"delta": 0.05, "power": 2})
    folders = [
        write_run(tmp_path / "wide", algorithm(RULE, rule_options={"delta": 0.4, "power": 2})),
        write_run(tmp_path / "tv", algorithm("dppo_binary_tv")),
        write_run(tmp_path / "narrower", narrow, num_rollouts=11),
        write_run(tmp_path / "a", algorithm(other, rule_divergence="topk_kl", ratio_cap=5.0), seed=3),
    ]
    (experiment,) = experiments_of(read_curves(folders))
    assert experiment.label == "", "options are of the trust region, not of the experiment"
    drawing = only(drawn("03_stability", folders))
    lines = lines_of(drawing, "reward")
    own = {f"{RULE}, delta 0.4": folders[0], f"{RULE}, delta 0.05": folders[2], other: folders[3]}
    assert lines.keys() == {"DPPO-Binary-TV", *own}
    for label, run in own.items():
        np.testing.assert_allclose(np.asarray(lines[label].get_ydata()), smooth(rewards(run)))
        assert f"{label}: seed {3 * (run.name == 'a')} (runs: {run.name})." in " ".join(drawing.caption)
    presets = {look(PRESETS[name])["color"] for name in LOOKS}
    assert len({str(line.get_color()) for line in lines.values()}) == 4
    assert not {str(lines[label].get_color()) for label in own} & presets
    swept = only(drawn("thresholds", folders))
    assert swept.runs == ("narrower", "wide")
    result = CliRunner().invoke(app, ["figures", *map(str, folders), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "Runs that this figure is not about: tv, a." in (tmp_path / "out" / "thresholds.txt").read_text()
    assert RULE in (tmp_path / "out" / "01_mask_regions.txt").read_text(), "its mask is named as not drawn"


@pytest.mark.parametrize("modes", [("measure", "replay"), ("replay", "off")])
def test_every_preset_looks_unlike_itself_with_r3(modes: tuple[str, str], tmp_path: Path) -> None:
    looks = {
        (name, is_replayed): str(sorted(look(objective, is_replayed=is_replayed).items()))
        for name, objective in PRESETS.items()
        for is_replayed in (False, True)
    }
    assert len(set(looks.values())) == len(looks)
    folders = [
        write_run(tmp_path / f"{name}_{mode}", algorithm(name) | {"rollout": {"routing_replay": mode}})
        for name in ("grpo", "minirl_tis")
        for mode in modes
    ]
    lines = lines_of(only(drawn("11_metrics", folders)), "reward")
    assert len({(str(line.get_color()), str(line._dash_pattern)) for line in lines.values()}) == 4 == len(lines)


def test_runs_of_another_setting_are_drawn_and_titles_say_what_differs(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "b", algorithm("grpo") | {"model": {"dtype": "float32"}}, seed=4),
        write_run(tmp_path / "tv", algorithm("dppo_binary_tv"), seed=1),
        write_run(tmp_path / "a", algorithm("grpo"), seed=2),
        write_run(tmp_path / "c", algorithm("grpo") | {"optimizer": {"lr": 0.5}}, seed=3),
    ]
    for run in folders[0], folders[2]:
        write_clipped(run, 2, [("active", "+", 3, 0.1)])
    for name in ("03_stability", "05_bad_updates", "11_metrics"):
        answer = drawn(name, folders)
        assert isinstance(answer, list)
        assert {run for drawing in answer for run in drawing.runs} == {"a", "b", "c", "tv"}, name
        (of_b,) = [drawing for drawing in answer if drawing.runs == ("b",)]
        assert of_b.title.endswith(": dtype float32") and of_b.name == f"{name}_dtype_float32"
        curve = lines_of(of_b, "reward")["GRPO"]
        np.testing.assert_allclose(np.asarray(curve.get_ydata()), smooth(rewards(folders[0])))
    models = only(drawn("09_models", folders))
    assert len(models.panels) == 3 and set(models.runs) == {"a", "b", "c", "tv"}
    tasks = only(drawn("17_tasks", folders))
    assert tasks.title == "Training reward of GRPO against DPPO-Binary-TV" and set(tasks.runs) == {"a", "tv"}
    out = tmp_path / "out"
    written = draw_figures(folders, out, ["svg"])
    assert "Runs that this figure is not about: b, c." in (out / "17_tasks.txt").read_text()
    titles = [(out / f"{name}.txt").read_text().splitlines()[0] for name in written.names]
    assert len(set(titles)) == len(titles) == len(set(written.names)), sorted(titles)


def test_settings_with_equal_last_keys_get_distinct_labels(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", {"optimizer": {"lr": 0.5}}),
        write_run(tmp_path / "b"),
        write_run(tmp_path / "c", {"rollout": {"temperature": 0.9}}),
        write_run(tmp_path / "d", {"megatron": {"temperature": 0.9}}),
        write_run(tmp_path / "e", seed=1),
    ]
    labels = [experiment.label for experiment in experiments_of(read_curves(folders))]
    assert labels == ["lr 0.5", "usual settings", "rollout.temperature 0.9", "megatron.temperature 0.9"]


def test_two_measurements_of_one_folder_s_name_have_two_titles(tmp_path: Path) -> None:
    folders = [tmp_path / run / "mismatch" for run in ("b", "a")]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        row = {"rollout_log_probs": [-1.0 - number], "live_log_probs": [-1.5]}
        (folder / "tokens.jsonl").write_text(json.dumps(row) + "\n")
    (kind,) = (kind for kind in KINDS if kind.name == "02_engine_differences")
    answer = kind.draw(kind, Material([], [pairs for folder in folders for pairs in read_token_pairs(folder)]))
    assert isinstance(answer, list)
    titles = [f"Two engines, the same weights: {name}" for name in ("b", "a")]
    assert [drawing.title for drawing in answer] == titles
    for drawing, mu in zip(answer, (np.exp(-1.0), np.exp(-2.0)), strict=True):
        offsets = np.asarray(build(drawing).axes[0].collections[0].get_offsets())
        np.testing.assert_allclose(offsets[:, 0], [mu])


def test_a_caption_names_replaced_runs_and_missing_metrics(tmp_path: Path) -> None:
    names = [("first", "grpo"), ("second", "grpo"), ("other", "pg_is")]
    folders = [write_run(tmp_path / folder, algorithm(name)) for folder, name in names]
    lines = (folders[1] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folders[1] / "metrics.jsonl").write_text("".join(line for line in lines if '"evaluation"' not in line))
    caption = " ".join(only(drawn("03_stability", folders)).caption)
    assert "GRPO: seed 0 (runs: second)." in caption
    assert "Left out, for a later run has the same settings and seed: first." in caption
    assert "Without aime24, avg@4, which was not measured: GRPO." in caption


def two_engines(pairs: list[TokenPairs], *, is_log: bool = False) -> Drawing:
    (kind,) = (kind for kind in KINDS if kind.name == "02_engine_differences")
    return only(kind.draw(kind, Material([], pairs, is_mu_logarithmic=is_log)))


def token_pairs(mu: np.ndarray, ratio: np.ndarray, source: str = "live routes") -> TokenPairs:
    return TokenPairs(Path("run"), source, np.log(mu), np.log(mu * ratio))


def test_far_tokens_do_not_flatten_figure_2_and_are_counted() -> None:
    """Of 20,000 tokens one has ratio 100: the axes are the paper's."""
    noise = np.random.default_rng(1)
    mu, ratio = noise.uniform(0.005, 0.99, 20_000), noise.uniform(0.95, 1.05, 20_000)
    mu[7], ratio[7] = 0.009, 100.0
    drawing = two_engines([token_pairs(mu, ratio)])
    left, right = build(drawing).axes
    assert (left.get_ylim(), right.get_ylim()) == ((0.6, 1.4), (0.0, 0.1))
    assert [axes.get_xscale() for axes in (left, right)] == ["linear", "linear"]
    assert left.get_xlim() == right.get_xlim() == (0.0, 1.0)
    caption = " ".join(drawing.caption)
    assert "live routes: 1 of 20,000 tokens outside the axis of π / μ, which is from 0.6 to 1.4;" in caption
    assert "all are from 0.95 to 100." in caption
    assert "1 of 20,000 tokens outside the axis of |π − μ|, which is from 0 to 0.1;" in caption
    log = build(two_engines([token_pairs(mu, ratio)], is_log=True)).axes
    assert [axes.get_xscale() for axes in log] == ["log", "log"]
    assert log[0].get_ylim() == (0.6, 1.4)


def test_engines_that_differ_more_than_the_paper_s_have_axes_that_hold_19_of_20_tokens() -> None:
    """Rows have one axis, and far tokens of one row do not decide it."""
    mu = np.full(1000, 0.5)
    near, far = np.linspace(0.9, 1.1, 1000), np.linspace(0.5, 1.9, 1000)
    far[:5] = 2.0
    drawing = two_engines([token_pairs(mu, near), token_pairs(mu, far, "replayed routes (R3)")])
    axes = build(drawing).axes
    limits = [each.get_ylim() for each in axes]
    assert limits[0] == limits[2] and limits[1] == limits[3]
    together = np.concatenate([near, far])
    low, high = limits[0]
    assert 0.95 <= np.mean((together >= low) & (together <= high)) < 1
    assert low <= 0.6 and 1.4 < high < 1.9
    caption = " ".join(drawing.caption)
    assert caption.count("outside the axis") == 2, "of the second row alone"


def labels(*settings: dict[str, str]) -> list[str]:
    return [label for label, _ in labels_of(settings)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_title_names_the_shortest_distinguishing_setting_and_no_path(place: int) -> None:
    """Many settings differ; whichever experiment comes first."""
    common = {f"optimizer.setting_{letter}": "1" for letter in "abcdefgh"}
    tasks = [
        common | {"rollout.environment": "gem:game:Sudoku-v0-easy", "rollout.max_turns": "16"},
        dict.fromkeys(common, "22222") | {"rollout.environment": "gem:rg:acre"},
        dict.fromkeys(common, "333")
        | {"model.load": "/data/models/A/hf", "rollout.environment": "single_turn"},
    ]
    expected = ["environment gem:game:Sudoku-v0-easy", "environment gem:rg:acre", "model hf"]
    turned = tasks[place:] + tasks[:place]
    assert labels(*turned) == expected[place:] + expected[:place]


def test_labels_of_paths_have_the_parts_that_differ() -> None:
    assert without_paths(["/a/x/hf", "/b/y/hf"]) == {"/a/x/hf": "x", "/b/y/hf": "y"}
    assert without_paths(["a/x", "b/x", "a/y"]) == {"a/x": "a x", "b/x": "b x", "a/y": "a y"}
    assert without_paths(["1e-06", "0.5"]) == {"1e-06": "1e-06", "0.5": "0.5"}
