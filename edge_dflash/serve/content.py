"""The content of a message of the OpenAI API: a text, or parts that are texts and images. No address is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_dflash.errors import RequestError, short
from edge_dflash.text.images import ROLES
from edge_dflash.text.template import content_text

DETAILS = ("auto", "low", "high")  # without effect: an image is resized as the model's processor does
_URL = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'


def read_content(content: Any, role: str, where: str) -> str | list[Mapping[str, object]] | None:
    """Content as the planner takes it. Raises RequestError, naming ``where``, for anything else."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return content_text(content, where)
    if role not in ROLES:
        raise RequestError(f"{where} of role {role} holds an image; a user shows images")
    return [
        _image(part, f"{where}[{at}]") if _is_image(part) else _text(part, where, at) for at, part in enumerate(content)
    ]


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def _text(part: object, where: str, at: int) -> Mapping[str, object]:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise RequestError(f'{where}[{at}] is {short(part)}; give parts {{"type": "text", "text": "..."}} or {_URL}')
    return {"type": "text", "text": content_text([part], where) or ""}


def _image(part: Mapping[str, Any], where: str) -> Mapping[str, object]:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(url, str):
        raise RequestError(f"{where} is no image ({short(given)}); give {_URL}")
    odd = [key for key in part if key not in ("type", "image_url")] + [k for k in given if k not in ("url", "detail")]
    if odd:
        raise RequestError(f"{where}: {odd[0]!s:.60} is unknown here; give {_URL}")
    if given.get("detail", "auto") not in DETAILS:
        raise RequestError(f"{where}.image_url.detail is {short(given['detail'])}; give one of {', '.join(DETAILS)}")
    if not url.startswith("data:"):
        raise RequestError(f"{where}.image_url.url is {short(url)}; nothing is fetched: give data:image/png;base64,...")
    return {"type": "image", "image": url}
