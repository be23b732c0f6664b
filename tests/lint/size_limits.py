"""Limits that ruff does not know: file and function sizes, where torch.cuda may stand, no print in the package.

Run as `python tests/lint/size_limits.py [repository]`; exits with 1 when a limit is broken.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_LINES_OF = {"megatron_dppo/train.py": 120}
ROOMS = ("megatron_dppo", "tools")
CUDA_ROOMS = (
    "megatron_dppo/runtime/process.py",
    "megatron_dppo/mcore/cpu.py",
    "megatron_dppo/kernels/",
)


def main(root: Path) -> int:
    """Print the sizes and every broken limit; 1 if there is one."""
    files = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for room in ROOMS
        for path in sorted((root / room).rglob("*.py"))
    }
    trees = {name: ast.parse(text) for name, text in files.items()}
    file_sizes = {name: len(text.splitlines()) for name, text in files.items()}
    function_sizes = dict(size for name, tree in trees.items() for size in _functions(name, tree))
    faults = [
        *_too_long(file_sizes, MAX_FILE_LINES),
        *_too_long(function_sizes, MAX_FUNCTION_LINES),
        *(fault for name, tree in trees.items() for fault in _misplaced(name, tree)),
    ]
    print(f"files:     {_summary(list(file_sizes.values()))} (limit {MAX_FILE_LINES})")
    print(f"functions: {_summary(list(function_sizes.values()))} (limit {MAX_FUNCTION_LINES})")
    print("".join(f"{fault}\n" for fault in faults), end="")
    return 1 if faults else 0


def _functions(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None, "a parsed function has an end"
            yield f"{name}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def _too_long(sizes: dict[str, int], limit: int) -> Iterator[str]:
    for name, size in sizes.items():
        if size > (allowed := MAX_LINES_OF.get(name, limit)):
            yield f"{name}: {size} lines, limit {allowed}"


def _misplaced(name: str, tree: ast.Module) -> Iterator[str]:
    if not name.startswith("megatron_dppo/"):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        if _is_cuda(node) and not name.startswith(CUDA_ROOMS):
            yield f"{name}:{node.lineno}: torch.cuda outside {', '.join(CUDA_ROOMS)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{name}:{node.lineno}: print; use logging"


def _is_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch"
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return module.startswith("torch.cuda") or (
            module == "torch" and any(n.name == "cuda" for n in node.names)
        )
    return isinstance(node, ast.Import) and any(n.name.startswith("torch.cuda") for n in node.names)


def _summary(sizes: list[int]) -> str:
    if not sizes:
        return "none"
    p95 = sorted(sizes)[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    return f"{len(sizes)}, median {statistics.median(sizes):.0f}, p95 {p95}, longest {max(sizes)} lines"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]))
