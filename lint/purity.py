"""Finds what would let two ranks decide differently: `python -m lint.purity [ROOT]`.

In: the Python files of the pure modules (everything that decides; the shells are in `io/` folders).
Out: one line per finding, exit code 1 if there is any. Banned are imports of clocks, chance, input
and output and of the wire types; `hash()` and `id()`, which differ between processes; and every use of
a set whose result depends on the set's order. `sorted(s)` is the way out; where order provably cannot
matter, a comment `# set-order: why` on the line says so.

What a syntax tree shows is enough: a set is recognised by its literal, its constructor, its
operators, and by names and attributes that are annotated or assigned as one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lint.sets import SetNames, declared_attributes, is_set

PURE_FOLDERS = ("consensus", "pipeline", "prefill", "decode", "transfer")
PURE_GATEWAY = (
    "router", "policies", "instances", "merge", "detokenize", "breaker", "leases", "workbook", "terms", "resume",
    "stop_strings", "output", "errors", "generation_job", "openai_api", "openai_replies", "key_limits", "refusals",
    "phases",
)  # fmt: skip

# fmt: off
BANNED_IMPORTS = frozenset({
    "time", "random", "socket", "threading", "asyncio", "os", "logging", "zmq", "grpc", "torch", "paceline_proto",
    "security",
    # and their like
    "aiohttp", "concurrent", "ctypes", "datetime", "google", "multiprocessing", "secrets", "select", "selectors",
    "signal", "subprocess", "uuid",
})
# fmt: on
# The simulator plays with seeded chance and measures itself, but must replay exactly.
SIM_MAY_IMPORT = frozenset({"random", "time", "os", "logging", "multiprocessing", "concurrent", "subprocess"})

ESCAPE = "# set-order:"

# Called with a set, these give something whose order, or whose choice among equals, is the set's.
ORDERED_FROM = frozenset({"list", "tuple", "iter", "enumerate", "zip", "map", "filter", "reversed", "dict", "deque"})
ORDERED_METHODS = frozenset({"join", "fromkeys", "extend", "chain"})
BY_KEY = frozenset({"min", "max", "sorted"})
# Called with a comprehension over a set, these forget the order again.
UNORDERED = frozenset({"set", "frozenset", "sorted", "any", "all", "len", "min", "max"})


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def pure_files(root: Path) -> list[Path]:
    """Files under the rules, in a fixed order."""
    found = [path for folder in PURE_FOLDERS for path in (root / folder).rglob("*.py")]
    found = [path for path in found if "io" not in path.relative_to(root).parts]
    found += [root / "gateway" / f"{name}.py" for name in PURE_GATEWAY]
    found += (root / "sim").rglob("*.py")
    return sorted(p for p in found if p.exists())


def check_tree(root: Path) -> list[Finding]:
    trees = {path: ast.parse(path.read_text(), str(path)) for path in pure_files(root)}
    attributes = declared_attributes(trees.values())
    findings = []
    for path, tree in trees.items():
        lines = path.read_text().splitlines()
        shown = path.relative_to(root)
        banned = BANNED_IMPORTS - SIM_MAY_IMPORT if shown.parts[0] == "sim" else BANNED_IMPORTS
        for line, text in [*imports(tree, banned), *identities(tree), *set_orders(tree, attributes)]:
            if ESCAPE not in lines[line - 1]:
                findings.append(Finding(shown, line, text))
    return sorted(findings, key=str)


def imports(tree: ast.AST, banned: frozenset[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case ast.Call(func=ast.Name(id="__import__")) | ast.Call(func=ast.Attribute(attr="import_module")):
                yield node.lineno, "imports a module by name at run time"
                continue
            case _:
                continue
        for module in modules:
            parts = module.split(".")
            if parts[0] in banned:
                yield node.lineno, f"a pure module imports {module}"
            elif "io" in parts[1:2]:
                yield node.lineno, f"a pure module imports the shell {module}"


def identities(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=("hash" | "id") as name)):
                yield node.lineno, f"{name}() differs between processes"


def set_orders(tree: ast.Module, attributes: frozenset[str]) -> Iterator[tuple[int, str]]:
    yield from _in_scope(tree, SetNames(attributes))


def _in_scope(scope: ast.AST, outer: SetNames) -> Iterator[tuple[int, str]]:
    names = outer.entering(scope)
    forgiven: set[ast.AST] = set()
    for node in _walk_scope(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _in_scope(node, names)
            continue
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.GeneratorExp() | ast.ListComp() as inner], keywords=[]):
                if name in UNORDERED:
                    forgiven.add(inner)
            case ast.SetComp():
                forgiven.add(node)
        for expression, text in _order_uses(node, forgiven):
            if is_set(expression, names):
                yield expression.lineno, f"{text} a set, whose order is not the same on every rank"


def _order_uses(node: ast.AST, forgiven: set[ast.AST]) -> Iterator[tuple[ast.expr, str]]:
    """Expressions whose order `node` depends on."""
    match node:
        case ast.For(iter=it) | ast.AsyncFor(iter=it):
            yield it, "iterates over"
        case ast.ListComp(generators=gens) | ast.GeneratorExp(generators=gens) | ast.DictComp(generators=gens):
            if node not in forgiven:
                yield from ((g.iter, "iterates over") for g in gens)
        case ast.Call(func=ast.Name(id=name), args=args) if name in ORDERED_FROM:
            yield from ((a, f"{name}() of") for a in args)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[*_, ast.keyword(arg="key")]) if name in BY_KEY:
            yield from ((a, f"{name}() with a key of") for a in args)
        case ast.Call(func=ast.Attribute(attr=name), args=args) if name in ORDERED_METHODS:
            yield from ((a, f"{name}() of") for a in args)
        case ast.Call(func=ast.Attribute(value=value, attr="pop"), args=[]):
            yield value, "pop() of"
        case ast.Starred(value=value):
            yield value, "unpacks"
        case ast.YieldFrom(value=value):
            yield value, "yields from"
        case ast.Assign(targets=[ast.Tuple() | ast.List()], value=value):
            yield value, "unpacks"


def _walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a scope, outer before inner; nested scopes are given but not entered."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd()
    findings = check_tree(root)
    for finding in findings:
        print(finding)
    print(f"purity: {len(pure_files(root))} files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
