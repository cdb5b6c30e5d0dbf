"""Jinja templates from strangers, run with limits.

jinja2's immutable sandbox keeps a template from reaching Python. What it does not do is bound what
a template takes: ten nested loops, `'x' * 10**10` or a string that doubles itself stop a process or
fill its memory. Here every operation that can grow is metered, by two rules:

1. What is made is bounded in size, one value and all together, and so is the time
   (template_meter.py).
2. Attributes, filters and globals are allow-lists.

Each operation then takes a bounded time, so that the clock, looked at in every operation, ends a
rendering soon after RENDER_S.
"""

import functools
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes, runtime
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from jinja2.visitor import NodeTransformer

from llmserve.chat.template_meter import (
    BINARY_CHECKS,
    FILTER_CHECKS,
    METHOD_CHECKS,
    STEP_BYTES,
    LimitReached,
    check_add,
    check_elements,
    check_format,
    check_size,
    check_width,
    joined_size,
    meter,
    written_size,
)
from llmserve.errors import InvalidArgument

# Published templates are 1 to 100 KB, of a token every six characters.
MAX_SOURCE = 2**18
# Compiling takes up to 4 KB and 25 us a token, white space between two not counted.
MAX_SOURCE_TOKENS = 2**15
_FILTERS = """abs attr capitalize center count d default dictsort e escape filesizeformat first
float forceescape format groupby indent int items join last length list lower map max min random
reject rejectattr replace reverse round safe select selectattr sort string sum title trim truncate
unique upper urlencode wordcount"""


_STR_METHODS = """capitalize casefold center count endswith find format format_map index isalnum
isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper
join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition
rsplit rstrip split splitlines startswith strip swapcase title upper zfill"""


def _words(text: str) -> list[str]:
    return text.split()


_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_words(_STR_METHODS)),
    list: frozenset(["copy", "count", "index"]),
    tuple: frozenset(["count", "index"]),
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
}
# Of jinja2's own objects everything without an underscore is open.
_RUNTIME_TYPES = (LoopContext, Namespace, Cycler, Joiner, runtime.Macro, runtime.BlockReference)


class _Refusal(TemplateError):
    """The template itself says that it cannot render this."""


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja2 under the meter; it is passed what the original wants."""
    check = FILTER_CHECKS.get(name)

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter.spend()
        if check is not None:
            check(*args, **kwargs)
        return meter.keep(function(*args, **kwargs))

    return metered


def _metered_test(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter.spend()
        return function(*args, **kwargs)

    return metered


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: Any = None) -> Any:
    check_elements(value)
    items = list(value)
    if attribute is not None:
        items = list(FILTERS["map"](context, items, attribute=attribute))
    check_size(joined_size(items, d))
    return meter.keep(FILTERS["join"](context.eval_ctx, items, d))


@pass_context
def _sum(context: Context, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    values = (
        iterable if attribute is None else FILTERS["map"](context, iterable, attribute=attribute)
    )
    for value in values:
        check_add(start, value)
        start = meter.keep(start + value)
    return start


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates want it: not escaped for HTML, and with json.dumps' own options."""
    written_size(value)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None and separators is None:
        return str(meter.keep(encoder.encode(value)))
    check_width("", len(indent) if isinstance(indent, str) else indent or 0)
    chunks = []
    for chunk in encoder.iterencode(value):
        meter.spend(len(chunk))
        chunks.append(chunk)
    return str(meter.keep("".join(chunks)))


# What the rewritten template calls at places where jinja2 calls nothing; no template can spell the
# names.
_COUNTED, _KEPT, _JOINED = " counted", " kept", " joined"


def _counted(iterable: Any) -> Any:
    """What a loop runs over, an operation an element."""
    return _Sized(iterable) if hasattr(iterable, "__len__") else _ticks(iterable)


def _ticks(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        meter.spend()
        yield item


class _Sized:
    """Loops ask for the length of what has one."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable

    def __len__(self) -> int:
        return len(self._iterable)

    def __iter__(self) -> Iterator[Any]:
        return _ticks(self._iterable)


def _joined(values: tuple[Any, ...]) -> str:
    check_size(written_size(values))
    return str(meter.keep("".join(map(str, values))))


def _keep(value: Any) -> Any:
    return meter.keep(value)


class _Rewrite(NodeTransformer):
    """Puts the meter where jinja2's sandbox has no hook: loops, literals, `~`, comparisons and
    slices."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _JOINED)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _filtered(node, _KEPT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _KEPT) if isinstance(node.arg, nodes.Slice) else node

    def _keep(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _KEPT)

    visit_List = visit_Dict = visit_Compare = _keep


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is a block."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} begins with an underscore")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _raise_exception(message: object = "") -> None:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:  # as templates call it
    if len(format) > 100:
        raise LimitReached("it formats the date with more than 100 characters")
    return datetime.now().strftime(format)


@pass_context  # so that nothing is computed while the template is compiled
def _finalize(_context: Context, value: Any) -> Any:
    if not isinstance(value, str):
        check_size(written_size(value))
        value = str(value)
    meter.spend(STEP_BYTES + len(value))
    return value


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.filters = {name: _metered_filter(name, FILTERS[name]) for name in _words(_FILTERS)}
        self.filters |= {"join": _join, "sum": _sum, "tojson": _tojson}
        self.filters |= {_COUNTED: _counted, _KEPT: _keep, _JOINED: _joined}
        self.tests = {name: _metered_test(function) for name, function in TESTS.items()}
        self.globals = {
            "range": self.globals["range"],  # the sandbox's, of at most 100,000 numbers
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Rewrite().visit(source), *args, **kwargs)

    def concat(self, pieces: Iterable[str]) -> str:
        parts = list(pieces)
        check_size(sum(map(len, parts)))
        return str(meter.keep("".join(parts)))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        for kind, names in _METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return isinstance(obj, _RUNTIME_TYPES)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, (args, kwargs))
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if check := BINARY_CHECKS.get(operator):
            check(left, right)
        return meter.keep(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter.spend()
        if isinstance(__obj, LoopContext) and args:
            args = (_counted(args[0]), *args[1:])
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and (check := METHOD_CHECKS.get(__obj.__name__)):
            if __obj.__name__ == "join":
                check_elements(args[0])
                args = (list(args[0]),)
            check(owner, *args, **kwargs)
        return meter.keep(super().call(__context, __obj, *args, **kwargs))


@functools.cache
def _environment() -> _Environment:
    return _Environment()


_SPACES = ("whitespace", "comment")


def compile_template(source: str, label: str) -> Template:
    """A template ready to run. Raises InvalidArgument that says where in `label` the syntax is
    wrong."""
    if len(source) > MAX_SOURCE:
        raise InvalidArgument(
            f"{label} has {len(source)} characters, more than the {MAX_SOURCE} allowed"
        )
    try:
        tokens = _environment().lex(source)
        num_tokens = sum(kind not in _SPACES for _, kind, _ in tokens)
        if num_tokens > MAX_SOURCE_TOKENS:
            raise InvalidArgument(
                f"{label} has {num_tokens} tokens of Jinja, more than the {MAX_SOURCE_TOKENS} "
                f"allowed"
            )
        return _environment().from_string(source)
    except InvalidArgument:
        raise
    except TemplateSyntaxError as error:
        raise InvalidArgument(f"{label} is not a template: line {error.lineno}: {error}") from error
    except Exception as error:  # nesting that Python's own compiler does not take
        raise InvalidArgument(f"{label} is not a template: {_describe(error)}") from error


def render_template(template: Template, variables: Mapping[str, object], label: str) -> str:
    """What the template makes of variables, which hold plain JSON data alone.

    Raises InvalidArgument with the template's own message where it refuses them, and with the place
    and the reason where it fails, reaches for what is closed to it, or takes too much.
    """
    pieces, size = [], 0
    meter.start()
    try:
        for piece in template.generate(variables):
            if piece:
                size += len(piece)
                check_size(size)
                pieces.append(piece)
    except _Refusal as error:
        raise InvalidArgument(f"{label} refuses the conversation: {error}") from error
    except LimitReached as error:
        raise InvalidArgument(f"{label} is stopped{_place(error)}: {error}") from error
    except SecurityError as error:
        raise InvalidArgument(f"{label} is stopped{_place(error)}: {error}") from error
    except Exception as error:  # whatever Python raises for what a template does
        raise InvalidArgument(f"{label} fails{_place(error)}: {_describe(error)}") from error
    finally:
        meter.stop()
    return "".join(pieces)


def _place(error: Exception) -> str:
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == "<template>"
    ]
    return f" at line {lines[-1]}" if lines else ""


def _describe(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
