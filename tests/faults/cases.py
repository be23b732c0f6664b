"""The faults, the moments at which they strike, and what must come of each."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.records import metrics_of

Config = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One fault at one moment.

    Attributes:
        what: The fault, for the table.
        moment: When, for the table.
        num_processes: Ranks; with 2, experts are split over them.
        fault: The fault for `rank.py`; `None` if the case has only signals or damage.
        more_faults: Further ones in the same start.
        signals: (what the log must hold, signal to send to every rank).
        damage: What is done to the run folder before the resume.
        resumed_fault: Fault of an extra start in the middle, which ends with status 1 and a StorageError.
        exits: Exit codes that the ranks may end with; negative ones are signals.
        log: What the log of the first start must hold.
        last_line: What its last lines must contain.
        resumed_log: What the log of the second start must hold.
        is_resumed: Start again without the fault.
        resumed_exit: Exit code of that start.
        is_compared: Rows, samples and final state must equal the uninterrupted run.
        check: Yields what is wrong with the run folder in the end.
        config: Changes to the config.
        is_short: Part of `make test`.
    """

    what: str
    moment: str
    num_processes: int = 1
    fault: dict[str, Any] | None = None
    more_faults: tuple[dict[str, Any], ...] = ()
    signals: tuple[tuple[str, str], ...] = ()
    damage: Callable[[Path], None] | None = None
    resumed_fault: dict[str, Any] | None = None
    exits: frozenset[int] = frozenset({0})
    log: tuple[str, ...] = ()
    last_line: str | None = None
    resumed_log: tuple[str, ...] = ()
    is_resumed: bool = True
    resumed_exit: int = 0
    is_compared: bool = True
    check: Callable[[Path], Iterable[str]] | None = None
    config: Config = field(default_factory=dict[str, dict[str, Any]])
    is_short: bool = False

    @property
    def name(self) -> str:
        """Unique among cases."""
        return f"{self.what}, {self.moment}, {self.num_processes}"

    def is_end_expected(self, codes: list[int]) -> bool:
        """Whether the ranks ended as they should, none of them killed by the campaign.

        If the case sends a signal that kills, at least one rank must have ended by it.
        """
        is_killed = min(self.exits) >= 0 or min(self.exits) in codes
        return is_killed and all(code in self.exits for code in codes)


def at(kind: str, moment: str, *numbers: int, rank: int | str = "all") -> dict[str, Any]:
    """The fault of a kind at a moment, at these calls of it, on one rank or all; see `rank.py`."""
    return {"kind": kind, "moment": moment, "numbers": numbers, "rank": rank}


_KILLED = frozenset({-9})
# (words for the table, moment, which call of it)
_MOMENTS = (
    ("while the model loads", "start", 1),
    ("while sampling", "rollout", 12),
    ("between gradient and update", "gradient", 3),
    ("after an update, before its row", "row", 3),
    ("before weights are pushed", "sync", 3),
    ("while a checkpoint is written", "write", 3),
    ("before a checkpoint is published", "publish", 3),
    ("before `latest` is flipped", "flip", 3),
    ("while evaluating", "evaluation", 2),
)


def _kills() -> list[Case]:
    cases = []
    for words, moment, number in _MOMENTS:
        for num_processes in (1, 2):
            is_main_only = moment in ("row", "publish", "flip") and num_processes == 2
            cases.append(
                Case(
                    "kill -9 of all" if not is_main_only else "kill -9 of rank 0",
                    words,
                    num_processes,
                    at("SIGKILL", moment, number),
                    exits=_KILLED if num_processes == 1 else frozenset({-9, 1}),  # the other may see it first
                    is_short=(moment, num_processes) in (("gradient", 1), ("write", 2)),
                )
            )
    return cases


def _signals() -> list[Case]:
    cases = []
    for kind, words, moment, number, num_processes, rank in (
        ("SIGTERM", "while sampling", "rollout", 12, 1, "all"),
        ("SIGTERM", "in a gradient step", "gradient", 3, 1, "all"),
        ("SIGTERM", "while a checkpoint is written", "save", 3, 1, "all"),
        ("SIGTERM", "while evaluating", "evaluation", 2, 1, "all"),
        ("SIGTERM", "while weights are pushed", "sync", 3, 1, "all"),
        ("SIGUSR1", "in a gradient step", "gradient", 4, 1, "all"),
        ("SIGTERM", "in a gradient step", "gradient", 3, 2, "all"),
        ("SIGTERM", "while sampling, rank 1 alone", "rollout", 12, 2, 1),
        ("SIGUSR1", "in a gradient step, rank 1 alone", "gradient", 3, 2, 1),
        ("SIGINT", "in a gradient step", "gradient", 3, 2, "all"),
        ("SIGINT", "while a checkpoint is written", "save", 3, 1, "all"),
        ("SIGHUP", "while sampling", "rollout", 12, 1, "all"),
    ):
        fault = at(kind, moment, number, rank=rank)
        is_short = (moment, num_processes) in (("gradient", 2), ("rollout", 2)) and kind != "SIGUSR1"
        exits, log = frozenset({75}), ("then exit 75", "asked to stop: saved after")
        cases.append(Case(kind, words, num_processes, fault, exits=exits, log=log, is_short=is_short))
    twice = at("SIGTERM twice", "gradient", 3)
    cases.append(Case("SIGTERM twice", "in a gradient step", 1, twice, exits=frozenset({128 + 15})))
    return cases


def _failing_disks() -> list[Case]:
    """A file server that fails while a run resumes: the same command works later, and nothing is lost."""
    kill = at("SIGKILL", "gradient", 3)
    return [
        Case(
            f"{kind} of a disk{'' if rank == 'all' else f', rank {rank} alone'}",
            f"while a checkpoint is {words}",
            num_processes,
            kill,
            resumed_fault=at(kind, moment, 1, rank=rank),
            exits=frozenset({-9}),
            is_short=(moment, num_processes) == ("load", 2),
        )
        for kind, words, moment, num_processes, rank in (
            ("EIO", "compared with its checksums", "judge", 1, "all"),
            ("ESTALE", "compared with its checksums", "judge", 2, 1),
            ("ESTALE", "loaded", "load", 1, "all"),
            ("EIO", "loaded", "load", 2, 1),
        )
    ]


def _ahead() -> list[Case]:
    """With a rollout sampled ahead, which each checkpoint keeps."""
    fault, ahead = at("SIGKILL", "write", 3), {"rollout": {"lag": 1}}
    what, when = "kill -9 of all, a rollout sampled ahead", "while a checkpoint is written"
    return [Case(what, when, 1, fault, exits=_KILLED, config=ahead)]


def _replaced() -> list[Case]:
    """The run goes back, and saves a step that is saved already; with no other checkpoint, and with others."""
    cases = []
    for words, keep_last, rollout in (("the only checkpoint", 1, 2), ("one of two checkpoints", 2, 3)):
        config: Config = {
            "checkpoint": {"every_steps": 0, "keep_last": keep_last},
            "tracking": {"alarms": "roll_back", "samples_every": 1},
        }
        case = Case(
            "kill -9 of all",
            f"while {words} is replaced",
            1,
            at("NaN metric", "rollout end", rollout),
            more_faults=(at("SIGKILL", "replace", 1),),
            exits=_KILLED,
            resumed_log=("its replacement was interrupted",),
            config=config,
            is_compared=False,
            check=_all_rollouts,
            is_short=keep_last == 1,
        )
        cases.append(case)
    return cases


def _all_rollouts(run: Path) -> Iterable[str]:
    found = [row["rollout"] for row in metrics_of(run, "rollout")]
    return [] if found == [0, 1, 2] else [f"rollouts {found}"]


def _newest(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()


def _truncate(run: Path) -> None:
    for file in _newest(run).glob("megatron/*.distcp"):
        file.write_bytes(file.read_bytes()[:-100])


def _flip_a_bit(run: Path) -> None:
    file = _newest(run) / "rng" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _remove_a_file(run: Path) -> None:
    (_newest(run) / "megatron" / "common.pt").unlink()


def _tear_state(run: Path) -> None:
    file = _newest(run) / "state.json"
    file.write_text(file.read_text()[:20])


def _tear_sums(run: Path) -> None:
    (_newest(run) / "SHA256SUMS").write_text("0123")


def _tear_two(run: Path) -> None:
    _truncate(run)
    newest = _newest(run)
    others = sorted(path for path in newest.parent.glob("step_*") if path < newest)
    (others[-1] / "state.json").unlink()


def _tear_pointer(run: Path) -> None:
    (run / "checkpoints" / "latest").write_bytes(b"\xff\x00")


def _remove_pointer(run: Path) -> None:
    (run / "checkpoints" / "latest").unlink()


def _set_back(run: Path) -> None:
    pointer = run / "checkpoints" / "latest"
    pointer.write_text(min(pointer.parent.glob("step_*")).name + "\n")


def _left_behind(run: Path) -> list[str]:
    found = sorted(path.name for path in (run / "checkpoints").glob("*.abandoned"))
    return [] if found == ["step_00000004.abandoned"] else [f"abandoned: {found}"]


def _tear_last_row(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "rol')


def _tears() -> list[Case]:
    torn = ("is torn",)
    killed = at("SIGKILL", "gradient", 5)
    cases = []
    for what, damage, resumed_log, num_processes in (
        ("truncated weights", _truncate, torn, 1),
        ("truncated weights", _truncate, torn, 2),
        ("a bit flipped in the random states", _flip_a_bit, torn, 1),
        ("a file missing", _remove_a_file, torn, 1),
        ("torn state.json", _tear_state, torn, 1),
        ("torn SHA256SUMS", _tear_sums, torn, 1),
        ("two torn checkpoints", _tear_two, torn, 1),
        ("torn `latest`", _tear_pointer, ("using the newest",), 1),
        ("no `latest`", _remove_pointer, ("resuming from",), 1),
        ("torn last row of metrics.jsonl", _tear_last_row, (), 1),
    ):
        is_short = what in ("two torn checkpoints",) or num_processes == 2
        exits = _KILLED if num_processes == 1 else frozenset({-9, 1})
        case = Case(what, "after kill -9", num_processes, killed, damage=damage, exits=exits)
        cases.append(replace(case, resumed_log=resumed_log, is_short=is_short))
    kept = {"checkpoint": {"keep_last": 2, "asynchronous": False}}
    back = Case("`latest` set back", "after kill -9, saved synchronously", 1, killed, config=kept)
    back = replace(back, exits=_KILLED, damage=_set_back, resumed_log=("is newer than",), check=_left_behind)
    cases.append(replace(back, is_short=True))
    planted = Case("code in a checkpoint", "after kill -9", 1, killed, damage=_plant_code, exits=_KILLED)
    refused = {"resumed_exit": 2, "resumed_log": ("could run code",), "is_compared": False, "check": _it_ran}
    return [*cases, replace(planted, **refused)]


def _plant_code(run: Path) -> None:
    """Code in the newest checkpoint, with checksums that fit: what a download may hold."""
    newest = _newest(run)
    metadata = newest / "megatron" / ".metadata"
    metadata.write_bytes(b"cposix\nsystem\n(S'touch " + str(run / "it_ran").encode() + b"'\ntR.")
    sums = newest / "SHA256SUMS"
    lines = [line for line in sums.read_text().splitlines() if not line.endswith("megatron/.metadata")]
    lines.append(f"{hashlib.sha256(metadata.read_bytes()).hexdigest()}  megatron/.metadata")
    sums.write_text("\n".join(lines) + "\n")


def _it_ran(run: Path) -> Iterable[str]:
    return ["the planted code ran"] if (run / "it_ran").exists() else []


def _disks() -> list[Case]:
    log = ("could not be written, earlier ones are untouched",)
    patient: Config = {"checkpoint": {"max_failed_saves": 9}}
    impatient: Config = {"checkpoint": {"max_failed_saves": 2}}
    no_room: Config = {"checkpoint": {"reserve_gib": 1e9}}

    def nothing(run: Path) -> Iterable[str]:
        return ["a run folder was made"] if run.exists() else []

    return [
        Case(
            "disk full, then free again",
            "while saving",
            1,
            at("disk full", "save", 2, 4),
            log=log,
            config=patient,
            is_short=True,
        ),
        Case(
            "disk full on one rank",
            "while saving",
            2,
            at("disk full", "save", 3, 5, rank=1),
            log=log,
            config=patient,
        ),
        Case(
            "disk full",
            "while a row is written",
            1,
            at("no room for rows", "row", 5),
            exits=frozenset({2}),
            last_line="DiskError",
            log=("bytes free on its disk", "The newest checkpoint is", "step_0000000"),
            is_short=True,
        ),
        Case(
            "disk full",
            "at two saves in a row",
            1,
            at("disk full", "save", 3),
            exits=frozenset({2}),
            log=(*log, "2 saves in a row failed"),
            config=impatient,
        ),
        Case(
            "too little space left",
            "before the start",
            1,
            exits=frozenset({2}),
            log=("checkpoint.reserve_gib",),
            config=no_room,
            is_resumed=False,
            is_compared=False,
            check=nothing,
        ),
        Case(
            "second run in the same folder",
            "while training",
            1,
            at("second run", "gradient", 3),
            is_short=True,
            log=("second run ended with 2", "in use by process"),
            is_resumed=False,
        ),
    ]


def _lost_ranks() -> list[Case]:
    """One of two ranks fails; the other must not wait for it, and the log must end with why."""

    def case(what: str, words: str, fault: dict[str, Any], last_line: str, is_short: bool = False) -> Case:
        exits = frozenset({1, -9}) if what.startswith(("kill", "SIGSTOP")) else frozenset({1})
        is_late = fault["kind"] in ("hang", "SIGSTOP")  # the only faults that a time-out finds
        config: Config = {"run": {"timeout_s": 20.0}} if is_late else {}
        return Case(what, words, 2, fault, exits=exits, last_line=last_line, is_short=is_short, config=config)

    cases = []
    for rank in (0, 1):
        for words, moment, number in (("while sampling", "rollout", 12), ("in a gradient step", "step", 3)):
            fault = at("SIGKILL", moment, number, rank=rank)
            is_short = rank == 1 and moment == "step"
            cases.append(case(f"kill -9 of rank {rank}", words, fault, f"rank {rank}", is_short))
        for words, moment in (("in a gradient step", "step"), ("while a checkpoint is planned", "save")):
            fault = at("raise", moment, 3, rank=rank)
            is_short = rank == 0 and moment == "step"
            cases.append(case(f"an exception on rank {rank}", words, fault, "ValueError: injected", is_short))
    cases += [
        case("rank 1 hangs", "in a gradient step", at("hang", "step", 3, rank=1), "rank 1", is_short=True),
        case("SIGSTOP of rank 1", "in a gradient step", at("SIGSTOP", "step", 3, rank=1), "rank 1"),
        case("SIGSTOP of rank 0", "while sampling", at("SIGSTOP", "rollout", 12, rank=0), "rank 0"),
    ]
    alone = Case("an exception", "in a gradient step", 1, at("raise", "step", 3), exits=frozenset({1}))
    return [*cases, replace(alone, last_line="ValueError: injected")]


def _skips(number: int) -> Callable[[Path], Iterable[str]]:
    def check(run: Path) -> Iterable[str]:
        found = sum(row["optimizer/skipped_steps"] for row in metrics_of(run, "step"))
        if found != number:
            yield f"{found} skipped steps, expected {number}"
        evidence = sorted((run / "evidence").glob("step_*/rank_*.safetensors")) if number else []
        if bool(evidence) != bool(number):
            yield f"evidence: {evidence}"

    return check


def _bad_steps() -> list[Case]:
    def case(what: str, words: str, processes: int, fault: dict[str, Any], skipped: int, **more: Any) -> Case:
        return Case(what, words, processes, fault, is_compared=False, check=_skips(skipped), **more)

    in_a_row = {"exits": frozenset({2}), "log": ("TrainingError", "3 steps in a row")}
    return [
        case(
            "NaN gradient",
            "one step",
            1,
            at("NaN gradient", "gradient", 3),
            1,
            is_resumed=False,
            is_short=True,
        ),
        case(
            "inf gradient on rank 1",
            "one step",
            2,
            at("inf gradient", "gradient", 3, rank=1),
            1,
            is_resumed=False,
        ),
        case("NaN gradient", "two steps", 1, at("NaN gradient", "gradient", 2, 4), 2, is_resumed=False),
        case("NaN gradient", "three steps in a row", 1, at("NaN gradient", "gradient", 2, 3, 4), 2, **in_a_row),
        case(
            "NaN in the weights",
            "from step 2 on",
            1,
            at("NaN weight", "step", 2),
            1,
            exits=frozenset({2}),
            log=("RolloutError", "16 of 16 samples dropped (16 non_finite_log_probs)"),
            is_resumed=False,
        ),
    ]


def _metric(name: str, is_right: Callable[[float], bool]) -> Callable[[Path], Iterable[str]]:
    """All rollouts were done, and the metric is right in their rows taken together."""

    def check(run: Path) -> Iterable[str]:
        values = [row[name] for row in metrics_of(run, "rollout")]
        if len(values) != 3:
            yield f"{len(values)} rollouts, expected 3"
        if not is_right(sum(values)):
            yield f"{name}: {values}"

    return check


def _bad_batches() -> list[Case]:
    def case(what: str, num_processes: int, metric: str, is_right: Any, config: Config, **more: Any) -> Case:
        options: dict[str, Any] = {
            "check": _metric(metric, is_right),
            "is_resumed": False,
            "is_compared": False,
        }
        return Case(what, "in every rollout", num_processes, config=config, **options, **more)

    def rewarded(function: str, max_dropped_fraction: float = 0.9) -> Config:
        data: dict[str, Any] = {"reward": f"tests.faults.rewards:{function}", "reward_memory_mb": 256}
        data["reward_timeout_s"] = 1.0 if function == "hangs" else 300.0
        return {"data": data, "rollout": {"max_dropped_fraction": max_dropped_fraction}}

    def some(total: float) -> bool:
        return total >= 1

    cases = []
    for words, function, reason in (
        ("a reward that raises", "raises", "failed"),
        ("a reward that hangs", "hangs", "timed_out"),
        ("a reward that eats memory", "eats_memory", "out_of_memory"),
        ("a reward that dies", "dies", "failed"),
        ("a reward that is NaN", "is_nan", "failed"),
    ):
        metric, is_short = f"rollout/dropped_reward_{reason}", function == "hangs"
        cases.append(case(words, 1, metric, some, rewarded(function), is_short=is_short))
    cases.append(case("a reward that hangs", 2, "rollout/dropped_reward_timed_out", some, rewarded("hangs")))
    all_dropped = rewarded("always_raises", 1.0)
    cases.append(case("every sample dropped", 1, "rollout/dropped_samples", lambda n: n == 48, all_dropped))
    cases.append(case("every sample dropped", 2, "rollout/dropped_samples", lambda n: n == 48, all_dropped))
    flat = case("no variance", 2, "reward/zero_variance_fraction", lambda n: n == 3, rewarded("always_one"))
    cut: Config = {"rollout": {"max_response_tokens": 1}}
    truncated = case("every response cut", 1, "rollout/truncated_fraction", lambda n: n > 2.7, cut)
    too_many = Case(
        "too many samples dropped",
        "in the first rollout",
        2,
        exits=frozenset({2}),
        last_line="RolloutError",
        config=rewarded("raises", 0.01),
        is_resumed=False,
        is_compared=False,
    )
    return [*cases, flat, truncated, too_many]


CASES: list[Case] = [
    *_kills(),
    *_failing_disks(),
    *_ahead(),
    *_replaced(),
    *_signals(),
    *_tears(),
    *_lost_ranks(),
    *_disks(),
    *_bad_steps(),
    *_bad_batches(),
]
