"""Checkpoints that contain code or point out of their folder are refused, and the code does not run."""

import io
import json
import pickle
import shutil
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.checkpoints.untrusted import refuse_code
from megatron_dppo.errors import CheckpointError
from megatron_dppo.runtime.process import Runtime
from tests.support.commands import python
from tests.support.ranks import run_ranks
from tests.support.tiny import write_model

_TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python(_TOOL, *arguments)


def save(runtime: Runtime, folder: str) -> None:
    """A checkpoint with stored objects, as training writes it."""
    from megatron_dppo.architectures.layout import Layout
    from megatron_dppo.architectures.registry import read_hf_config
    from megatron_dppo.checkpoints.megatron_folder import load_weights
    from megatron_dppo.mcore import cpu, fixes
    from megatron_dppo.mcore.groups import initialize_groups, megatron_sizes
    from megatron_dppo.models.build import build_model, transformer_config
    from tests.support.saving import save_weights

    cpu.install()
    fixes.apply()
    layout, source = Layout(world_size=1), Path(folder, "hf")
    initialize_groups(layout, seed=0)
    hf = read_hf_config(source)
    chunks = build_model(hf, transformer_config(hf, torch.float32, megatron_sizes(layout), {}))
    load_weights(chunks, source, hf)
    save_weights(chunks, Path(folder, "good"), source)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Megatron checkpoint, and the model it was made from."""
    folder = tmp_path_factory.mktemp("untrusted")
    write_model(folder / "hf")
    run_ranks(save, 1, folder, str(folder))
    return folder


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good / "good", tmp_path / "checkpoint")
    refuse_code(tmp_path / "checkpoint" / "megatron")
    return tmp_path / "checkpoint" / "megatron"


def in_the_older_form(folder: Path) -> None:
    """Rewrite to the form of Megatron-Core 0.16, which keeps the ranks' common state in a separate file."""
    if not (folder / "common.pt").exists():
        torch.save({"param_groups": [{"lr": 0.1, "step": step} for step in range(100)]}, folder / "common.pt")
    backends = {f"{kind}_backend": name for kind, name in (("sharded", "torch_dist"), ("common", "torch"))}
    versions = {f"{name}_version": 1 for name in backends}
    (folder / "metadata.json").write_text(json.dumps(backends | versions))


def in_the_newer_form(folder: Path) -> None:
    """As Megatron-Core 0.19 writes it: what all ranks have in common is one of the stored objects."""
    (folder / "common.pt").unlink(missing_ok=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def stored_object(metadata: Any) -> tuple[Any, Any]:
    """The key and place of an object that loading the model reads."""
    kinds = metadata.state_dict_metadata
    return next(
        (key, place)
        for key, place in metadata.storage_data.items()
        if type(kinds[key.fqn]).__name__ == "BytesStorageMetadata"
    )


def appended(folder: Path, metadata: Any, value: object) -> tuple[Any, Any]:
    """A stored object's key, and the place of `value`, which now ends the same file."""
    content = io.BytesIO()
    torch.save(value, content)
    key, place = stored_object(metadata)
    file = folder / place.relative_path
    offset = file.stat().st_size
    file.write_bytes(file.read_bytes() + content.getvalue())
    return key, type(place)(place.relative_path, offset, len(content.getvalue()))


def in_metadata(folder: Path, evil: object) -> None:
    change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", evil))


def instead_of_metadata(folder: Path, evil: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(evil))


def in_common(folder: Path, evil: object) -> None:
    torch.save({"args": evil}, folder / "common.pt")


def in_common_of_old(folder: Path, evil: object) -> None:
    torch.save({"args": evil}, folder / "common.pt", _use_new_zipfile_serialization=False)


def in_an_object(folder: Path, evil: object) -> None:
    change_metadata(folder, lambda metadata: metadata.storage_data.update([appended(folder, metadata, evil)]))


class _HidesItems:
    """A table that shows no items to whoever asks for them, and gives them one by one."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self.items = items

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"items": OrderedDict}, None, iter(self.items.items())


def in_a_hidden_object(folder: Path, evil: object) -> None:
    def change(metadata: Any) -> None:
        key, place = appended(folder, metadata, evil)
        metadata.storage_data = _HidesItems({**metadata.storage_data, key: place})

    change_metadata(folder, change)


PLANTS: dict[Callable[[Path, Evil], None], tuple[str, str]] = {
    in_metadata: (".metadata", "pathlib.Path.touch"),
    instead_of_metadata: (".metadata", "pathlib.Path.touch"),
    in_common: ("common.pt", "GLOBAL getattr"),
    in_common_of_old: ("common.pt", "GLOBAL getattr"),
    in_an_object: (".distcp", "GLOBAL getattr"),
    in_a_hidden_object: (".metadata", "collections.OrderedDict"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_code_is_refused_and_never_runs(
    checkpoint: Path, tmp_path: Path, plant: Callable[[Path, Evil], None]
) -> None:
    marker = tmp_path / "it_ran"
    plant(checkpoint, Evil(marker))
    with pytest.raises(CheckpointError, match="could run code") as refused:
        refuse_code(checkpoint)
    file, name = PLANTS[plant]
    assert f"{file}: found" in str(refused.value) and name in str(refused.value)
    assert not marker.exists()


def test_common_file_in_a_newer_checkpoint_is_checked(checkpoint: Path, tmp_path: Path) -> None:
    in_the_newer_form(checkpoint)
    refuse_code(checkpoint)
    in_common(checkpoint, Evil(tmp_path / "it_ran"))
    with pytest.raises(CheckpointError, match="could run code"):
        refuse_code(checkpoint)


def test_a_version_that_cannot_load_the_newer_form_says_so(checkpoint: Path, tmp_path: Path) -> None:
    is_old = (checkpoint / "common.pt").exists()
    in_the_newer_form(checkpoint)
    script = tmp_path / "load.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from megatron_dppo.checkpoints.megatron_folder import load_sharded\n"
        "load_sharded({}, Path(sys.argv[1]))\n"
    )
    done = python(script, checkpoint)
    assert ("newer Megatron-Core" in done.stderr) == is_old
    done = run_tool("to-hf", "--megatron", checkpoint.parent, "--out", tmp_path / "out")  # reads tensors alone
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("plant", "options"),
    [
        (in_metadata, ()),
        (in_common, ()),
        (in_an_object, ("--dtype", "float32")),  # with which the tool does not look at the stored type first
        (in_a_hidden_object, ("--dtype", "float32")),
    ],
)
def test_to_hf_refuses_planted_code(
    checkpoint: Path, tmp_path: Path, plant: Callable[[Path, Evil], None], options: tuple[str, ...]
) -> None:
    marker = tmp_path / "it_ran"
    plant(checkpoint, Evil(marker))
    done = run_tool("to-hf", "--megatron", checkpoint.parent, "--out", tmp_path / "out", *options)
    assert done.returncode == 2, done.stderr
    assert "could run code" in done.stderr and "Traceback" not in done.stderr
    assert PLANTS[plant][0] in done.stderr
    assert not marker.exists() and not (tmp_path / "out").exists()


def _named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


@pytest.mark.parametrize(
    "appendix",
    [
        _named(_FILESYSTEM, "_StorageInfo")
        + b"N}X\x06\x00\x00\x00offsetK\x07s\x86b0",  # sets a class attribute
        _named(_FILESYSTEM, "_StorageInfo") + b"}X\x06\x00\x00\x00offsetK\x07sb0",
        _named(_METADATA, "StorageMeta") + b")\x81}X\x07\x00\x00\x00save_idNsb}X\x07\x00\x00\x00save_idNsb0",
        _named(_METADATA, "StorageMeta") + b"(K\x01tR0",  # calls with an argument
        _named(_METADATA, "StorageMeta") + b")R0",
        _named(_METADATA, "StorageMeta") + b")\x81}X\x05\x00\x00\x00itemsNsb0",  # a field it does not have
        _named("torch", "Size") + b"N}X\x01\x00\x00\x00aNs\x86b0",
        _named("torch", "Size") + b"]X\x01\x00\x00\x00aa\x85R0",
        _named("torch", "float32") + b"N}X\x01\x00\x00\x00aNs\x86b0",
        _named("torch", "load") + b"0",
        _named("torch.serialization", "_get_layout") + b"N}X\x01\x00\x00\x00aNs\x86b0",
        _named("torch.serialization", "_get_layout") + b"X\x0c\x00\x00\x00torch.jagged\x85R0",
        _named(_METADATA, "sys.modules") + b"0",
        _named(_METADATA, "os") + b"0",
    ],
)
def test_opcodes_after_the_metadata_are_refused(checkpoint: Path, appendix: bytes) -> None:
    """Opcodes after a good metadata's own: they would change what it means to its next reader."""
    file = checkpoint / ".metadata"
    file.write_bytes(file.read_bytes()[:-1] + appendix + b".")
    with pytest.raises(CheckpointError, match="could run code"):
        refuse_code(checkpoint)


def test_torchs_own_restricted_unpickler_does_not_read_metadata(checkpoint: Path) -> None:
    """Why stand-ins read it: with every class that it names allowed, torch stops at the pickle protocol."""
    from torch.distributed.checkpoint import filesystem, metadata, planner

    allowed = [
        *(each for module in (metadata, planner) for each in vars(module).values() if isinstance(each, type)),
        *(filesystem._StorageInfo, torch.Size, torch.serialization._get_layout),
    ]
    with (
        torch.serialization.safe_globals(allowed),
        pytest.raises(pickle.UnpicklingError, match="Unsupported operand"),
    ):
        torch.load(checkpoint / ".metadata", weights_only=True)


def test_megatrons_list_of_safe_classes_does_not_count(checkpoint: Path) -> None:
    from megatron.core.safe_globals import SAFE_GLOBALS

    assert set(SAFE_GLOBALS) <= set(torch.serialization.get_safe_globals())
    in_common(checkpoint, Path("a"))
    with pytest.raises(CheckpointError, match="could run code"):
        refuse_code(checkpoint)
    assert set(SAFE_GLOBALS) <= set(torch.serialization.get_safe_globals())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"relative_path": "../../secret"}, "a path out of the folder"),
        ({"relative_path": "/etc/hostname"}, "a path out of the folder"),
        ({"relative_path": "sub/__0_0.distcp"}, "a path out of the folder"),
        ({"relative_path": ".."}, "a path out of the folder"),
        ({"relative_path": ""}, "a path out of the folder"),
        ({"relative_path": "a\0b"}, "a path out of the folder"),
        ({"relative_path": "nowhere.distcp"}, "torn or missing"),
        ({"relative_path": b"__0_0.distcp"}, "could run code"),
        ({"offset": -1}, "could run code"),
        ({"length": 1 << 40}, "torn or missing"),
        ({"transform_descriptors": ["stream.zstd/1"]}, "could run code"),
    ],
)
def test_invalid_storage_location_is_refused(checkpoint: Path, changes: dict[str, Any], words: str) -> None:
    change_metadata(checkpoint, lambda metadata: vars(stored_object(metadata)[1]).update(changes))
    with pytest.raises(CheckpointError, match=words):
        refuse_code(checkpoint)


@pytest.mark.parametrize("kind", [None, "text"])
def test_an_item_of_another_kind_is_refused(checkpoint: Path, kind: object) -> None:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[stored_object(metadata)[0].fqn] = kind

    change_metadata(checkpoint, change)
    with pytest.raises(CheckpointError, match="neither tensor nor object"):
        refuse_code(checkpoint)


def test_a_link_out_of_the_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    file.rename(tmp_path / file.name)
    file.symlink_to(tmp_path / file.name)
    with pytest.raises(CheckpointError, match="a path out of the folder"):
        refuse_code(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", "__0_0.distcp"])
@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_torn_file_is_refused(checkpoint: Path, name: str, keep: int) -> None:
    in_the_older_form(checkpoint)
    file = checkpoint / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=name):
        refuse_code(checkpoint)
    file.unlink()
    with pytest.raises(CheckpointError, match=name):
        refuse_code(checkpoint)


def test_a_torn_object_is_refused(checkpoint: Path) -> None:
    _, place = stored_object(pickle.loads((checkpoint / ".metadata").read_bytes()))
    file = checkpoint / place.relative_path
    content = bytearray(file.read_bytes())
    content[place.offset + place.length // 2 : place.offset + place.length] = bytes((place.length + 1) // 2)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="distcp"):
        refuse_code(checkpoint)


def _every_byte(content: bytes) -> Iterator[bytes]:
    for index in range(0, min(len(content), 4000), 7):
        changed = bytearray(content)
        changed[index] ^= 0x55
        yield bytes(changed)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_changed_byte_raises_nothing_else(checkpoint: Path, name: str) -> None:
    in_the_older_form(checkpoint)
    file = checkpoint / name
    num_refused = 0
    for content in _every_byte(file.read_bytes()):
        file.write_bytes(content)
        try:
            refuse_code(checkpoint)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 20  # the rest are numbers of tensors, and padding


@pytest.mark.parametrize("content", ['{"sharded_backend": "zarr"}', "[]"])
def test_another_backend_is_refused(checkpoint: Path, content: str) -> None:
    (checkpoint / "metadata.json").write_text(content)
    with pytest.raises(CheckpointError, match="torch_dist"):
        refuse_code(checkpoint)


def save_and_load(runtime: Runtime, model: str, folder: str) -> dict[str, int]:
    """On each rank: save a run's checkpoint and load it again; how many objects and optimizer states it has."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import CheckpointConfig, Config
    from megatron_dppo.run.checkpoints import Checkpoints, load
    from megatron_dppo.run.state import RunPoint
    from megatron_dppo.types import RunState

    config = Config.model_validate(
        {
            "model": {"load": model},
            "parallel": {"expert": 2, "max_tokens_per_microbatch": 60},
        }
    )
    actor = Actor(config, runtime)
    options = CheckpointConfig(asynchronous=False, reserve_gib=0)
    checkpoints = Checkpoints(Path(folder), options, Path(model), runtime)
    checkpoints.save(actor, RunPoint(RunState(1, 1, 1, {"epoch": 0, "index": 0}), 0, "digest"))
    saved = Path(folder) / "step_00000001"
    assert load(saved, actor, runtime).state.step == 1
    refuse_code(saved / "megatron")
    metadata = pickle.loads((saved / "megatron" / ".metadata").read_bytes())
    return {
        "objects": sum(type(v).__name__.startswith("Bytes") for v in metadata.state_dict_metadata.values()),
        "optimizer": sum(name.startswith("optimizer.") for name in metadata.state_dict_metadata),
    }


def test_a_runs_checkpoint_with_its_optimizer_passes(good: Path, tmp_path: Path) -> None:
    first, second = run_ranks(save_and_load, 2, tmp_path, str(good / "hf"), str(tmp_path / "checkpoints"))
    assert first == second
    assert first["objects"] and first["optimizer"]
