"""Progress bar of the bytes that a conversion has done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from megatron_dppo.conversion.sources import Source


@contextmanager
def showing_progress(source: Source, num_sharers: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of bytes with the remaining time, and yield the function that advances it.

    Args:
        source: What is converted or compared.
        num_sharers: Processes that share the work: the bar is of one process's share. With 0 there is no bar.
    """
    total = sum(tensor.numel() * tensor.itemsize for tensor in source.outline().values())
    with tqdm(
        total=total // max(num_sharers, 1),
        unit="B",
        unit_scale=True,
        desc=source.folder.name,
        disable=not num_sharers,
    ) as bar:

        def on_bytes(num_bytes: int) -> None:
            bar.update(num_bytes)

        yield on_bytes
