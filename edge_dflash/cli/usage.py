"""Commands as their help shows them: names of values in capitals, no brackets around what must be given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


def opt(metavar: str, text: str, *names: str, **bounds: Any) -> Any:
    """An option of a command whose value the help calls ``metavar``."""
    return typer.Option(*names, metavar=metavar, help=text, **bounds)


def switch(name: str, text: str) -> Any:
    """An option without a value."""
    return typer.Option(name, help=text)


def take_flags(command: Callable[..., None], place: int, flags: Iterable[tuple[str, Any, Any, Any]]) -> None:
    """Show flags (name, type, default, option), which a command takes by its last parameter, at a place of its help."""
    own = list(signature(command, eval_str=True).parameters.values())
    own[place:] = [
        *(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
            for name, kind, default, option in flags
        ),
        *own[place:-1],
    ]
    command.__signature__ = Signature(own)  # type: ignore[attr-defined]


class Command(TyperCommand):
    """A command whose usage and arguments are plain words."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """BUNDLE for an argument that must be given, [BUNDLE] for one that may be."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments by their name alone, then options."""
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            given = [p.get_help_record(ctx) for p in self.get_params(ctx) if p.param_type_name == kind]
            rows = [row for row in given if row is not None]
            if kind == "argument":
                rows = [(name.split()[0].strip("[]{}"), text) for name, text in rows]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class MissingOptionError(typer.BadParameter):
    """An option that is needed here, though not always."""

    def __init__(self, name: str, context: typer.Context | None = None, instead: str = "") -> None:
        super().__init__(f"Missing option '--{name}'" + (f" (or give {instead})" if instead else ""), ctx=context)

    def format_message(self) -> str:
        """The message, as it is said of an option that is always needed."""
        return self.message
