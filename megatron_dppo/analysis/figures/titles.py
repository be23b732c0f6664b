"""Names experiments in titles: by the settings on which they differ, never by a folder, no two alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from megatron_dppo.analysis.report.text import differing_keys
from megatron_dppo.config.load import shown

Settings = Mapping[str, str]
USUAL = "usual settings"
_LONGEST = 48  # characters of a label that lists every unusual setting
_TELLING = ("rollout.environment", "model.load", "data.prompts")  # say more than any number, in this order
_PLAIN = "single_turn"  # the environment without a task in its name
_MOST_KEYS = 3  # in a label that does not list every unusual setting
_MOST_CANDIDATES = 24  # of the keys that such a label may have, the shortest


def labels_of(settings: Sequence[Settings]) -> list[tuple[str, str]]:
    """Return a short label and all differing settings, in words, for each experiment.

    A label lists the settings that are unlike most others'. If that is long, or another experiment's too, the
    label is the shortest setting that no other experiment has, or a few of them: the environment, the model or
    the prompts, if one of these is enough.

    Args:
        settings: Settings of each experiment, as text. A single experiment has an empty label.
    """
    if len(settings) < 2:
        return [("", "")] * len(settings)
    differing = differing_keys(settings)
    words = [", ".join(f"{key} = {shown(own.get(key))}" for key in differing) for own in settings]
    texts = _texts(settings, differing)
    listed = _unusual(settings, differing, texts)
    count = Counter(listed)
    labels = [
        label if len(label) <= _LONGEST and count[label] == 1 else _distinguishing(place, settings, texts)
        for place, label in enumerate(listed)
    ]
    return list(zip(_numbered(labels), words, strict=True))


def _texts(settings: Sequence[Settings], differing: Sequence[str]) -> list[dict[str, str]]:
    """Return each experiment's differing settings as `name value`, paths by the parts that tell them apart."""
    last = Counter(key.rpartition(".")[2] for key in differing)
    found: list[dict[str, str]] = [{} for _ in settings]
    for key in differing:
        name = key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2]
        name = "model" if key == "model.load" else name
        values = [shown(own.get(key)) for own in settings]
        brief = without_paths(values)
        for own, value in zip(found, values, strict=True):
            own[key] = f"{name} {brief[value]}"
    return found


def without_paths(values: Sequence[str]) -> dict[str, str]:
    """Return paths as the one part, near their end, in which all of them differ; other values as they are.

    Paths that no single part tells apart keep as many words of their end as do.
    """
    parts = {value: value.strip("/").split("/") for value in dict.fromkeys(values)}
    deepest = max(map(len, parts.values()), default=0)
    for depth in range(1, deepest + 1):
        names = {value: of[max(-depth, -len(of))] for value, of in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    for depth in range(2, deepest + 1):
        names = {value: " ".join(of[-depth:]) for value, of in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {value: " ".join(of) for value, of in parts.items()}


def _unusual(
    settings: Sequence[Settings], differing: Sequence[str], texts: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return for each experiment the settings that are unlike most others'."""
    usual: dict[str, str | None] = {}
    for key in differing:
        (value, count), *others = Counter(own.get(key) for own in settings).most_common()
        usual[key] = value if not others or others[0][1] < count else ""  # "" if none
    return [
        ", ".join(text[key] for key in differing if own.get(key) != usual[key]) or USUAL
        for own, text in zip(settings, texts, strict=True)
    ]


def _distinguishing(place: int, settings: Sequence[Settings], texts: Sequence[Mapping[str, str]]) -> str:
    """Return the shortest settings of an experiment that no other one has."""
    own, others = settings[place], [other for index, other in enumerate(settings) if index != place]
    for keys in _candidates(own, texts[place]):
        if all(any(other.get(key) != own.get(key) for key in keys) for other in others):
            return ", ".join(texts[place][key] for key in keys)
    return USUAL


def _candidates(own: Settings, texts: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield sets of keys: few before many, telling ones first, then by the length of their text."""

    def rank(key: str) -> tuple[bool, int, int]:
        is_set = own.get(key) not in (None, _PLAIN)
        place = _TELLING.index(key) if is_set and key in _TELLING else len(_TELLING)
        return not is_set, place, len(texts[key])

    ordered = sorted(texts, key=rank)[:_MOST_CANDIDATES]
    for size in range(1, _MOST_KEYS + 1):
        yield from combinations(ordered, size)
    yield tuple(texts)


def _numbered(labels: Sequence[str]) -> list[str]:
    """Return the labels, equal ones with a number."""
    seen: Counter[str] = Counter()
    found: list[str] = []
    for label in labels:
        seen[label] += 1
        found.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return found
