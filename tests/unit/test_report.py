"""The report: what is plotted is what was measured, and the words follow the data."""

import hashlib
import json
import math
import random
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
import pytest

import megatron_dppo.analysis as vendored
from megatron_dppo.analysis.lines import smooth
from megatron_dppo.analysis.pages import plotly_basic
from megatron_dppo.analysis.report.report import compare
from megatron_dppo.analysis.report.samples import draw
from megatron_dppo.analysis.report.summary import ROWS, summary
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.run_folder.folder import RunFolder
from tests.support.records import metrics_of

NUM_ROLLOUTS = 30


def _config(path: Path, preset: str, routing_replay: str, paired_every: int) -> dict[str, Any]:
    return Config.model_validate(
        {
            "run": {"folder": path, "num_rollouts": NUM_ROLLOUTS},
            "algorithm": {"preset": preset},
            "rollout": {"routing_replay": routing_replay},
            "tracking": {"paired_routing_every": paired_every},
        }
    ).model_dump(exclude_none=True)


def _rollout_row(noise: random.Random, rollout: int, tail: float, routed: bool) -> dict[str, float]:
    row = {
        "reward/mean": 0.35 + 0.5 * (1 - math.exp(-rollout / 10)) + noise.gauss(0, 0.02),
        "rollout/response_length_mean": 17 + noise.gauss(0, 0.05),
        "mismatch/abs_prob_diff_mean": 0.0027 + noise.gauss(0, 1e-4),
        "mismatch/kl_k1": noise.gauss(5e-4, 4e-4),
        "mismatch/kl_k3": 9e-4 * tail * math.exp(noise.gauss(0, 0.3)),
        "mismatch/ratio_max": 1 + 2 * tail * math.exp(noise.gauss(0, 0.5)),
        "mismatch/ratio_min": 0.3 / (1 + tail * math.exp(noise.gauss(0, 1))),
        "time/rollout_s": 0.4 + noise.gauss(0, 0.02),
        "time/batch_s": 0.02,
        "time/train_s": 0.61 + noise.gauss(0, 0.02),
        "time/sync_s": 0.005,
        "throughput/tokens_per_s": 8500 + noise.gauss(0, 100),
    }
    if routed:
        layers = {f"routing/agreement_layer_{n}": 0.95 - 0.01 * n + noise.gauss(0, 0.003) for n in (0, 1, 2)}
        row |= {"routing/agreement_mean": sum(layers.values()) / 3, **layers}
    return row


def _write_run(
    path: Path,
    seed: int,
    *,
    preset: str = "dppo_binary_tv",
    routing_replay: str = "off",
    paired: bool = False,
    num_rollouts: int = NUM_ROLLOUTS,
) -> Path:
    """Write a run like the quickstart's, with numbers of the same shape."""
    noise = random.Random(seed)
    with RunFolder.open(
        path, _config(path, preset, routing_replay, 5 if paired else 0), resume=False
    ) as folder:
        for rollout in range(num_rollouts):
            for step in range(4 * rollout, 4 * rollout + 4):
                drift = (step % 4) / 300
                folder.write_step(
                    rollout,
                    step,
                    {
                        "policy/entropy": 0.9 * math.exp(-rollout / 20) + noise.gauss(0, 0.01),
                        "trust_region/masked_fraction_positive": drift + noise.random() / 900,
                        "trust_region/masked_fraction_negative": 2 * drift + noise.random() / 900,
                        "loss": noise.gauss(0, 1),
                    },
                )
            row = _rollout_row(
                noise, rollout, 1.0 if routing_replay == "replay" else 3.0, routing_replay != "off"
            )
            if paired and rollout % 5 == 0:
                row |= {
                    "mismatch_live/kl_k3": 1e-3 + 1e-6 * rollout,
                    "mismatch_replayed/kl_k3": 4e-4 + 1e-5 * rollout,
                }
                row["mismatch_live/num_tokens"] = 1000 + rollout
            folder.write_rollout(rollout, row, num_rollouts=NUM_ROLLOUTS)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """R3 on, R3 measured only, and another algorithm without capture."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        _write_run(folder / "r3_on", 1, routing_replay="replay", paired=True),
        _write_run(folder / "r3_off", 2, routing_replay="measure"),
        _write_run(folder / "grpo_clip_higher", 3, preset="grpo_clip_higher"),
    ]


@pytest.fixture(scope="module")
def report(runs: list[Path]) -> Path:
    """The report on all three."""
    out = runs[0].parent / "out" / "report.html"
    compare(runs, out)
    return out


def _figures(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize(
    ("section", "panel", "metric"),
    [
        ("reward", 0, "reward/mean"),
        ("response-length", 0, "rollout/response_length_mean"),
        ("prob-diff", 0, "mismatch/abs_prob_diff_mean"),
        ("kl", 0, "mismatch/kl_k3"),
        ("kl", 1, "mismatch/kl_k1"),
        ("ratio", 0, "mismatch/ratio_max"),
        ("ratio", 1, "mismatch/ratio_min"),
        ("agreement", 0, "routing/agreement_mean"),
        ("paired", 0, "mismatch_live/kl_k3"),
        ("paired", 0, "mismatch_replayed/kl_k3"),
    ],
)
def test_plotted_points_equal_metrics_jsonl(
    report: Path, runs: list[Path], section: str, panel: int, metric: str
) -> None:
    """Each plotted number equals metrics.jsonl's, bit by bit, at its rollout."""
    traces = _figures(report.read_text())[section]["data"]
    axis = "x" if panel == 0 else f"x{panel + 1}"
    for index, run in enumerate(runs):
        rows = [row for row in metrics_of(run) if row["kind"] == "rollout" and metric in row]
        mine = [trace for trace in traces if trace["meta"] == index and trace["xaxis"] == axis]
        mine = [trace for trace in mine if not trace["name"].endswith(", smoothed")]
        if section == "paired" and mine:
            mine = [mine[0 if "live" in metric else 1]]
        assert len(mine) == bool(rows)
        for trace in mine:
            assert trace["x"] == [row["rollout"] + 1 for row in rows]
            assert trace["y"] == [row[metric] for row in rows]


@pytest.mark.parametrize(
    ("section", "axis", "metric"),
    [
        ("entropy", "x", "policy/entropy"),
        ("masked", "x", "trust_region/masked_fraction_positive"),
        ("masked", "x2", "trust_region/masked_fraction_negative"),
    ],
)
def test_step_rows_become_one_point_per_rollout(
    report: Path, runs: list[Path], section: str, axis: str, metric: str
) -> None:
    """What only step rows have is drawn as the mean of the rollout's gradient steps."""
    for index, run in enumerate(runs):
        values = [row[metric] for row in metrics_of(run, "step")]
        traces = _figures(report.read_text())[section]["data"]
        (trace, _) = [t for t in traces if t["meta"] == index and t["xaxis"] == axis]
        assert trace["x"] == list(range(1, NUM_ROLLOUTS + 1))
        assert trace["y"] == [fmean(values[i : i + 4]) for i in range(0, len(values), 4)]


def test_every_curve_is_smoothed_in_front_of_itself(report: Path, runs: list[Path]) -> None:
    """On a linear axis the values, on a logarithmic one their logarithms; the raw curve stands behind."""
    rows = metrics_of(runs[0], "rollout")
    figures = _figures(report.read_text())
    for section, metric, log in (("reward", "reward/mean", False), ("kl", "mismatch/kl_k3", True)):
        raw, before = [t for t in figures[section]["data"] if t["meta"] == 0 and t["yaxis"] == "y"]
        values = [row[metric] for row in rows]
        assert raw["y"] == values and raw["opacity"] == 0.25
        assert before["y"] == pytest.approx(smooth(values, is_log=log), rel=1e-5)
    of_rollouts = [t for id in ("entropy", "masked", "response-length", "paired") for t in figures[id]["data"]]
    names = {trace["name"] for trace in of_rollouts if len(trace["x"]) >= 10}
    assert all(f"{name.removesuffix(', smoothed')}, smoothed" in names for name in names) and names


def test_noise_does_not_fill_an_axis(report: Path) -> None:
    """Lengths of 16.9 to 17.1 tokens look flat; a reward that moves keeps its own range."""
    figures = _figures(report.read_text())
    low, high = figures["response-length"]["layout"]["yaxis"]["range"]
    assert high - low == pytest.approx(1.7, rel=0.02) and low < 16.9 < 17.1 < high
    assert "range" not in figures["reward"]["layout"]["yaxis"]
    low, high = figures["agreement"]["layout"]["yaxis"]["range"]
    assert high - low >= 0.02


def test_alarm_is_marked_at_its_rollout(tmp_path: Path) -> None:
    run = _write_run(tmp_path / "run", 5)
    rows = metrics_of(run)
    next(r for r in rows if r["kind"] == "rollout" and r["rollout"] == 12)["rollout/response_length_mean"] = (
        90.0
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compare([run], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    marks = [shape["x0"] for shape in _figures(html)["reward"]["layout"]["shapes"]]
    assert marks == [13]
    assert 'id="alarms"' in html and "<td>length_jump</td>" in html and "found 90.0; usual was" in html
    assert "run: 1 alarm (length_jump at rollout 13)" in html


def test_the_library_in_the_page_is_the_vendored_one_and_enough(report: Path) -> None:
    """The basic bundle has scatter, bar and pie; the file has the checksum in its README."""
    readme = (Path(vendored.__file__).parent / "vendored" / "README.md").read_text()
    text = plotly_basic()
    assert hashlib.sha256(text.encode()).hexdigest() in readme
    version = re.search(r"plotly.js \(basic - minified\) v(\S+)", text)
    assert version and f"version {version[1]}" in readme and "MIT license" in text[:300]
    html = report.read_text()
    assert text in html and len(html.encode()) <= 1_500_000
    types = {trace["type"] for figure in _figures(html).values() for trace in figure["data"]}
    assert types == {"scatter", "bar"}


def test_means_in_the_plots_and_the_summary(report: Path, runs: list[Path]) -> None:
    """Bars, layers and the table against plain arithmetic on the file."""
    rows = metrics_of(runs[0], "rollout")

    def mean(name: str, of: list[dict[str, Any]] = rows) -> float:
        return sum(row[name] for row in of) / len(of)

    figures = _figures(report.read_text())
    seconds = [mean(f"time/{p}_s") for p in ("rollout", "batch", "train", "sync")]
    assert figures["time"]["data"][0]["y"] == pytest.approx([100 * s / sum(seconds) for s in seconds])
    compare(runs[:1], report.parent / "alone.html")
    alone = _figures((report.parent / "alone.html").read_text())
    assert alone["time"]["data"][0]["y"] == pytest.approx(seconds)
    layers = next(t for t in figures["agreement"]["data"] if t["meta"] == 0 and t["xaxis"] == "x2")
    assert layers["x"] == [0, 1, 2]
    assert layers["y"] == pytest.approx([mean(f"routing/agreement_layer_{n}") for n in range(3)])

    numbers = summary(runs[0])
    paired = [row for row in rows if "mismatch_live/kl_k3" in row]
    tokens = [row["mismatch_live/num_tokens"] for row in paired]
    live, replayed = (
        sum(n * row[f"mismatch_{routes}/kl_k3"] for n, row in zip(tokens, paired, strict=True)) / sum(tokens)
        for routes in ("live", "replayed")
    )
    assert numbers["reward_first"] == rows[0]["reward/mean"]
    assert numbers["reward_last"] == pytest.approx(mean("reward/mean", rows[-10:]))
    assert numbers["ratio_max"] == max(row["mismatch/ratio_max"] for row in rows)
    assert numbers["ratio_min"] == min(row["mismatch/ratio_min"] for row in rows)
    assert numbers["paired_num_tokens"] == sum(tokens)
    assert numbers["paired_kl_k3_change"] == pytest.approx(replayed / live - 1)
    assert numbers["tokens_per_s"] == pytest.approx(mean("throughput/tokens_per_s"))
    assert {row.key for row in ROWS} <= numbers.keys()
    json.dumps(numbers, allow_nan=False)
    assert summary(runs[2])["agreement_mean"] is None


def test_figures_are_valid_plotly(report: Path) -> None:
    """Plotly's own validator knows every property."""
    for figure in _figures(report.read_text()).values():
        go.Figure(figure)


def test_the_words_follow_the_data(report: Path, runs: list[Path]) -> None:
    """Differences, reasons for what is missing, and what not to conclude."""
    html = report.read_text()
    text = html[: html.index("<script>")].replace("<wbr>", "")
    assert "<title>r3_on · r3_off · grpo_clip_higher</title>" in text
    assert all(f"<code>{key}</code>" in text for key in ("algorithm.preset", "rollout.routing_replay"))
    assert "<code>run.folder</code>" not in text
    assert "<code>optimizer.lr</code>" not in text
    assert "grpo_clip_higher: no routing/agreement_mean or routing/agreement_layer_&lt;n&gt;" in text
    assert "tracking.paired_routing_every is 0" in text
    assert "There is one seed per setting" in text
    assert "never by a single mini-batch" in text
    assert "the embedded engine, not of SGLang" in text
    assert "Each run has 30 rollouts" in text


def test_an_unfinished_run_alone(tmp_path: Path) -> None:
    """Live, torn, with gaps and zeros: it is drawn, and each oddity is named."""
    run = _write_run(tmp_path / "<live & 'odd'>", 5, num_rollouts=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rollout", "rollout": 3, "mismatch/kl_k3": "NaN", "reward/mean": 0.5}\n')
        file.write('{"kind": "evaluation", "rollout": 3, "eval/held_out/avg_at_1": 0.25}\n{"kind"')
    compare([run], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    figures = _figures(html)
    assert figures["kl"]["data"][0]["y"][3] is None
    assert figures["evaluation"]["data"][0]["y"] == [0.25]
    assert figures["evaluation"]["data"][0]["x"] == [3]
    assert "paired" not in figures
    assert "<live" not in html
    for words in ("1 values are not finite", "is incomplete and was left out", "has 4 of 30 rollouts"):
        assert words in html
    assert summary(run)["num_non_finite"] == 1


def test_evaluations_are_drawn_with_their_intervals(tmp_path: Path) -> None:
    run = _write_run(tmp_path / "run", 5, num_rollouts=3)
    names = ("avg_at_8", "avg_at_8_low", "avg_at_8_high", "pass_at_2", "pass_at_16", "dropped")
    with (run / "metrics.jsonl").open("a") as file:
        for rollout, values in ((0, (0.2, 0.1, 0.3, 0.4, 0.6, 0)), (3, (0.5, 0.4, 0.7, 0.8, 0.9, 1))):
            metrics = {f"eval/aime24/{name}": value for name, value in zip(names, values, strict=True)}
            file.write(json.dumps({"kind": "evaluation", "rollout": rollout, **metrics}) + "\n")
    compare([run], tmp_path / "report.html")
    figure = _figures((tmp_path / "report.html").read_text())["evaluation"]
    band, score, largest_k = figure["data"]
    assert (band["x"], band["y"], band["fill"]) == ([0, 3, 3, 0], [0.1, 0.4, 0.7, 0.3], "toself")
    assert (score["y"], largest_k["y"]) == ([0.2, 0.5], [0.6, 0.9])
    titles = [note["text"] for note in figure["layout"]["annotations"]]
    assert titles == ["eval/aime24/avg_at_8", "eval/aime24/pass_at_16"]


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    """No row yet: a report without plots, not a crash."""
    RunFolder.open(tmp_path / "new", _config(tmp_path / "new", "grpo", "off", 0), resume=False).close()
    compare([tmp_path / "new"], tmp_path / "report.html")
    assert _figures((tmp_path / "report.html").read_text()) == {}
    assert "no finished gradient step yet" in (tmp_path / "report.html").read_text()


def test_zero_divergence_is_not_lost_on_a_log_axis(tmp_path: Path) -> None:
    """A float32 engine has k3 = 0 exactly."""
    with RunFolder.open(tmp_path / "exact", {}, resume=False) as folder:
        folder.write_rollout(0, {"mismatch/kl_k3": 0.0}, num_rollouts=1)
    compare([tmp_path / "exact"], tmp_path / "report.html")
    assert "type" not in _figures((tmp_path / "report.html").read_text())["kl"]["layout"]["yaxis"]


def test_names_and_wrong_arguments(tmp_path: Path) -> None:
    """Equal folder names are distinguished by their parents; the same folder twice is refused."""
    twins = [_write_run(tmp_path / parent / "run", 1, num_rollouts=1) for parent in ("a", "b")]
    compare(twins, tmp_path / "report.html")
    assert "<title>a/run · b/run</title>" in (tmp_path / "report.html").read_text()
    with pytest.raises(ConfigError, match="twice"):
        compare([twins[0], twins[0]], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="no run folder"):
        compare([], tmp_path / "report.html")


def _shadows(step: int) -> dict[str, float]:
    """A gradient step's metrics for shadow presets and custom rules."""
    values = {"theory/surrogate": 0.01 * step, "theory/linear_term": 0.5, "theory/quadratic_term": 3.0}
    values["rule/far"] = 0.25 * step
    for name, masked in (
        ("pg_is", 0.0),
        ("grpo", 0.02 + step / 100),
        ("my:rule", 0.25),
        ("dppo_topk_tv", 0.01),
    ):
        of_preset = {"masked_fraction": masked, "agreement": 1 - masked, "dropped_mass_fraction": masked / 2}
        values |= {f"shadow/{name}/{metric}": value for metric, value in of_preset.items()}
    return values


def test_shadows_the_bound_and_noise_are_shown(tmp_path: Path) -> None:
    """A panel and a row for each preset that can mask; a caveat if the mask drops noise."""
    with RunFolder.open(tmp_path / "shadowed", {}, resume=False) as folder:
        for step in range(4):
            folder.write_step(step // 2, step, _shadows(step))
        for rollout, noise in enumerate((0.004, 0.03)):
            folder.write_rollout(rollout, {"trust_region/noise_masked_fraction": noise}, num_rollouts=2)
    plain = _write_run(tmp_path / "plain", 1, num_rollouts=2)
    compare([tmp_path / "shadowed", plain], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    figures, text = _figures(html), html[: html.index("<script>")]
    assert [trace["y"] for trace in figures["shadow"]["data"]] == [[0.025, 0.045], [0.01, 0.01], [0.25, 0.25]]
    titles = [annotation["text"] for annotation in figures["shadow"]["layout"]["annotations"]]
    assert titles == [f"{name}, mean of gradient steps" for name in ("grpo", "dppo_topk_tv", "my:rule")]
    by_place = figures["shadow-mini-steps"]["data"][0]
    assert (by_place["x"], by_place["y"]) == ([0, 1], pytest.approx([0.03, 0.04]))
    assert [trace["y"] for trace in figures["rule"]["data"]] == [[0.125, 0.625]]
    assert figures["bound"]["data"][0]["y"] == [0.005, 0.025]
    cell = 'title="would mask 3.50% of the tokens and drop 1.75% of the gradient&#39;s weight">96.50 %</td>'
    assert cell in text and "this run did not evaluate it" in text
    assert "<code>pg_is</code>" not in text and "<code>my:rule</code>" in text
    assert (
        'title="would mask 25.00% of the tokens and drop 12.50% of the gradient&#39;s weight">75.00 %</td>'
        in text
    )
    note = "shadowed: 1.7% of the tokens were masked before any update, mean of 2 rollouts (at most 3.0%)"
    assert note in text
    assert summary(tmp_path / "shadowed")["noise_masked_mean"] == pytest.approx(0.017)
    compare([plain], tmp_path / "alone.html")
    alone = (tmp_path / "alone.html").read_text()
    assert not {"shadow", "rule"} & set(_figures(alone)) and 'id="shadow-agreement"' not in alone


def test_report_separates_the_sources_of_the_mismatch(tmp_path: Path) -> None:
    """Bars and a table by source, drift by mini-step, staleness by age; nothing if a run has no drift."""
    with RunFolder.open(tmp_path / "sources", {}, resume=False) as folder:
        for rollout in range(2):
            for place in range(3):
                drift = {"kl_k3": 0.1 * (place + rollout), "tv_p999": 0.5, "ratio_min": 0.25 - 0.1 * rollout}
                values = {f"drift/{name}": value for name, value in drift.items()}
                folder.write_step(rollout, 3 * rollout + place, values | {"drift/num_tokens": 10})
            row = {"mismatch/kl_k3": 0.002, "mismatch_live/kl_k3": 0.01, "mismatch_replayed/kl_k3": 0.001}
            row |= {"mismatch_age_0/kl_k3": 0.001, "mismatch_age_2/kl_k3": 0.03 * rollout}
            seconds = {"time/paired_forward_s": 1.0 + rollout, "time/total_s": 10.0}
            folder.write_rollout(rollout, row | seconds, num_rollouts=2)
    plain = _write_run(tmp_path / "plain", 1, num_rollouts=2)
    compare([tmp_path / "sources", plain], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    figures, text = _figures(html), html[: html.index("<script>")]
    bars, of_plain = figures["mismatch-sources"]["data"]
    assert (bars["x"], bars["y"]) == ([0, 1, 2, 3], pytest.approx([0.001, 0.01, 0.002, 0.25]))
    assert of_plain["x"] == [2]
    drift = figures["drift"]["data"][0]
    assert (drift["x"], drift["y"]) == ([0, 1, 2], pytest.approx([0.05, 0.15, 0.25]))
    assert (figures["staleness"]["data"][0]["x"], figures["staleness"]["data"][0]["y"]) == (
        [0, 2],
        [0.001, 0.015],
    )
    table = text[text.index('id="mismatch-table"') : text.index('id="caveats"')]
    titles = [annotation["text"] for annotation in figures["drift"]["layout"]["annotations"]]
    assert titles == ["k3 KL", "|π − μ|, 99.9th percentile"], (
        "without Top-K log-probs there is no panel of them"
    )
    labels = re.findall(r'<th scope="row">(.*?)</th>', table[: table.index("plain")])
    assert labels == [
        "engines: replayed routes",
        "engines and routing: live routes",
        "as trained, before the first step",
        "of these, weights of age 0",
        "of these, weights of age 2",
        "after 1 gradient step",
        "after 2 gradient steps",
    ]
    cells = re.findall(r'<td class="number">(.*?)</td>', table)[5 * 11 : 6 * 11]
    assert cells == ["–", "–", "–", "0.5", "–", "0.15", "0.15", "–", "–", "–", "20"]
    assert "The paired forward took 1.5 s, 15.0% of the time of a rollout that has one." in table
    compare([plain], tmp_path / "alone.html")
    alone = (tmp_path / "alone.html").read_text()
    assert "drift" not in _figures(alone) and 'id="mismatch-table"' not in alone


def test_the_report_of_a_dense_model_asks_nothing_about_routing(tmp_path: Path) -> None:
    """Nor does the table of what differs repeat the reason for a layer spec."""
    for name, reason in (("b", "no experts"), ("a", "local")):
        config = _config(tmp_path / name, "grpo", "off", 0)
        with RunFolder.open(
            tmp_path / name, config, resume=False, decisions={"layer_spec_reason": reason}
        ) as folder:
            for rollout in range(3):
                for step in range(2 * rollout, 2 * rollout + 2):
                    drift = 0.2 * (step % 2) + (name == "a") * 0.1
                    folder.write_step(rollout, step, {"drift/kl_k3": drift, "drift/num_tokens": 10})
                folder.write_rollout(rollout, {"mismatch/kl_k3": 0.001 * (1 + rollout)}, num_rollouts=3)
    compare([tmp_path / "b", tmp_path / "a"], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    text, figures = html[: html.index("<script>")], _figures(html)
    for words in ("Routing", "routing", "Replay", "R3", "expert", "layer_spec_reason"):
        visible = re.sub(r"<pre.*?</pre>|<style.*?</style>", "", text, flags=re.DOTALL)
        assert words not in visible.replace("rollout.routing_replay", ""), words
    bars = figures["mismatch-sources"]["data"]
    assert [bar["x"] for bar in bars] == [[0, 1], [0, 1]]
    assert [bar["y"] for bar in bars] == [pytest.approx([0.002, 0.2]), pytest.approx([0.002, 0.3])]
    ticks = figures["mismatch-sources"]["layout"]["xaxis"]["ticktext"]
    assert ticks == ["before<br>the steps", "after<br>the steps"]


def test_traces_are_named_after_their_runs(tmp_path: Path) -> None:
    """Two unequal runs, in another order than their names: a swap of names, runs or colours would show."""
    runs = [
        _write_run(tmp_path / "b", 1, routing_replay="replay", paired=True, num_rollouts=12),
        _write_run(tmp_path / "a", 2, preset="grpo", routing_replay="measure", paired=True, num_rollouts=11),
    ]
    compare(runs, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    values = {
        run.name: {metric: [row[metric] for row in metrics_of(run) if metric in row] for metric in _VARIED}
        for run in runs
    }
    for section, metric, kind in _TRACES:
        traces = [
            trace
            for trace in _figures(html)[section]["data"]
            if trace["yaxis"] == "y" and not trace["name"].endswith("smoothed")
        ]
        named = {trace["name"]: trace for trace in traces if trace["name"].endswith(kind) or not kind}
        for place, name in enumerate(("b", "a")):
            trace = named[f"{name}{kind}"]
            assert (trace["meta"], trace["y"]) == (place, values[name][metric]), (section, name)
    assert values["a"]["reward/mean"] != values["b"]["reward/mean"][:11]
    legend = re.findall(r'data-run="(\d)".*?></i>(\w+)</button>', html, re.DOTALL)
    assert legend == [("0", "b"), ("1", "a")]


_TRACES = (
    ("reward", "reward/mean", ""),
    ("response-length", "rollout/response_length_mean", ""),
    ("paired", "mismatch_live/kl_k3", ""),
    ("paired", "mismatch_replayed/kl_k3", " (replayed)"),
)
_VARIED = tuple(metric for _, metric, _ in _TRACES)


def test_a_tree_of_calls_is_drawn() -> None:
    """A conversation goes straight down; branches and new conversations move to the right."""
    parents = (None, 0, 1, 1, 3, None)
    kinds = ("first", "continues", "continues", "branch", "continues", "another")
    calls = [
        {
            "kind": kind,
            "parent": parent,
            "num_prompt_tokens": 10 * number,
            "num_tokens": number,
            "is_trained": kind != "another",
            "response": f"{number}\n" + "x" * (100 if number == 4 else 1),
        }
        for number, (kind, parent) in enumerate(zip(kinds, parents, strict=True))
    ]
    assert draw(calls).splitlines() == [
        "├ 0 first, 0 -> 0 tokens: 0 x",
        "├ 1 continues, 10 -> 1 tokens: 1 x",
        "│ ├ 2 continues, 20 -> 2 tokens: 2 x",
        "│ └ 3 branch, 30 -> 3 tokens: 3 x",
        f"│ └ 4 continues, 40 -> 4 tokens: 4 {'x' * 76} …",
        "└ 5 another, 50 -> 5 tokens, not trained: 5 x",
    ]
    long = [calls[1] | {"parent": number - 1 if number else None} for number in range(3000)]
    assert len(draw(long).splitlines()) == 3000
