"""Chat templates in Jinja, in an environment equal to that of transformers, with the origin of each character of the output."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forge_core.errors import DataError
from forge_data.chat.traced import LEARNED, Traced, flags_of, joined, traced, untrusted


class Template:
    """A compiled template.

    Attributes:
        marks: whether the template marks the assistant's words with `{% generation %}`.
    """

    def __init__(self, text: str) -> None:
        """
        Raises:
            DataError: the text is not valid Jinja.
        """
        self._environment = _Environment()
        try:
            parsed = self._environment.parse(text)
            self._compiled = self._environment.from_string(text)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template is not valid Jinja: {error}") from error
        self.marks = any(True for call in parsed.find_all(nodes.CallBlock) if _is_generation(call))

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, opening: bool, tools: Any, tokens: Mapping[str, Any]
    ) -> list[Traced]:
        """Renders messages; returns the text in the parts in which the template writes it.

        Args:
            messages: JSON objects; their strings are not trusted, except roles that are plain words.
            opening: opens the assistant's turn at the end.
            tools: a list of JSON objects, or None.
            tokens: special tokens, such as `bos_token`.

        Raises:
            DataError: the template cannot be rendered, or the origin of some text cannot be determined.
        """
        given = {"messages": [_message(message) for message in messages], "tools": untrusted(tools), "documents": None}
        try:
            parts = self._compiled.generate(**tokens, **given, add_generation_prompt=opening)
            return [joined([part]) for part in parts]
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template cannot be rendered: {error}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise DataError(f"the chat template cannot be rendered: {type(error).__name__} {error}") from error


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Field names of an assistant's reasoning. If a message has one of the first two, transformers passes it to templates as both."""


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message for templates: without null fields, with plain roles as trusted text."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning} | kept | {"reasoning_content": reasoning}
    role = kept.get("role")
    # Many templates build a control token from the role; a role of letters cannot forge another one.
    return untrusted(kept) | ({"role": role} if isinstance(role, str) and role.replace("_", "").isalnum() else {})


class UnknownToken(jinja2.Undefined):
    """A special token that may not exist. It is undefined for the template, and writing it is an error."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        where = "set template to the folder of the tokenizer, or to its tokenizer_config.json"
        super().__init__(f"the template writes {name}, which is unknown; {where}", name=name)

    __str__ = jinja2.StrictUndefined.__str__


class _Concatenation(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802 (Jinja's name)
        """Compiles `~`, which Jinja would join into plain strings."""
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(environment.finalize(")
            self.visit(part, frame)
            self.write(")), ")
        self.write("))")


class _Generation(Extension):
    """The tag `{% generation %}`, which contains the assistant's words."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("said"), [], [], body).set_lineno(line)

    @staticmethod
    def said(caller: Callable[[], str]) -> Traced:
        """Returns the block's text with the flag `LEARNED`."""
        text = joined([caller()])
        return Traced(text, bytes(flag | LEARNED for flag in text.flags))


def _is_generation(call: nodes.CallBlock) -> bool:
    method = call.call.node
    return isinstance(method, nodes.ExtensionAttribute) and method.name == "said"


class _Environment(ImmutableSandboxedEnvironment):
    """Every operation of a template on strings goes through the methods of `Traced`, or through this class."""

    code_generator_class = _Concatenation
    intercepted_binops = frozenset(("%",))
    concat = staticmethod(joined)  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_written)
        self.filters = {name: _filter(function) for name, function in self.filters.items()} | {"tojson": _to_json}
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Evaluates `%`, which may format a string."""
        if isinstance(left, str):
            return traced(lambda text, rest: str.__mod__(text, rest), (left, right), {})
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method for a template."""
        owner = getattr(function, "__self__", None) if isinstance(function, BuiltinMethodType) else None
        if type(owner) is str:  # a string of the template: methods of str would lose the origin of arguments
            function = getattr(Traced(owner, flags_of(owner)), function.__name__)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """Returns the formatter for `"...".format(...)`, which the sandbox intercepts."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        if isinstance(value.__self__, Traced) and any(flag == 0 for flag in value.__self__.flags):
            raise jinja2.TemplateError("the chat template uses text of a message as a format string; Forge does not support this")
        return lambda *args, **kwargs: traced(
            lambda _, *given, **named: str(formatted(*given, **named)), (value.__self__, *args), kwargs
        )


def _written(value: Any) -> Any:
    """Returns a value as it is written to the text."""
    if isinstance(value, str) or value is None or isinstance(value, int | float | jinja2.Undefined):
        return value
    return Traced(str(value))


def _filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter so that its text is traced."""
    hidden = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja passes its own argument first

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        own = args[:hidden]
        return traced(lambda *given, **named: function(*own, *given, **named), args[hidden:], kwargs)

    return filtered


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> Traced:
    """The filter `tojson`. Its input is not trusted, so neither is the JSON."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return Traced(text)


def _raise(message: str) -> NoReturn:
    """`raise_exception`: templates call it for turns that they do not support."""
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """`dict`, limited to the methods that templates may use."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    @staticmethod
    def fromkeys(keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r} that begins with an underscore")
