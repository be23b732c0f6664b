"""`megatron-dppo figures`: run folders in; figures, captions and a gallery out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.analysis.figures.canvas import NARROW, Drawing, Format, build, render
from megatron_dppo.analysis.figures.catalogue import KINDS
from megatron_dppo.analysis.figures.gallery import Picture, gallery
from megatron_dppo.analysis.figures.material import Lacking, Material
from megatron_dppo.analysis.figures.runs import experiments_of, read_curves
from megatron_dppo.analysis.figures.tokens import TOKENS, read_token_pairs
from megatron_dppo.errors import ConfigError, Problem, writing_to

FORMATS: tuple[Format, ...] = ("png", "svg")


def formats_of(names: Sequence[str]) -> tuple[Format, ...]:
    """Return the formats of these names, each once; all of them where none is named.

    Raises:
        ConfigError: There is no such format.
    """
    if unknown := [name for name in names if name not in FORMATS]:
        action = "Leave --format out for both."
        raise ConfigError(Problem("--format", ", ".join(unknown), f"one of {', '.join(FORMATS)}", action))
    return tuple(name for name in FORMATS if name in names or not names)


@dataclass(frozen=True)
class Written:
    """Names of the figures that were drawn, and reasons for the others."""

    names: tuple[str, ...]  # of the figures, without the ends of their files' names
    not_drawn: tuple[str, ...]  # a sentence for each other one


def draw_figures(
    folders: Sequence[Path], out: Path, formats: Sequence[Format] = FORMATS, title: str = ""
) -> Written:
    """Draw all figures for which the folders suffice.

    Args:
        folders: Of runs, finished or not, and of megatron-dppo measure-mismatch.
        out: Gets `<name>.png`, `<name>.svg` and `<name>.txt`, its caption, for each figure, and `index.html`.
        formats: Of the files; the gallery has pictures of its own.
        title: Stands over every figure and over the gallery.

    Raises:
        ConfigError: No folder was named, one twice, or no figure of their data can be drawn.
        DataError: A folder is no run's, or a file of it is damaged.
    """
    material = _material([Path(folder) for folder in folders])
    answers = [(kind, kind.draw(kind, material)) for kind in KINDS]
    not_drawn = tuple(
        f"{kind.name} ({kind.paper}): {answer.found}; {answer.action}."
        for kind, answer in answers
        if isinstance(answer, Lacking)
    )
    if not any(kind.needs_runs and not isinstance(answer, Lacking) for kind, answer in answers):
        raise ConfigError(
            f"figures: found nothing to draw in {', '.join(map(str, folders))}; expected finished rollouts or "
            f"token probabilities. {' '.join(not_drawn)}"
        )
    drawings = [drawing for _, answer in answers if not isinstance(answer, Lacking) for drawing in answer]
    with writing_to("--out", out):
        out.mkdir(parents=True, exist_ok=True)
        pictures = [_write(drawing, out, formats, title) for drawing in drawings]
        (out / "index.html").write_text(gallery(pictures, not_drawn, title), encoding="utf-8")
    return Written(tuple(drawing.name for drawing in drawings), not_drawn)


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
    yield f"{drawing.title}. After arXiv 2602.04879, {drawing.paper}."
    yield from drawing.caption
