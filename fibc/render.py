"""Templates to text: Jinja2 that refuses undefined names, with one filter for each kind of C++ literal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from fibc.errors import SchemaError


def c_int(value: int) -> str:
    """Return ``value`` as a C++ integer literal that holds it."""
    if isinstance(value, bool) or not isinstance(value, int):  # str() of an undefined name raises, and says so
        raise TypeError(f"c_int: needs an int, got {value}")
    if not -(2**63) < value < 2**63:
        raise ValueError(f"c_int: needs a value of 64 bits, got {value}")
    return str(value) if abs(value) < 2**31 else f"{value}LL"


def c_float(value: float) -> str:
    """Return ``value`` as the C++ literal of the nearest float32."""
    if not math.isfinite(value):
        raise ValueError(f"c_float: needs a finite value, got {value}")
    return f"{float(value)!r}f"


def c_bool(value: bool) -> str:
    """Return ``value`` as ``true`` or ``false``."""
    if not isinstance(value, bool):
        raise TypeError(f"c_bool: needs a bool, got {value}")
    return "true" if value else "false"


def c_string(value: str) -> str:
    """Return ``value`` as a C++ string literal of printable ASCII; other characters become UTF-8 octal escapes."""
    plain = (chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" for b in value.encode())
    return '"' + "".join(plain) + '"'


class Renderer:
    """Renders templates found under a list of directories, the first that has one wins. Same input, same bytes."""

    def __init__(self, roots: Sequence[Path], *, is_html: bool = False) -> None:
        """Look under ``roots``; values in HTML are escaped, those in C++ and Python go through filters."""
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([str(root) for root in roots]),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            auto_reload=False,  # one text per run, whatever an editor does meanwhile
            autoescape=is_html,
        )
        self._environment.filters |= {
            "c_int": c_int,
            "c_float": c_float,
            "c_bool": c_bool,
            "c_string": c_string,
            "py": repr,
            "json": json.dumps,
        }

    def __call__(self, name: str, values: Mapping[str, Any]) -> str:
        """Return template ``name`` (a path relative to a root) rendered with ``values``.

        Raises:
            SchemaError: If there is no such template, or it is not valid for these values.
        """
        try:
            return self._environment.get_template(name).render(values)
        except jinja2.TemplateNotFound as error:
            raise SchemaError(f"{error.name}: template not found") from error
        except jinja2.TemplateSyntaxError as error:
            raise SchemaError(f"{error.filename or name}:{error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise SchemaError(f"{name}: cannot be rendered: {error}") from error

    def source(self, name: str) -> str:
        """Return the text of template ``name`` as it stands in its file.

        Raises:
            SchemaError: If there is no such template.
        """
        loader = self._environment.loader
        assert loader is not None
        try:
            return loader.get_source(self._environment, name)[0]
        except jinja2.TemplateNotFound as error:
            raise SchemaError(f"{error.name}: template not found") from error

    def sources(self, name: str) -> dict[str, str]:
        """Return the text of template ``name`` and of all that it includes or imports, by name.

        Raises:
            SchemaError: If one of them is missing, not valid, or named by an expression.
        """
        found: dict[str, str] = {}
        pending = [name]
        while pending:
            current = pending.pop()
            if current in found:
                continue
            found[current] = self.source(current)
            try:
                tree = self._environment.parse(found[current])
            except jinja2.TemplateSyntaxError as error:
                raise SchemaError(f"{current}:{error.lineno}: {error.message}") from error
            for other in meta.find_referenced_templates(tree):
                if other is None:
                    raise SchemaError(f"{current}: must name what it includes by a literal")
                pending.append(other)
        return found
