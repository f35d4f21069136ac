"""`config.json` with an account of every key: read, ignored under a declared value, or refused by name. No key is dropped."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forge_core.errors import ConfigError, Fault, ForgeError
from forge_models.hf.ignorable import COMMON, HINTS, Allowed, accepts, equal

CONFIG = "config.json"
LARGEST, WHOLE = sys.float_info.max, 2**31
"""Bounds of numbers and of whole numbers."""

LEFT_OUT = "if it changes no logit, leave it out by convert --ignore {key} or model.from_hf_ignore"
"""How the user of a decoder's folder leaves out a key."""

Made = TypeVar("Made")


class Unsupported(ForgeError):
    """A folder in the Hugging Face format that cannot be read as what it claims to be, or says what Forge does not do."""


class Keys:
    """The keys of one `config.json`; `finish` refuses what was not asked for.

    A key that is absent has the default of its family, as in the reference implementation.

    Args:
        values: of the file.
        defaults: of the family.
        where: name of the file, for messages.
        ignores: keys without effect in this family, with the values that they may have; `COMMON` adds those of all families.
        ignore: keys that the user leaves out: unknown ones, and those of things that are not implemented.
        hint: how to leave one out.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        where: str,
        ignores: Mapping[str, Allowed] | None = None,
        ignore: Sequence[str] = (),
        hint: str = LEFT_OUT,
    ) -> None:
        self.values, self.where = dict(values), where
        self._defaults, self._ignores = defaults, {**COMMON, **(ignores or {})}
        self._asked: set[str] = set()
        self._settled: dict[str, Any] = {}
        self._wanted, self._ignored = tuple(ignore), set[str]()
        self._refusal: ValueError | None = None
        self._hint = hint
        self.faults: list[Fault] = []

    def given(self, key: str) -> bool:
        """Whether the file has a key, which from then on counts as read."""
        self._asked.add(key)
        return key in self.values

    def known(self, key: str) -> bool:
        """Whether the family has a key: those that may be absent have a default."""
        return key in self._defaults

    def settle(self, key: str, value: Any) -> None:
        """Notes what a key that may be given in several places amounts to: what a repetition of it is compared with."""
        self._settled[key] = value

    def ignored(self, key: str) -> bool:
        """Whether the user leaves out a key, or an entry `table.key`, that is not understood."""
        if key in self._wanted:
            self._ignored.add(key)
        return key in self._wanted

    def get(self, key: str) -> Any:
        """The value of a key, the family's default when it is absent; a key without a default is required."""
        self._asked.add(key)
        if key in self.values:
            return self.values[key]
        if key not in self._defaults:
            self.fault(key, "is missing")
            return None
        return self._defaults[key]

    def integer(self, key: str, optional: bool = False) -> int:
        """A positive integer; 0 stands for a fault or, where `optional`, for null."""
        value = self.get(key)
        if value is None and optional:
            return 0
        if type(value) is not int or not 0 < value < WHOLE:
            self.fault(key, f"expected a positive integer, not {value!r}")
            return 0
        return value

    def whole(self, key: str) -> int:
        """An integer that may be 0."""
        value = self.get(key)
        if type(value) is not int or not 0 <= value < WHOLE:
            self.fault(key, f"expected an integer of 0 or more, not {value!r}")
            return 0
        return value

    def number(self, key: str, optional: bool = False) -> float:
        """A positive number; 0.0 stands for a fault or, where `optional`, for null."""
        value = self.get(key)
        return 0.0 if value is None and optional else self.positive(key, value) or 0.0

    def positive(self, key: str, value: Any) -> float | None:
        """`value` as a float; None where it is not a positive number, which is a fault of `key`."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            self.fault(key, f"expected a positive number, not {value!r}")
            return None
        return float(value)

    def not_negative(self, key: str) -> float:
        """A number that may be 0."""
        value = self.get(key)
        return 0.0 if equal(value, 0) else self.positive(key, value) or 0.0

    def boolean(self, key: str) -> bool:
        """True or false; null counts as false."""
        value = self.get(key)
        if value is not None and type(value) is not bool:
            self.fault(key, f"expected true or false, not {value!r}")
        return value is True

    def only(self, key: str, *allowed: Any) -> Any:
        """A value that must be one of `allowed`."""
        value = self.get(key)
        if not any(equal(value, entry) for entry in allowed):
            known = " or ".join(json.dumps(entry) for entry in allowed)
            self.fault(key, f"{json.dumps(value)} is not implemented for this family; only {known} is")
        return value

    def make(self, kind: Callable[..., Made], **fields: Any) -> Made | None:
        """`kind(**fields)`; None when a key is at fault, or when `kind` refuses the fields, which `finish` then reports."""
        if self.faults or self._refusal:
            return None
        try:
            return kind(**fields)
        except ValueError as cause:
            self._refusal = cause
            return None

    def fault(self, key: str, message: str) -> None:
        self.faults.append(Fault(key, message, self.where))

    def finish(self) -> None:
        """Refuses what is left.

        Raises:
            ConfigError: all faults, with the name of every key that was not understood.
            Unsupported: values that are legal, but not together.
        """
        for key, value in self.values.items():
            if key in self._asked or self.ignored(key) or accepts(self._ignores.get(key, ()), value, self._resolved):
                continue
            message = "is not implemented" if key in self._ignores else "is not known for this family"
            hint = HINTS.get(key, self._hint.format(key=key))
            self.faults.append(Fault(key, f"{_short(value)} {message}", self.where, hint))
        for key in self._wanted:
            if key in self._asked:
                self.fault(key, "decides what the model computes, so it cannot be ignored; change the file instead")
            elif key not in self._ignored:
                self.fault(key, "is to be ignored, but the file has no such key")
        if self.faults:
            raise ConfigError(dict.fromkeys(self.faults))
        if self._refusal:
            raise Unsupported(f"{self.where}: {self._refusal}") from self._refusal

    def _resolved(self, key: str) -> Any:
        return self._settled.get(key, self.values.get(key, self._defaults.get(key)))


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        Unsupported: the file is missing, or does not hold a JSON object.
    """
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise Unsupported(f"{path} cannot be read: {cause.strerror}; give a folder with config.json and safetensors") from cause
    except ValueError as cause:
        raise Unsupported(f"{path} is not valid JSON: {cause}") from cause
    if not isinstance(values, dict):
        raise Unsupported(f"{path} holds no JSON object")
    return values


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
