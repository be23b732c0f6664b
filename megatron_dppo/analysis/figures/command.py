"""`megatron-dppo figures`: run folders in; figures, captions and a gallery out."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dppo.analysis.figures import broader, stability, token_figures
from megatron_dppo.analysis.figures.canvas import NARROW, Drawing, Format, build, render
from megatron_dppo.analysis.figures.material import (
    TOKENS,
    Kind,
    Lacking,
    Material,
    experiments_of,
    read_curves,
    read_token_pairs,
)
from megatron_dppo.analysis.pages import page_templates
from megatron_dppo.errors import ConfigError, Problem, writing_to

FORMATS: tuple[Format, ...] = ("png", "svg")

KINDS: tuple[Kind, ...] = (
    Kind("01_overview", "the right of Figure 1", broader.draw_overview),
    Kind("01_mask_regions", "", token_figures.draw_mask_regions, needs_runs=False),
    Kind("02_engine_differences", "Figure 2", token_figures.draw_engine_differences),
    Kind("03_stability", "Figure 3", stability.draw_stability),
    Kind("04_anchor", "Figure 4", stability.draw_anchor),
    Kind("05_bad_updates", "Figure 5", stability.draw_bad_updates),
    Kind("06_relaxation_threshold", "Figure 6", stability.draw_relaxation_threshold),
    Kind("07_relaxation_side", "Figure 7", stability.draw_relaxation_side),
    Kind("08_replay", "Figure 8", broader.draw_replay),
    Kind("replay_by_algorithm", "", broader.draw_replay_by_algorithm),
    Kind("09_models", "Figure 9", broader.draw_models),
    Kind("10_topk_scores", "Figure 10 (11 since version 3)", broader.draw_topk_scores),
    Kind("11_metrics", "Figures 11 to 15 (13 to 17 since version 3)", broader.draw_metrics),
    Kind("16_topk_metrics", "Figure 16 (18 since version 3)", broader.draw_topk_metrics),
    Kind("17_tasks", "Figure 17 (20 since version 3)", broader.draw_tasks),
    Kind("thresholds", "Figure 19 of version 3", broader.draw_sensitivity),
    Kind("clipped_tokens", "the lists of Appendix E (D since version 3)", token_figures.draw_clipped_tokens),
)
"""All figures, with their numbers in arXiv 2602.04879; docs/reference/comparing_runs.md has the sources."""


NO_COUNTERPART = "It has no counterpart among the figures of arXiv 2602.04879."


def formats_of(names: Sequence[str]) -> tuple[Format, ...]:
    """Return the named formats, each once, or all formats if no name is given."""
    if unknown := [name for name in names if name not in FORMATS]:
        action = "Leave --format out for both."
        raise ConfigError(Problem("--format", ", ".join(unknown), f"one of {', '.join(FORMATS)}", action))
    return tuple(name for name in FORMATS if name in names or not names)


@dataclass(frozen=True)
class Picture:
    """A figure with its files and caption in the gallery."""

    drawing: Drawing
    wide: bytes  # PNG
    narrow: bytes  # PNG, for screens of a telephone's width
    files: tuple[str, ...]  # in the gallery's folder


@dataclass(frozen=True)
class Written:
    """Names of the figures that were drawn, and reasons for the others."""

    names: tuple[str, ...]  # file names of the figures, without endings
    not_drawn: tuple[str, ...]  # a sentence for each other one


def draw_figures(
    folders: Sequence[Path],
    out: Path,
    formats: Sequence[Format] = FORMATS,
    title: str = "",
    tokens_at: int | None = None,
    *,
    is_mu_logarithmic: bool = False,
) -> Written:
    """Draw all figures for which the folders suffice.

    Args:
        folders: Folders of runs, finished or not, and of megatron-dppo measure-mismatch.
        out: Gets `<name>.png`, `<name>.svg` and `<name>.txt`, its caption, for each figure, and `index.html`.
        formats: Formats of the files. The gallery contains separate pictures.
        title: Title of every figure and of the gallery.
        tokens_at: Rollout of the masked tokens, from 1. `None` means the last one that all runs list.
        is_mu_logarithmic: Logarithmic mu axis in `02_engine_differences`. The paper's axis is linear.
    """
    read = _material([Path(folder) for folder in folders])
    material = replace(read, tokens_at=tokens_at, is_mu_logarithmic=is_mu_logarithmic)
    answers = [(kind, kind.draw(kind, material)) for kind in KINDS]
    not_drawn = tuple(
        f"{kind.name} ({kind.paper or 'no figure of the paper'}): {answer.found}; {answer.action}."
        for kind, answer in answers
        if isinstance(answer, Lacking)
    )
    if not any(kind.needs_runs and not isinstance(answer, Lacking) for kind, answer in answers):
        found = f"nothing to draw in {', '.join(map(str, folders))}"
        raise ConfigError(
            Problem("figures", found, "finished rollouts or token probabilities", " ".join(not_drawn))
        )
    drawings = [
        drawing
        for _, answer in answers
        if not isinstance(answer, Lacking)
        for drawing in _with_left_out(answer, material)
    ]
    drawings = _distinct(drawings)
    with writing_to("--out", out):
        out.mkdir(parents=True, exist_ok=True)
        pictures = [_write(drawing, out, formats, title) for drawing in drawings]
        (out / "index.html").write_text(gallery(pictures, not_drawn, title), encoding="utf-8")
    return Written(tuple(drawing.name for drawing in drawings), not_drawn)


def _with_left_out(drawings: Sequence[Drawing], material: Material) -> Iterator[Drawing]:
    """Yield the figures of one kind; the caption of curves names the runs that none of them has."""
    shown = {name for drawing in drawings for name in drawing.runs}
    names = [name for line in material.lines for name in (*(run.name for run in line.runs), *line.left_out)]
    left_out = [name for name in names if name not in shown]
    said = [f"Runs that this figure is not about: {', '.join(left_out)}."] if shown and left_out else []
    for drawing in drawings:
        yield replace(drawing, caption=[*drawing.caption, *said])


def _distinct(drawings: Sequence[Drawing]) -> list[Drawing]:
    """Number the files of drawings with equal names: no file may overwrite another."""
    seen: Counter[str] = Counter()
    found: list[Drawing] = []
    for drawing in drawings:
        seen[drawing.name] += 1
        number = seen[drawing.name]
        found.append(drawing if number == 1 else replace(drawing, name=f"{drawing.name}_{number}"))
    return found


def _material(folders: Sequence[Path]) -> Material:
    if not folders:
        raise ConfigError("figures: found no folder; expected one or more. Name the folders of runs.")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("figures: the same folder is named twice. Name each once.")
    of_runs = [folder for folder in folders if not (folder / TOKENS).is_file()]
    runs = read_curves(of_runs)
    tokens = [pairs for folder in folders for pairs in read_token_pairs(folder)]
    return Material(experiments_of(runs) if runs else [], tokens)


def _write(drawing: Drawing, out: Path, formats: Sequence[Format], title: str) -> Picture:
    wide = build(drawing, headline=title)
    png = render(wide, "png")
    for kind in formats:
        (out / f"{drawing.name}.{kind}").write_bytes(png if kind == "png" else render(wide, kind))
    (out / f"{drawing.name}.txt").write_text("\n".join(caption_lines(drawing, title)) + "\n", encoding="utf-8")
    narrow = render(build(drawing, NARROW, title), "png", NARROW)
    files = tuple(f"{drawing.name}.{kind}" for kind in (*formats, "txt"))
    return Picture(drawing, png, narrow, files)


def caption_lines(drawing: Drawing, title: str = "") -> Iterator[str]:
    """Yield the caption, a sentence or two to a line."""
    if title:
        yield f"{title}."
    of_paper = f"After arXiv 2602.04879, {drawing.paper}." if drawing.paper else NO_COUNTERPART
    yield f"{drawing.title}. {of_paper}"
    yield from drawing.caption


def gallery(pictures: Sequence[Picture], not_drawn: Sequence[str], title: str) -> str:
    """Return the page of all figures, which needs no other file: light or dark, and on a telephone as well."""
    environment = page_templates("megatron_dppo.analysis.figures")
    environment.filters["data_url"] = _data_url
    page = environment.get_template("gallery.html.j2")
    return page.render(pictures=pictures, not_drawn=not_drawn, title=title)


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
