"""Which expressions of a syntax tree are sets, as far as annotations and assignments tell.

In: syntax trees. Out: `is_set(expression, names)`. Errs towards silence: a name that is a set in one
place and something else in another is not called a set.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

SET_TYPES = frozenset({"set", "frozenset", "Set", "AbstractSet", "MutableSet", "FrozenSet"})
SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference"})
SET_OPERATORS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)


class SetNames:
    """Names known to be sets in a scope and in those around it; attributes by name alone."""

    def __init__(self, attributes: frozenset[str], names: frozenset[str] = frozenset()) -> None:
        self.attributes = attributes
        self.names = names

    def entering(self, scope: ast.AST) -> SetNames:
        """The names inside `scope`; what it binds itself hides what is outside."""
        yes: set[str] = set()
        no: set[str] = set()
        for name, annotation, value in _bindings(scope):
            known = SetNames(self.attributes, self.names | yes)
            sets = _names_set(annotation) if annotation is not None else value is not None and is_set(value, known)
            (yes if sets else no).add(name)
        return SetNames(self.attributes, (self.names - no) | (yes - no))


def is_set(node: ast.expr, names: SetNames) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Call(func=ast.Attribute(attr=method)) if method in SET_METHODS:
            return True
        case ast.Call(func=ast.Attribute(value=value, attr="copy"), args=[]):
            return is_set(value, names)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, SET_OPERATORS):
            # `d.keys() - other` is a set although neither side is one.
            return any(is_set(side, names) or _is_keys(side) for side in (left, right))
        case ast.IfExp(body=body, orelse=orelse):
            return is_set(body, names) or is_set(orelse, names)
        case ast.BoolOp(values=values):
            return any(is_set(v, names) for v in values)
        case ast.NamedExpr(value=value):
            return is_set(value, names)
        case ast.Name(id=name):
            return name in names.names
        case ast.Attribute(attr=name):
            return name in names.attributes
    return False


def declared_attributes(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Attribute names that are sets in every class that declares them."""
    yes: set[str] = set()
    no: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(body=body):
                    for item in body:
                        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                            (yes if _names_set(item.annotation) else no).add(item.target.id)
                case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=annotation):
                    (yes if _names_set(annotation) else no).add(name)
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                    if is_set(value, SetNames(frozenset())):
                        yes.add(name)
    return frozenset(yes - no)


def _bindings(scope: ast.AST) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """(name, annotation, value) of what a scope binds itself."""
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = scope.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            yield argument.arg, argument.annotation, None
    waiting: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop(0)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                continue
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                yield name, annotation, None
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield target.id, None, value
            case ast.For(target=ast.Name(id=name)):
                yield name, None, None
        waiting.extend(ast.iter_child_nodes(node))


def _names_set(annotation: ast.expr) -> bool:
    match annotation:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in SET_TYPES
        case ast.Subscript(value=ast.Name(id="Final" | "ClassVar"), slice=inner):
            return _names_set(inner)
        case ast.Subscript(value=value):
            return _names_set(value)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _names_set(left) or _names_set(right)
        case ast.Constant(value=str(text)):
            return _names_set(ast.parse(text, mode="eval").body)
    return False


def _is_keys(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("keys", "items")
