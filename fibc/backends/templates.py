"""A backend's kernel templates: which serve a definition, the spaces of those, and what a rendering begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fibc.backends.base import Mismatch
from fibc.backends.match import Match, match
from fibc.errors import InputError
from fibc.paths import TEMPLATES
from fibc.render import Renderer
from fibc.schema.candidate import ConfigValue, Target
from fibc.schema.definition import DTYPE_BITS, Definition
from fibc.schema.digest import digest_json, digest_text
from fibc.schema.feature import FeatureKey
from fibc.schema.space import Config, Space, Tunable
from fibc.schema.template import SIZE_NAME, Template, load_templates

BUILTIN_TEMPLATES = TEMPLATES / "kernels"


class TemplateSet(Mapping[str, Template]):
    """The templates of one backend, by name.

    Attributes:
        render: Renders a source that lies beside them.
    """

    def __init__(self, backend: str, directories: Sequence[Path], lacks: Callable[[Template], str]) -> None:
        """Load the templates that fibc has, and those of more directories.

        Args:
            lacks: Says what the target lacks for a template; empty where it lacks nothing.

        Raises:
            SchemaError: With every problem of every template.
        """
        roots = (BUILTIN_TEMPLATES, *directories)
        self._templates = {template.name: template for template in load_templates(roots, backend)}
        self._lacks = lacks
        self._digests: dict[str, str] = {}
        self.render = Renderer(roots)

    def __getitem__(self, name: str) -> Template:
        return self._templates[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._templates)

    def __len__(self) -> int:
        return len(self._templates)

    def match(self, template: Template, definition: Definition) -> Match | str:
        """Return how a template serves a definition on the target, or why it does not."""
        return self._lacks(template) or match(template, definition)

    def matched(self, template: Template, definition: Definition) -> Match:
        """Return how a template serves a definition.

        Raises:
            InputError: If it does not.
        """
        found = self.match(template, definition)
        if isinstance(found, str):
            raise InputError(f"{template.name}: does not serve {definition.name}: {found}")
        return found

    def serving(self, definition: Definition) -> list[Template]:
        return [template for template in self.values() if isinstance(self.match(template, definition), Match)]

    def texts(self, definition: Definition) -> list[Any]:
        """Return all that candidates of a definition follow from in templates, for a fingerprint."""
        return [[item.name, repr(item), self.render.sources(item.source_name)] for item in self.serving(definition)]

    def text_digest(self, template: Template) -> str:
        """Return the digest of a template's files and of all that its source includes, as they were when first asked.

        Every key asks for every template's, and reading the sources for what they include takes 7 ms.
        """
        if template.name not in self._digests:
            sources = self.render.sources(template.source_name)
            self._digests[template.name] = digest_json([template.digest, sources])
        return self._digests[template.name]

    def spaces(
        self, definition: Definition, space: Callable[[Template, Match], Space | str]
    ) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        """Return the spaces of the templates that serve a definition, and why the others do not.

        Args:
            space: Of a template that matches; or why there is none.
        """
        spaces: list[Space] = []
        mismatches: list[Mismatch] = []
        for template in self.values():
            found = self.match(template, definition)
            offered = found if isinstance(found, str) else space(template, found)
            if isinstance(offered, Space):
                spaces.append(offered)
            else:
                mismatches.append(Mismatch(template.name, offered))
        return tuple(spaces), tuple(mismatches)


def names_of(template: Template, definition: Definition, found: Match) -> dict[str, ConfigValue]:
    """Return what the definition fixes of the names that laws may use: constant axes, dtypes and their bytes."""
    return {
        **{axis: definition.const_axes[found.axes[axis]] for axis in template.const_axes},
        **found.dtypes,
        **{f"{variable}_bytes": DTYPE_BITS[dtype] // 8 for variable, dtype in found.dtypes.items()},
    }


def size_of(key: FeatureKey) -> int:
    """Return the upper end of a key's first feature, in elements."""
    return key.cell.bounds[0][1] if key.cell.bounds else 1


def space_of(template: Template, key: FeatureKey, names: Mapping[str, ConfigValue], text_digest: str) -> Space:
    """Return a template's whole space at a key, its first guess in front.

    Args:
        names: What laws may use beside tunables and the key's size.
        text_digest: Of the template's text.
    """
    tunables = tuple(Tunable(name, choices) for name, choices in template.tunables.items())
    constants = {**names, SIZE_NAME: size_of(key)}
    return Space(template.name, tunables, template.laws(), constants, text_digest, starts=template.guesses())


def axes_in_call(template: Template, definition: Definition, found: Match) -> dict[str, int]:
    """Return a template's axes as C++ takes them: a constant one's size, another one's index into ``call->axes``."""
    positions = list(definition.axes)
    return {
        axis: definition.const_axes[name] if axis in template.const_axes else positions.index(name)
        for axis, name in found.axes.items()
    }


def headline(template: Template, target: Target) -> str:
    return f"Generated by fibc from {template.name} for {target}: do not edit."


def settings(config: Config) -> str:
    return ", ".join(f"{name} = {value}" for name, value in config) or "no tunables"


def banner(template: Template, target: Target, config: Config, body: str, *, comment: str = "//") -> str:
    """Return the lines above a rendered ``body``: where it comes from, its tunables, its digest."""
    lines = (headline(template, target), settings(config), f"digest {digest_text(body)}")
    return "".join(f"{comment} {line}\n" for line in lines)
