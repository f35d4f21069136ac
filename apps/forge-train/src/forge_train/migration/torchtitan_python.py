"""Reads torchtitan's Python configurations, functions that return a `Trainer.Config`, without running them."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError
from forge_train.migration.engine import SourceSetting, Unread
from forge_train.migration.literals import CODE, NOT_LITERAL, NotLiteral, callee, unread, value_of


@dataclass
class _Values:
    """What a function has computed so far: settings of its configuration, literals by name, calls by name."""

    settings: dict[str, SourceSetting] = field(default_factory=dict[str, SourceSetting])
    rest: list[Unread] = field(default_factory=list[Unread])
    config: str = ""
    literals: dict[str, Any] = field(default_factory=dict[str, Any])
    calls: dict[str, ast.expr] = field(default_factory=dict[str, ast.expr])


def read_python(module: ast.Module, path: Path, function: str | None) -> tuple[dict[str, SourceSetting], list[Unread]] | None:
    """Reads the configuration that a function returns; returns None if no function returns one.

    Args:
        function: name of the function; needed if the file has several.

    Raises:
        ForgeError: the function does not exist, or is needed and not given.
    """
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    returning = [name for name, node in functions.items() if _returns_a_configuration(node)]
    if not returning:
        return None
    if function is None and len(returning) > 1:
        shown = ", ".join(returning[:12]) + (", ..." if len(returning) > 12 else "")
        raise ForgeError(f"has {len(returning)} configurations; choose one with --function: {shown}")
    name = function or returning[0]
    if name not in functions:
        raise ForgeError(f"has no function {name!r}; its configurations are {', '.join(returning[:12])}")
    values = _run(functions[name], functions, frozenset())
    values.settings.setdefault("model.name", SourceSetting(path.resolve().parent.name))
    return values.settings, values.rest


def _returns_a_configuration(node: ast.FunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns).strip("'\"").endswith("Trainer.Config")


def _run(node: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], active: frozenset[str]) -> _Values:
    values = _Values()
    for statement in node.body:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Pass():
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                called = callee(value)
                if called in functions and called not in active | {node.name}:
                    before = values
                    values = _run(functions[called], functions, active | {node.name})
                    values.literals, values.calls, values.config = before.literals, before.calls, name
                    continue
                try:
                    values.literals[name] = value_of(value, values.literals)
                except NotLiteral:
                    values.calls[name] = value
                    values.literals.pop(name, None)
                if callee(value).endswith("Trainer.Config"):
                    values.config = name
                    _flatten(value, "", values)
            case ast.Assign(targets=[ast.Attribute() as target], value=value):
                dotted = ast.unparse(target)
                if values.config and dotted.startswith(f"{values.config}."):
                    _set(dotted.removeprefix(f"{values.config}."), value, values, statement)
                else:
                    values.rest.append(unread(statement, CODE))
            case ast.Return(value=ast.Name(id=name)) if name == values.config:
                break
            case ast.Return(value=ast.Call() as value) if callee(value).endswith("Trainer.Config"):
                _flatten(value, "", values)
                break
            case _:
                values.rest.append(unread(statement, CODE))
    return values


def _flatten(call: ast.expr, prefix: str, values: _Values) -> None:
    assert isinstance(call, ast.Call)
    for argument in call.args:
        values.rest.append(unread(argument, NOT_LITERAL))
    for keyword in call.keywords:
        if keyword.arg is None:
            values.rest.append(unread(keyword.value, CODE))
        else:
            _set(f"{prefix}{keyword.arg}", keyword.value, values, keyword.value)


def _set(key: str, value: ast.expr, values: _Values, statement: ast.AST) -> None:
    """Sets a key to a literal, or the keys below it to those of a call such as `TrainingConfig(steps=10)`."""
    node = values.calls.get(value.id, value) if isinstance(value, ast.Name) and value.id not in values.literals else value
    name, line = _named(key), getattr(statement, "lineno", None)
    for other in [item for item in values.settings if item == name or item.startswith(f"{name}.")]:
        del values.settings[other]
    try:
        values.settings[name] = SourceSetting(value_of(node, values.literals), line)
        return
    except NotLiteral:
        pass
    called = callee(node)
    tail = called.rpartition(".")[2] if not called.endswith(".Config") else called.split(".")[-2]
    arguments = node.args if isinstance(node, ast.Call) else []
    if name == "model_spec" and called.endswith("model_registry") and arguments:
        for item in arguments[:1]:
            try:
                values.settings["model.flavor"] = SourceSetting(value_of(item, values.literals), line)
            except NotLiteral:
                values.rest.append(unread(item, NOT_LITERAL))
        for keyword in node.keywords if isinstance(node, ast.Call) else []:
            values.rest.append(unread(keyword.value, f"is the argument {keyword.arg} of model_registry; {NOT_LITERAL}"))
    elif name == "optimizer" and tail == "default_adamw":
        values.settings["optimizer.name"] = SourceSetting("AdamW", line)
        _flatten(node, "optimizer.", values)
    elif name == "activation_checkpoint" and tail in _MODES:
        values.settings["activation_checkpoint.mode"] = SourceSetting(_MODES[tail], line)
        if _MODES[tail] == "selective":
            values.settings["activation_checkpoint.selective_ac_option"] = SourceSetting("op", line)
        _flatten(node, "activation_checkpoint.", values)
    elif name == "loss":
        values.settings["loss"] = SourceSetting(tail, line)
    elif called.endswith("Config") and name not in ("dataloader", "validation.dataloader"):
        _flatten(node, f"{key}.", values)
    else:
        shown = unread(statement, NOT_LITERAL)
        values.rest.append(
            Unread(f"{name} = {shown.text}" if statement is node or statement is value else shown.text, line, NOT_LITERAL)
        )


_MODES = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
_SECTIONS = {"profiler": "profiling", "validator": "validation"}
_TOP = {"hf_assets_path": "model.hf_assets_path", "dump_folder": "job.dump_folder"}


def _named(key: str) -> str:
    """Returns the name of a key in the table, which has the names of the TOML files where both exist."""
    section, dot, rest = key.partition(".")
    return _TOP.get(key, f"{_SECTIONS.get(section, section)}{dot}{rest}")
